"""Numbers that recorders leave out: MoE layers from 0 on, and where a request begins if nothing says it."""

from __future__ import annotations

import numpy as np

from moereplay.traces.schema import MOST_LAYERS, TraceError


def moe_layers(found: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """MoE layers (N,) from 0 on, in the order of the model's own numbers (N,), and what to say if they differ."""
    numbers, layer = np.unique(found, return_inverse=True)
    return layer, renumbering(numbers)


def renumbering(numbers: np.ndarray) -> list[str]:
    """What to say if the model's own numbers of its MoE layers (L,), rising, are not 0 and on."""
    count = len(numbers)
    if count > MOST_LAYERS:
        raise TraceError(f"{count:,} layers; expected at most {MOST_LAYERS:,}: is the layer another column?")
    if numbers[-1] == count - 1:
        return []
    listed = f"{numbers[0]}..{numbers[-1]}" if numbers[-1] - numbers[0] == count - 1 else _listed(numbers)
    return [f"layers {listed} of the file are MoE layers 0..{count - 1}"]


def _listed(numbers: np.ndarray) -> str:
    return ", ".join(map(str, numbers[:4].tolist())) + (f", ... {numbers[-1]}" if len(numbers) > 4 else "")


class Restarts:
    """`restarts` of a file that is read some rows at a time."""

    def __init__(self, repeats: bool = False) -> None:
        self._repeats = repeats
        self._last: dict[int, tuple[int, int]] = {}  #: token and restarts of the last row, by stream

    def add(self, token: np.ndarray, stream: np.ndarray) -> np.ndarray:
        """How often the token has fallen back before each of the next rows (N,), within all rows of the stream."""
        streams, first, row = np.unique(stream, return_index=True, return_inverse=True)
        before = [self._fallen(each, at) for each, at in zip(streams.tolist(), token[first].tolist(), strict=True)]
        request = restarts(token, stream, self._repeats) + np.array(before)[row]
        last = len(stream) - 1 - np.unique(stream[::-1], return_index=True)[1]
        ended = zip(token[last].tolist(), request[last].tolist(), strict=True)
        self._last.update(zip(streams.tolist(), ended, strict=True))
        return request

    def _fallen(self, stream: int, token: int) -> int:
        """Restarts of a stream up to its next row, which has this token."""
        last, fallen = self._last.get(stream, (token - 1, 0))
        return fallen + (token <= last if self._repeats else token < last)


def restarts(token: np.ndarray, stream: np.ndarray, repeats: bool = False) -> np.ndarray:
    """How often the token has fallen back before each row (N,), within rows of the same `stream`, such as a layer.

    Rows may go token by token or layer by layer. `repeats`: an equal token is a restart as well.
    """
    order = np.argsort(stream, kind="stable")
    same, step = np.diff(stream[order]) == 0, np.diff(token[order])
    falls = np.concatenate([[0], np.cumsum(same & (step <= 0 if repeats else step < 0))])
    starts = np.concatenate([[True], ~same])
    before = falls[starts][np.cumsum(starts) - 1]
    request = np.empty_like(falls)
    request[order] = falls - before
    return request
