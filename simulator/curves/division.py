"""The division of a capacity over layers that misses least: pools of whole experts, from the curve of each layer.

Pools of layers share nothing, so the misses of a division are the sum of what each layer misses in its own pool. A
dynamic programme adds layer after layer and keeps, of all divisions, those that no other beats in both bytes and
misses. It is exact for every shape of curve and for layers whose experts differ in bytes. Only pools whose misses the
demand alone decides take part.

At any price of a byte, what a division misses and pays is at least the sum of what each layer would choose alone. So a
division of some layers is given up where even this rest would make it miss more than a division that is known.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moereplay.simulator.capacity import by_layer
from moereplay.simulator.curves.curve import Curve
from moereplay.simulator.errors import ConfigError
from moereplay.traces.schema import Geometry

HALVINGS = 100  #: of a price
ROUNDING = 0.5  #: of a limit in floats, in misses


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
    held, missed = np.outer(sizes, pools - pools[0]), curve.layer_misses[:, pools - 1]
    price, most = _price(held, missed, spare)
    alone = (missed + price * held).min(1)
    order, rest, taken = np.argsort(sizes, kind="stable"), alone.sum(), list[np.ndarray]()
    taking = missing = np.zeros(1, np.int64)  # of the divisions of the layers so far
    for layer in order:  # layers of one size together: fewer sums differ
        rest -= alone[layer]
        taking = np.add.outer(taking, held[layer]).ravel()
        missing = np.add.outer(missing, missed[layer]).ravel()
        limit = missing + price * (taking - spare) + rest
        kept = _unbeaten(taking, missing, np.flatnonzero((taking <= spare) & (limit <= most + ROUNDING)))
        taking, missing = taking[kept], missing[kept]
        taken.append(kept)
    experts, at = np.zeros(len(order), np.int64), len(taking) - 1
    for layer, kept in zip(order[::-1], taken[::-1], strict=True):
        at, chosen = divmod(int(kept[at]), len(pools))
        experts[layer] = pools[chosen]
    return Division(tuple(experts.tolist()), int(missing[-1]), int(pools[0]))


def _price(held: np.ndarray, missed: np.ndarray, most: int) -> tuple[float, int]:
    """Return the lowest price of a byte, in misses, at which layers choose at most so many, and what they then miss.

    Both arrays are (L, C), by layer and choice.
    """
    low, high, layers = 0.0, float(missed.max()) + 1, np.arange(len(held))  # no byte is worth the highest price
    for _ in range(HALVINGS):
        price = (low + high) / 2
        fits = held[layers, (missed + price * held).argmin(1)].sum() <= most
        low, high = (low, price) if fits else (price, high)
    return high, int(missed[layers, (missed + high * held).argmin(1)].sum())


def _unbeaten(held: np.ndarray, missed: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Return, by rising bytes, the places of what misses less than everything of no more bytes."""
    rising = among[np.lexsort((missed[among], held[among]))]
    fewest = np.minimum.accumulate(missed[rising])
    return rising[np.append(True, fewest[1:] < fewest[:-1])]
