"""What a step takes whose number of fetched experts is known, by the rules of docs/semantics.md, without a replay.

Published runs say how many bytes a token read, not which experts. So a step's misses are taken as binomial: each of k
demanded experts misses with the token's share of bytes. Copies of one step are of the mean expert's size.
"""

from __future__ import annotations

from math import comb
from typing import NamedTuple

import numpy as np


class StepPrices(NamedTuple):
    """Times of one step in nanoseconds, of one model on one machine."""

    k: int  #: experts demanded
    load: float  #: that compute spends to have one expert fetched
    latency: float  #: of a transfer; those of `depth` transfers overlap
    start: float  #: more of it on an idle wire
    wire: float  #: of a transfer's bytes
    depth: int  #: transfers issued at once
    expert: float  #: compute of one expert
    waits_for_all: bool  #: compute begins when everything has arrived, and reads begin when all is asked for


def waiting(prices: StepPrices, missed: int) -> float:
    """Nanoseconds that a step with so many fetched experts waits for the link: all but its loading and its compute."""
    arrivals = _arrivals(prices, missed)
    if not arrivals:
        return 0.0
    loaded = missed * prices.load
    if prices.waits_for_all:
        return arrivals[-1] - loaded
    now = loaded + (prices.k - missed) * prices.expert
    for arrival in arrivals:
        now = max(now, arrival) + prices.expert
    return now - loaded - prices.k * prices.expert


def _arrivals(prices: StepPrices, missed: int) -> list[float]:
    """When each fetched expert has arrived, in nanoseconds after the gate."""
    ends: list[float] = []
    for index in range(missed):
        asked = missed if prices.waits_for_all else index + 1
        issued = asked * prices.load
        if index >= prices.depth:
            issued = max(issued, ends[index - prices.depth])
        idle = not ends or issued > ends[-1]
        ready = issued + prices.latency + (prices.start if idle else 0)
        ends.append(max(ready, ends[-1] if ends else 0.0) + prices.wire)
    return ends


def mean_waiting(prices: StepPrices, share: np.ndarray) -> np.ndarray:
    """Nanoseconds that a step waits on average, (T,), where each demanded expert misses with probability share (T,)."""
    k = prices.k
    counts = np.arange(k + 1)
    each = np.array([waiting(prices, missed) for missed in range(k + 1)])
    ways = np.array([comb(k, missed) for missed in range(k + 1)], float)
    miss = np.clip(share, 0, 1)[:, None]
    return (ways * miss**counts * (1 - miss) ** (k - counts)) @ each
