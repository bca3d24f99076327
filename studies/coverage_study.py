"""Measure how often the 95 % intervals of docs/statistics.md contain the truth, where the first request is cold.

Last changed in commit 5c7c862e. Do 95 % intervals hold the truth?
Answer: docs/statistics.md has the shares.

The truth is the mean of a figure over traces of as many requests of the same kind, the cold first one included.

Drawn requests have unequal lengths: evenly spread, lognormal, or of a Pareto distribution cut at 4,096 tokens (exponent
1.5), each once with rates of their own and once with rates that fall or rise with the length. Differences are of two
configurations over the same requests. Each share is of the trials with an interval; `given` is their share of all.

Replayed requests have popular experts of their own each. Every trace is replayed by LRU, FIFO and LFU, without a reset.
A third table replays `random` with two seeds over the same requests: they are equally good, so every significant
difference is a false positive. `make study-coverage` runs 1,000 trials each (15 minutes).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from moereplay.analysis.comparisons import CANT_TELL, COLD, PARTS, Rows, compare, estimate
from moereplay.analysis.statistics import Interval, Pairs, difference, interval, one_dominates, unearned
from moereplay.analysis.tables import console, table
from moereplay.results.counters import BY_LAYER as LAYERED
from moereplay.results.result import Row
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.documents import json_text
from moereplay.traces.schema import Geometry, Trace, memory_trace
from moereplay.traces.synthetic import Synthetic, synthesise

Draw = np.random.Generator
TRUTH = 20_000  #: traces that the truth is summed over
STEEPER = 0.3  #: how far mean rates of the shortest and the longest request are apart, where they go by length
SPREAD = 0.15  #: of a request's time about its mean, in logarithms
WORSE = 0.95  #: ratio of the second configuration's figure to the first's
MISSED, LOADED, WAITED = (
    480,
    400,
    800,
)  #: misses, decode time and time to the first token that the cold request has more
RARE = 8  #: how many times fewer accesses miss where most experts are resident
BOUNDS = (0.93, 0.97)
NORMAL = np.linspace(-4, 4, 4001)
BELOW = np.array([NormalDist().cdf(at) for at in NORMAL])
SMALL = Geometry(layers=4, experts=8, k=2, expert_bytes=(1_000_000,) * 4)
WIDE = Geometry(layers=4, experts=24, k=2, expert_bytes=(1_000_000,) * 4)
BLOCKS = 4  #: of requests in a trace, each a comparison of its own


class Requests(NamedTuple):
    """Numerator and denominator of n requests under two configurations, and whether the figure is a share."""

    first: np.ndarray  #: (trials, n, 2)
    second: np.ndarray
    share: bool = False


class Lengths(NamedTuple):
    """Distribution of tokens per request, by quantile, and whether rates depend on the length."""

    name: str
    of: Callable[[np.ndarray], np.ndarray]
    by_length: bool

    def rates(self, quantiles: np.ndarray) -> np.ndarray:
        """Return the mean rate of requests at these quantiles of length."""
        return 0.6 + (STEEPER if self.by_length else 0) * (quantiles - 0.5)


def even(quantiles: np.ndarray) -> np.ndarray:
    return np.floor(32 + 480 * quantiles)


def lognormal(quantiles: np.ndarray) -> np.ndarray:
    return np.floor(np.clip(np.exp(5 + np.interp(quantiles, BELOW, NORMAL)), 8, 4096))


def pareto(quantiles: np.ndarray) -> np.ndarray:
    exponent, low, high = 1.5, 32, 4096
    return np.floor(low * (1 - quantiles * (1 - (low / high) ** exponent)) ** (-1 / exponent))


LENGTHS = [
    Lengths(f"{spread.__name__}{', rate by length' if by_length else ''}", spread, by_length)
    for spread in (even, lognormal, pareto)
    for by_length in (False, True)
]


# -- figures: what requests of each length have; the first of each trace is cold


def hit_rate(lengths: Lengths, quantiles: np.ndarray, draw: Draw) -> Requests:
    """Draw hits of eight accesses per token; a request's rate is beta distributed about its mean."""
    accesses = 8 * lengths.of(quantiles)
    rate = _beta(lengths.rates(quantiles), draw)
    first, second = (draw.binomial(accesses.astype(int), 1 - share * rate) for share in (1, WORSE))
    return Requests(_hits(first, accesses), _hits(second, accesses), share=True)


def hit_rate_of_most(lengths: Lengths, quantiles: np.ndarray, draw: Draw) -> Requests:
    """Draw hits where most experts are resident, so that the cold request has a good part of all misses."""
    accesses = 8 * lengths.of(quantiles)
    rate = _beta(lengths.rates(quantiles), draw)
    first, second = (draw.binomial(accesses.astype(int), (1 - share * rate) / RARE) for share in (1, WORSE))
    return Requests(_hits(first, accesses), _hits(second, accesses), share=True)


def _hits(misses: np.ndarray, accesses: np.ndarray) -> np.ndarray:
    missed = np.minimum(misses + MISSED * _first(misses), accesses)
    return np.stack([accesses - missed, accesses], axis=-1)


def tpot(lengths: Lengths, quantiles: np.ndarray, draw: Draw) -> Requests:
    """Draw time per token, longer where fewer accesses hit."""
    tokens = lengths.of(quantiles)
    spent = tokens * (4 - 3 * lengths.rates(quantiles)) * _about_one(tokens, SPREAD, draw)
    other = spent * WORSE * _about_one(tokens, SPREAD / 3, draw)
    first, second = (np.stack([each + LOADED * _first(each), tokens], axis=-1) for each in (spent, other))
    return Requests(first, second)


def tokens_per_s(lengths: Lengths, quantiles: np.ndarray, draw: Draw) -> Requests:
    """Draw the inverse of `tpot`."""
    first, second, _ = tpot(lengths, quantiles, draw)
    return Requests(first[..., ::-1], second[..., ::-1])


def ttft(lengths: Lengths, quantiles: np.ndarray, draw: Draw) -> Requests:
    """Draw the time of a prompt, of which every request has one."""
    tokens = lengths.of(quantiles)
    spent = 20 + tokens * (4 - 3 * lengths.rates(quantiles)) * _about_one(tokens, SPREAD, draw) / 2
    other = spent * WORSE * _about_one(tokens, SPREAD / 3, draw)
    ones = np.ones_like(tokens)
    first, second = (np.stack([each + WAITED * _first(each), ones], axis=-1) for each in (spent, other))
    return Requests(first, second)


FIGURES = (hit_rate, hit_rate_of_most, tpot, tokens_per_s, ttft)


def _beta(mean: np.ndarray, draw: Draw) -> np.ndarray:
    return draw.beta(20 * mean, 20 * (1 - mean))


def _about_one(like: np.ndarray, spread: float, draw: Draw) -> np.ndarray:
    return draw.lognormal(-spread * spread / 2, spread, like.shape)


def _first(like: np.ndarray) -> np.ndarray:
    return np.arange(like.shape[-1]) == 0


# -- coverage


def truth(drawn: Requests) -> list[float]:
    """Return the figure under both configurations over all these traces together."""
    sums = [side.sum(axis=(0, 1)) for side in drawn[:2]]
    return [float(over / under) for over, under in sums]


def covered(drawn: Requests, at: int, true: list[float]) -> Iterator[tuple[str, bool]]:
    """Yield whether a trace's interval and difference contain the truth, if it has them."""
    first, second = (_pairs(side[at]) for side in drawn[:2])
    found = interval(first, COLD, drawn.share)
    if found.low is not None and found.high is not None and not unearned(first, COLD, drawn.share):
        yield "interval", found.low <= true[0] <= found.high
    apart = difference(first, second, COLD)
    if apart.off is not None and not any(one_dominates(side, COLD, drawn.share) for side in (first, second)):
        yield "difference", abs(apart.value - (true[0] - true[1])) <= apart.off


def _pairs(side: np.ndarray) -> Pairs:
    return [(over, under) for over, under in side]


def coverage(figure: Callable[..., Requests], lengths: Lengths, count: int, trials: int) -> dict[str, float]:
    """Return the share of intervals that contain the truth, by method, and that of trials with an interval."""
    draw = np.random.default_rng([count, LENGTHS.index(lengths), FIGURES.index(figure)])
    true = truth(figure(lengths, draw.random((TRUTH, count)), draw))
    drawn = figure(lengths, draw.random((trials, count)), draw)
    held: dict[str, list[bool]] = {}
    for at in range(trials):
        for method, holds in covered(drawn, at, true):
            held.setdefault(method, []).append(holds)
    return {
        name: value
        for method, each in held.items()
        for name, value in ((method, float(np.mean(each))), (f"{method} given", len(each) / trials))
    }


# -- replays without a reset


CAPACITIES = ("25%", "50%", "75%", "90%", "100%")
POLICIES = ("lru", "fifo", "lfu")
REPLAYED = ("hit_rate", "tpot_ms", "ttft_mean_ms")


def replayed(counts: list[int], trials: int) -> list[Row]:
    """Return the coverage of intervals of each policy, and of its difference from LRU, over `trials` traces."""
    runs: dict[tuple[str, str], list[Rows]] = {}
    for seed in range(trials):
        trace = _of_topics(max(counts), np.random.default_rng(seed))
        for capacity, eviction in product(CAPACITIES, POLICIES):
            config = configure(capacity=capacity, eviction=eviction, passes="token")
            runs.setdefault((capacity, eviction), []).append(replay(trace, config).per_request)
    return [
        {"capacity": capacity, "eviction": eviction, "n": count, **_held(runs, capacity, eviction, count)}
        for capacity, eviction, count in product(CAPACITIES, POLICIES, counts)
    ]


def _of_topics(count: int, draw: Draw) -> Trace:
    """Return a trace whose requests have popular experts of their own each, and unequal lengths."""
    made = [
        synthesise(
            Synthetic(
                geometry=WIDE,
                prompt_tokens=int(length) // 3,
                decode_tokens=int(length) - int(length) // 3,
                exponent=1,
                seed=int(draw.integers(1 << 30)),
                logits=False,
            )
        )
        for length in np.clip(draw.lognormal(4, 0.7, count), 12, 300)
    ]
    return memory_trace(made[0].header, [trace.request(0) for trace in made])


def _held(runs: dict[tuple[str, str], list[Rows]], capacity: str, eviction: str, count: int) -> dict[str, float | None]:
    """Return the shares of traces whose intervals hold the figure of all traces, and its difference from LRU's."""
    ours, others = ([rows[:count] for rows in runs[capacity, each]] for each in (eviction, "lru"))
    shares: dict[str, float | None] = {}
    for figure in REPLAYED:
        true, other = (_known([row for rows in each for row in rows], figure).value for each in (ours, others))
        found = [each for rows in ours if (each := _known(rows, figure)).low is not None]
        shares[figure] = _share((each.low or 0.0) <= true <= (each.high or 0.0) for each in found)
        shares[f"{figure} given"] = len(found) / len(ours)
        if eviction != "lru":
            apart = [compare(*both, figure) for both in zip(ours, others, strict=True)]
            shares[f"{figure} less"] = _share(
                abs((each.difference or 0.0) - (true - other)) <= each.off for each in apart if each.off is not None
            )
    return shares


def _known(rows: Rows, figure: str) -> Interval:
    found = estimate(rows, figure)
    assert found is not None  # every request has every figure
    return found


def _share(holds: Iterable[bool]) -> float | None:
    every = list(holds)
    return float(np.mean(every)) if every else None


# -- figures by layer: a request's rows of one layer, both phases together


OF_LAYERS = ("hit_rate", "collisions_per_access", "collisions_per_miss")


def by_layer(counts: list[int], trials: int) -> list[Row]:
    """Return the coverage of intervals of layers by LRU, all layers of all traces together."""
    runs: dict[str, list[list[Rows]]] = {}
    for seed in range(trials):
        trace = _of_topics(max(counts), np.random.default_rng(seed))
        for capacity in CAPACITIES[:3]:
            found = replay(trace, configure(capacity=capacity, eviction="lru", passes="token"), by_layer=True)
            layered, layers = found.request_layers, range(trace.geometry.layers)
            rows: list[list[Row]] = [[dict(row) for row in found.per_request] for _ in layers]
            for layer in layers:
                for row in rows[layer]:
                    row |= dict.fromkeys(LAYERED, 0)
            for at, (request, layer) in enumerate(zip(layered["request"], layered["layer"], strict=True)):
                for name in LAYERED:
                    rows[layer][request][name] += layered[name][at]
            runs.setdefault(capacity, []).append(rows)
    return [
        {"capacity": capacity, "n": count, **_held_by_layer(runs[capacity], count)}
        for capacity, count in product(runs, counts)
    ]


def _held_by_layer(runs: list[list[Rows]], count: int) -> dict[str, float | None]:
    shares: dict[str, float | None] = {}
    for figure in OF_LAYERS:
        holds, given = list[bool](), 0
        for layer in range(len(runs[0])):
            samples = [rows[layer][:count] for rows in runs]
            true = _known([row for rows in samples for row in rows], figure).value
            found = [each for rows in samples if (each := _known(rows, figure)).low is not None]
            given += len(found)
            holds += [(each.low or 0.0) <= true <= (each.high or 0.0) for each in found]
        shares[figure] = _share(holds)
        shares[f"{figure} given"] = given / (len(runs) * len(runs[0]))
    return shares


# -- two seeds of one policy


def apart(count: int, traces: int, reset: str) -> Row:
    """Return the share of pairs of seeds with a significant difference over `count` requests; two pairs per block."""
    wrong, pairs = dict.fromkeys(PARTS, 0), 0
    for seed in range(traces):
        made = Synthetic(
            kind="markov",
            geometry=SMALL,
            requests=BLOCKS * count,
            prompt_tokens=4,
            decode_tokens=12,
            reuse=0.5,
            seed=seed,
        )
        trace = synthesise(made)
        rows = [_requests(trace, at, reset) for at in range(4)]
        for block in range(BLOCKS):
            part = slice(block * count, (block + 1) * count)
            for one, other in ((rows[0][part], rows[1][part]), (rows[2][part], rows[3][part])):
                pairs += 1
                for figure in PARTS:
                    wrong[figure] += compare(one, other, figure).answer != CANT_TELL
    return {"n": count, "reset": reset, "pairs": pairs} | {name: each / pairs for name, each in wrong.items()}


def _requests(trace: Trace, seed: int, reset: str) -> Rows:
    config = configure(capacity="50%", eviction="random", seed=seed, reset=reset)
    return replay(trace, config).per_request


def main() -> None:
    """Print the shares by generator and figure, and those that are outside the bounds; keep them in --out."""
    options = _options()
    rows: list[Row] = []
    for count in options.requests:
        for figure in (each for each in FIGURES if each.__name__ in options.figures):
            for lengths in (each for each in LENGTHS if each.name in options.lengths):
                shares = coverage(figure, lengths, count, options.trials)
                rows.append({"n": count, "figure": figure.__name__, "lengths": lengths.name, **shares})
    of_replays, of_layers = (study(options.requests, options.replays) for study in (replayed, by_layer))
    seeds = [apart(count, options.traces, reset) for count in options.replayed for reset in ("never", "request")]
    _print(rows, f"intervals of 95 % that hold the truth, {options.trials:,} trials each")
    for method in ("interval", "difference"):
        known = [row[method] for row in rows if method in row]
        inside = sum(BOUNDS[0] <= share <= BOUNDS[1] for share in known)
        print(f"{method}: {inside} of {len(known)} between {BOUNDS[0]:.0%} and {BOUNDS[1]:.0%}")
    _print(of_replays, f"the same of {options.replays:,} replayed traces; less: difference from LRU")
    _print(of_layers, "intervals of one layer that hold the truth, all layers together, by LRU")
    _print(seeds, "pairs of seeds of random that are said to differ")
    document = {"trials": options.trials, "rows": rows, "replays": of_replays, "layers": of_layers, "seeds": seeds}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json_text(document, indent=1) + "\n", encoding="utf-8")


def _print(rows: list[dict[str, object]], title: str) -> None:
    shown = [{name: f"{cell:.1%}" if isinstance(cell, float) else cell for name, cell in row.items()} for row in rows]
    console().print(table(shown, title=title, width=110))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--requests", type=int, nargs="+", default=[6, 8, 10, 16, 30])
    parser.add_argument("--figures", nargs="+", default=[each.__name__ for each in FIGURES])
    parser.add_argument("--lengths", nargs="+", default=[each.name for each in LENGTHS])
    parser.add_argument(
        "--replayed", type=int, nargs="+", default=[6, 16, 30, 40], help="requests that two seeds replay"
    )
    parser.add_argument("--replays", type=int, default=1000, help="traces that LRU, FIFO and LFU replay")
    parser.add_argument("--traces", type=int, default=100, help="replayed with four seeds each")
    parser.add_argument("--out", type=Path, default=Path("runs/coverage.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
