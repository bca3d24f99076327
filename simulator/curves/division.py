"""The division of a capacity over layers that misses least: pools of whole experts, from the curve of each layer.

Pools of layers share nothing, so the misses of a division are the sum of what each layer misses in its own pool. A
dynamic programme adds layer after layer and keeps, of all divisions, those that no other beats in both bytes and
misses. It is exact for every shape of curve and for layers whose experts differ in bytes. Only pools whose misses the
demand alone decides take part.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moereplay.simulator.capacity import by_layer
from moereplay.simulator.curves.curve import Curve
from moereplay.simulator.errors import ConfigError
from moereplay.traces.schema import Geometry


class Division(NamedTuple):
    """Pools of all layers, and what they miss together."""

    experts: tuple[int, ...]
    misses: int
    least: int  #: experts of a pool, below which times decide

    @property
    def capacity(self) -> str:
        """The division as a replay with scope `per_layer` takes it."""
        return by_layer(self.experts)


def best_division(curve: Curve, geometry: Geometry, total: int) -> Division:
    """Return the division of `total` bytes with the fewest misses; of several, one with the fewest bytes.

    `curve` is of scope `per_layer`. Every layer has an expert or more. Raises ConfigError if no division of that size
    is decided by the demand.
    """
    pools = np.flatnonzero(curve.decided & ~curve.replayed) + 1  # experts
    sizes = np.array(geometry.expert_bytes, np.int64)
    spare = total - int(pools[0] * sizes.sum())
    if spare < 0:
        raise ConfigError(
            f"no division of {total:,} bytes: below {total - spare:,} in equal pools a step may demand more than its "
            "pool holds, so that times decide; pass --contract sequential or --passes token, or divide more"
        )
    order = np.argsort(sizes, kind="stable")  # layers of one size together: fewer sums differ
    more, held, missed, taken = pools - pools[0], np.zeros(1, np.int64), np.zeros(1, np.int64), list[np.ndarray]()
    for layer in order:
        held = np.add.outer(held, more * sizes[layer]).ravel()
        missed = np.add.outer(missed, curve.layer_misses[layer, pools - 1]).ravel()
        kept = _unbeaten(held, missed, spare)
        held, missed = held[kept], missed[kept]
        taken.append(kept)
    experts, at = np.zeros(len(order), np.int64), len(held) - 1
    for layer, kept in zip(order[::-1], taken[::-1], strict=True):
        at, chosen = divmod(int(kept[at]), len(pools))
        experts[layer] = pools[chosen]
    return Division(tuple(experts.tolist()), int(missed[-1]), int(pools[0]))


def _unbeaten(held: np.ndarray, missed: np.ndarray, most: int) -> np.ndarray:
    """Return, by rising bytes up to `most`, the places of what misses less than everything of no more bytes."""
    fits = np.flatnonzero(held <= most)
    rising = fits[np.lexsort((missed[fits], held[fits]))]
    fewest = np.minimum.accumulate(missed[rising])
    return rising[np.append(True, fewest[1:] < fewest[:-1])]
