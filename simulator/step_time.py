"""When the transfers of a step land and when its compute ends, in closed form: what the engines do event by event.

One statement for all that compute times without an engine: the least time (`limits/least_time.py`) and predictions from
logs (`calibration/prediction.py`). Experts of a step have equal bytes and cross one link, nothing contends, and times
count from the step's gate. Amounts are integers or floats, or arrays with a value for each of many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Amount = Any  #: a number, or an array of one for each step


def landings(issued: Sequence[Amount], depth: int, latency: Amount, wire: Amount, start: Amount = 0) -> list[Amount]:
    """Return when transfers land that are issued one after the other.

    As many are on the link at once as it is deep: latencies overlap, bytes do not. Transfer i begins when it is issued
    and i - depth has landed; lands(i) = max(begins(i) + latency, lands(i - 1)) + wire. `start` is more latency on an
    idle link.
    """
    lands: list[Amount] = []
    for i, asked in enumerate(issued):
        begins = np.maximum(asked, lands[i - depth]) if i >= depth else asked
        ready = begins + latency + (np.where(begins > lands[-1], start, 0) if lands else start)
        lands.append((np.maximum(ready, lands[-1]) if lands else ready) + wire)
    return lands


def landings_at_once(many: int, depth: int, latency: int, wire: Amount) -> np.ndarray:
    """Return the landings of `many` transfers that are issued at the gate, (many, ...), without the recurrence.

    Either the wire is busy from the first latency on, or each turn of `depth` transfers waits for a latency again.
    """
    i = np.arange(many, dtype=np.int64).reshape(many, *(1,) * np.ndim(wire))
    turn, place = np.divmod(i, depth)
    return np.maximum(latency + (i + 1) * wire, (turn + 1) * (latency + wire) + place * wire)


OfMiss = Callable[[int, int], Amount]  #: what the i-th miss of each of the first n steps has


def compute_ends(hits: np.ndarray, misses: np.ndarray, lands: OfMiss, runs: OfMiss) -> np.ndarray:
    """Return when compute of each step ends: it runs the hits, which takes `hits`, then each miss when it has landed.

    Steps are in the order of `misses`, the most first.
    """
    time = hits.copy()
    for i in range(int(misses.max(initial=0))):
        n = int(np.searchsorted(-misses, -i))  # those that miss more
        time[:n] = np.maximum(time[:n], lands(i, n)) + runs(i, n)
    return time
