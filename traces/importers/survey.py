"""What the ids of an engine's dump say before they are read: which layers route, how many ranks are used.

Engines dump ids for every hidden layer. One without experts keeps what its buffer was filled with, the same number in
every place, and so does a rank beyond the model's k.
"""

from __future__ import annotations

import numpy as np

from moereplay.traces.schema import TraceError, check_values


class Survey:
    """Ids (T, L, k) of a whole source, a part at a time."""

    def __init__(self) -> None:
        self._least = self._most = np.zeros((0, 0), np.int64)  #: (L, k) each

    def add(self, ids: np.ndarray, place: str) -> None:
        """Look at some tokens. Raises TraceError for other layers or another k than before, and for what is no id."""
        if ids.ndim != 3 or ids.dtype.kind not in "iu" or not ids.size:
            raise TraceError(f"{place} is {ids.dtype}{ids.shape}; expected ids on the axes token, layer, rank")
        check_values(ids, "chosen", place)
        least, most = ids.min(0).astype(np.int64), ids.max(0).astype(np.int64)
        if not self._least.size:
            self._least, self._most = least, most
        if least.shape != self._least.shape:
            raise TraceError(f"{place} has (layers, k) = {least.shape}; the first has {self._least.shape}")
        self._least, self._most = np.minimum(self._least, least), np.maximum(self._most, most)

    @property
    def seen(self) -> bool:
        """Whether there were any ids."""
        return bool(self._least.size)

    @property
    def routes(self) -> np.ndarray:
        """(L,) whether a layer routes: not if every place of every token holds the same number."""
        least, most = self._least[:, : self.k].min(1), self._most[:, : self.k].max(1)
        return (least < most) | ((self.k == 1) & (most >= 0))

    @property
    def k(self) -> int:
        """Ranks that are used, at least 1: the others are -1 throughout."""
        used = np.flatnonzero(self._most.max(0) >= 0)
        return int(used[-1]) + 1 if len(used) else 1

    @property
    def highest(self) -> int:
        """The largest id of a layer that routes, -1 if none does."""
        return int(self._most[self.routes].max(initial=-1))

    def kept(self, ids: np.ndarray) -> np.ndarray:
        """Ids (T, L, k) of the layers that route and the ranks that are used."""
        return ids[:, self.routes, : self.k]

    def notes(self) -> list[str]:
        """What is left out of the ids."""
        dense, width = np.flatnonzero(~self.routes).tolist(), self._least.shape[1]
        ranks = f"ids are padded from {self.k} to {width} per token; the padding is left out"
        layers = f"layers {', '.join(map(str, dense))} hold one number throughout (dense): left out"
        return [layers] * bool(dense) + [ranks] * (self.k < width)
