"""The stays of a demand stream: from one use of an expert to its next, the bytes that it occupies if the next use hits.

The time line of a pool is cut into *places*, each with *room* for some bytes. Choosing stays so that those at each
place fit its room is choosing hits; `unequal.py` says how many they can be.

- Relaxed: a place is what lies between two look-ups, with room for the pool's bytes.
- Forced: a place is a look-up, with room for what is left beside the experts that it demands, and a stay lies over the
  look-ups between its two. Where a look-up demands more than the pool holds, nothing stays over it, and another place
  follows, with room for the pool's bytes, on which the experts that it leaves lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moereplay.simulator.curves.stream import NOWHERE, Cut, Demands, spans
from moereplay.simulator.jit.calls import compiled

ALWAYS = 0  #: the entry of `Line.told` that counts hits which need no room


class Stays(NamedTuple):
    """The n stays of one pool that need room, over P places, in the order in which they begin."""

    begin: np.ndarray  #: (n,) int32: the first place
    end: np.ndarray  #: (n,) int32: the place after the last
    size: np.ndarray  #: (n,) int64: bytes
    room: np.ndarray  #: (P,) int64: bytes
    always: int  #: hits that need no room


class Line(NamedTuple):
    """The time line as far as it has been walked."""

    begin: np.ndarray  #: (m,) int32, a stay for each warm expert and each access
    end: np.ndarray  #: (m,) int32; NOWHERE where no use follows
    size: np.ndarray  #: (m,) int64
    room: np.ndarray  #: (P,) int64
    open: np.ndarray  #: (experts of the model,) int64: the stay that its next use ends, or NOWHERE
    told: np.ndarray  #: (3,) int64: ALWAYS, places and stays so far


def _walk(demands, first, last, cut, sizes, pool, forced, line):
    """Walk steps [first, last): end the stays of what is demanded, and begin new ones."""
    place, stays = line.told[1], line.told[2]
    for step in range(first, last):
        layer = step % cut.layers
        if layer == 0 and demands.fresh[step // cut.layers]:
            line.open[:] = NOWHERE
        begin, stop, size = demands.offsets[step], demands.offsets[step + 1], sizes[layer]
        together = stop - begin if cut.atomic else 1
        for group in range(begin, stop, max(1, together)):
            after = place + 1 if forced else place
            for at in range(group, group + together):
                x = layer * cut.experts + np.int64(demands.expert[at])
                if line.open[x] != NOWHERE:
                    line.end[line.open[x]] = place
                line.begin[stays], line.end[stays], line.size[stays] = after, NOWHERE, size
                line.open[x] = stays
                stays += 1
            if forced:
                line.room[place] = max(0, pool[0] - together * size)
                place += 1
            if not forced or together * size > pool[0]:
                line.room[place] = pool[0]
                place += 1
    line.told[1], line.told[2] = place, stays


def _keep_real(line):
    """Move the stays that end and need room to the front, in their order; count those that need none."""
    kept = 0
    for n in range(line.told[2]):
        if line.end[n] == NOWHERE:
            continue
        if line.end[n] == line.begin[n]:
            line.told[ALWAYS] += 1
            continue
        line.begin[kept], line.end[kept], line.size[kept] = line.begin[n], line.end[n], line.size[n]
        kept += 1
    line.told[2] = kept


WALK, KEEP_REAL = compiled(_walk), compiled(_keep_real)


def stays_of(
    demands: Demands, cut: Cut, sizes: Sequence[int], pool: int, forced: bool, warm: Sequence[int] = ()
) -> Stays:
    """Return the stays of one pool of all layers.

    `sizes`: the bytes of an expert, by layer; `pool`: bytes; `warm`: experts of the model that are cached at the start.
    """
    each, room = np.array(sizes, np.int64), np.array([pool], np.int64)
    line = _empty(demands, cut, each, pool, forced, len(warm))
    for n, x in enumerate(warm):
        line.begin[n], line.end[n], line.size[n], line.open[x] = 0, NOWHERE, each[x // cut.experts], n
    line.told[2] = len(warm)
    for first, last in spans(demands, lambda steps: None):
        WALK(demands, first, last, cut, each, room, forced, line)
    KEEP_REAL(line)
    always, places, kept = line.told.tolist()
    return Stays(line.begin[:kept], line.end[:kept], line.size[:kept], line.room[:places], always)


def _empty(demands: Demands, cut: Cut, sizes: np.ndarray, pool: int, forced: bool, warm: int) -> Line:
    many = np.diff(demands.offsets)
    stays, looked_up = int(demands.offsets[-1]) + warm, np.count_nonzero(many) if cut.atomic else int(many.sum())
    layer = np.arange(len(many)) % cut.layers
    beyond = int(np.count_nonzero(many * sizes[layer] > pool)) if forced and cut.atomic else 0
    places = np.zeros(looked_up + beyond + 1, np.int64)
    begin, end = np.zeros(stays, np.int32), np.zeros(stays, np.int32)
    open_ = np.full(cut.layers * cut.experts, NOWHERE, np.int64)
    return Line(begin, end, np.zeros(stays, np.int64), places, open_, np.zeros(3, np.int64))
