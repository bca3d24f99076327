"""Measure how often the 95 % intervals of docs/statistics.md contain the truth, on synthetic requests with known truth.

Requests have unequal lengths: evenly spread, lognormal, or of a Pareto distribution cut at 4,096 tokens (exponent 1.5),
each once with rates of their own and once with rates that fall or rise with the length. Every trial draws n requests,
computes the interval, and checks whether it contains the truth: the ratio of expectations, on a grid of quantiles.
Differences are of two configurations over the same requests. Percentiles of the bootstrap, and Student's t of the
jackknife, are there for comparison. A second table replays `random` with two seeds over the same requests: they are
equally good, so every significant difference is a false positive. `make study-coverage` runs 1,000 trials
each (5 to 10 minutes).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from moereplay.analysis.comparisons import CANT_TELL, PARTS, Rows, compare
from moereplay.analysis.statistics import Pairs, difference, interval, student
from moereplay.analysis.tables import console, table
from moereplay.results.result import Row
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.documents import json_text
from moereplay.traces.schema import Geometry, Trace
from moereplay.traces.synthetic import Synthetic, synthesise

Draw = np.random.Generator
GRID = 200_000  #: quantiles that the truth is summed over
STEEPER = 0.3  #: how far mean rates of the shortest and the longest request are apart, where they go by length
SPREAD = 0.15  #: of a request's time about its mean, in logarithms
WORSE = 0.95  #: ratio of the second configuration's figure to the first's
BOUNDS = (0.93, 0.97)
NORMAL = np.linspace(-4, 4, 4001)
BELOW = np.array([NormalDist().cdf(at) for at in NORMAL])
SMALL = Geometry(layers=4, experts=8, k=2, expert_bytes=(1_000_000,) * 4)
BLOCKS = 4  #: of requests in a trace, each a comparison of its own


class Requests(NamedTuple):
    """Numerator and denominator of n requests under two configurations."""

    first: np.ndarray
    second: np.ndarray


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


# -- figures: what a request of each length has, and the truth of the first configuration ----------------------------


def hit_rate(lengths: Lengths, quantiles: np.ndarray, draw: Draw) -> Requests:
    """Draw hits of eight accesses per token; a request's rate is beta distributed about its mean."""
    accesses = (8 * lengths.of(quantiles)).astype(int)
    rate = _beta(lengths.rates(quantiles), draw)
    hits = [draw.binomial(accesses, share * rate) for share in (1, WORSE)]
    return Requests(*(np.stack([each, accesses], axis=1).astype(float) for each in hits))


def collisions_per_miss(lengths: Lengths, quantiles: np.ndarray, draw: Draw) -> Requests:
    """Draw a ratio with both sides random; misses follow the rates of `hit_rate`."""
    accesses = (8 * lengths.of(quantiles)).astype(int)
    misses = draw.binomial(accesses, 1 - _beta(lengths.rates(quantiles), draw))
    collide = _beta(0.25 * lengths.rates(quantiles), draw)
    each = [draw.binomial(misses, share * collide) for share in (1, WORSE)]
    return Requests(*(np.stack([collisions, misses], axis=1).astype(float) for collisions in each))


def tpot(lengths: Lengths, quantiles: np.ndarray, draw: Draw) -> Requests:
    """Draw time per token, longer where fewer accesses hit."""
    tokens = lengths.of(quantiles)
    spent = tokens * (4 - 3 * lengths.rates(quantiles)) * _about_one(tokens.size, SPREAD, draw)
    other = spent * WORSE * _about_one(tokens.size, SPREAD / 3, draw)
    return Requests(*(np.stack([each, tokens], axis=1) for each in (spent, other)))


def tokens_per_s(lengths: Lengths, quantiles: np.ndarray, draw: Draw) -> Requests:
    """Draw the inverse of `tpot`."""
    first, second = tpot(lengths, quantiles, draw)
    return Requests(first[:, ::-1], second[:, ::-1])


def truth(figure: Callable[..., Requests], lengths: Lengths) -> tuple[float, float]:
    """Return the ratio of expectations under both configurations."""
    quantiles = (np.arange(GRID) + 0.5) / GRID
    tokens, rates = lengths.of(quantiles), lengths.rates(quantiles)
    if figure is hit_rate:
        first = (tokens * rates).sum() / tokens.sum()
    elif figure is collisions_per_miss:
        first = 0.25 * (tokens * rates * (1 - rates)).sum() / (tokens * (1 - rates)).sum()
    else:
        first = (tokens * (4 - 3 * rates)).sum() / tokens.sum()
    return (1 / first, 1 / (WORSE * first)) if figure is tokens_per_s else (first, WORSE * first)


FIGURES = (hit_rate, collisions_per_miss, tpot, tokens_per_s)


def _beta(mean: np.ndarray, draw: Draw) -> np.ndarray:
    return draw.beta(20 * mean, 20 * (1 - mean))


def _about_one(count: int, spread: float, draw: Draw) -> np.ndarray:
    return draw.lognormal(-spread * spread / 2, spread, count)


# -- trials ----------------------------------------------------------------------------------------------------------


def covered(requests: Requests, true: tuple[float, float], seed: int) -> Iterator[tuple[str, bool]]:
    """Yield, for every method, whether its interval contains the truth."""
    found = interval(pairs(requests.first), seed)
    yield "interval", found.low is not None and found.low <= true[0] <= (found.high or 0.0)
    apart = difference(pairs(requests.first), pairs(requests.second), seed)
    yield "difference", apart.off is not None and abs(apart.value - (true[0] - true[1])) <= apart.off
    low, high = percentiles(requests.first, seed)
    yield "percentiles", low <= true[0] <= high
    yield "Student's t", abs(found.value - true[0]) <= jackknife_t(requests.first)


def pairs(side: np.ndarray) -> Pairs:
    return [(over, under) for over, under in side]


def percentiles(side: np.ndarray, seed: int) -> np.ndarray:
    """Return the plain bootstrap's interval."""
    count = len(side)
    drawn = np.random.default_rng(seed).integers(count, size=(1000, count))
    over, under = side[drawn].sum(axis=1).T
    return np.quantile(over / under, (0.025, 0.975))


def jackknife_t(side: np.ndarray) -> float:
    """Return half of Student's interval."""
    over, under = (side.sum(axis=0) - side).T
    left, count = over / under, len(side)
    return student(count - 1) * float(((left - left.mean()) ** 2).sum() * (count - 1) / count) ** 0.5


def coverage(figure: Callable[..., Requests], lengths: Lengths, count: int, trials: int) -> dict[str, float]:
    """Return the share of trials whose interval contains the truth, by method."""
    draw = np.random.default_rng([count, LENGTHS.index(lengths), FIGURES.index(figure)])
    true, hits = truth(figure, lengths), dict[str, int]()
    for _ in range(trials):
        made = figure(lengths, draw.random(count), draw)
        for method, held in covered(made, true, seed=0):
            hits[method] = hits.get(method, 0) + held
    return {method: held / trials for method, held in hits.items()}


# -- two seeds of one policy -----------------------------------------------------------------------------------------


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
    seeds = [apart(count, options.traces, reset) for count in options.replayed for reset in ("never", "request")]
    _print(rows, f"intervals of 95 % that hold the truth, {options.trials:,} trials each")
    for method in ("interval", "difference"):
        inside = sum(BOUNDS[0] <= row[method] <= BOUNDS[1] for row in rows)
        print(f"{method}: {inside} of {len(rows)} between {BOUNDS[0]:.0%} and {BOUNDS[1]:.0%}")
    _print(seeds, "pairs of seeds of random that are said to differ")
    document = {"trials": options.trials, "rows": rows, "seeds": seeds}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json_text(document, indent=1) + "\n", encoding="utf-8")


def _print(rows: list[dict[str, object]], title: str) -> None:
    shown = [{name: f"{cell:.1%}" if isinstance(cell, float) else cell for name, cell in row.items()} for row in rows]
    console().print(table(shown, title=title, width=110))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--requests", type=int, nargs="+", default=[30, 100])
    parser.add_argument("--figures", nargs="+", default=[each.__name__ for each in FIGURES])
    parser.add_argument("--lengths", nargs="+", default=[each.name for each in LENGTHS])
    parser.add_argument("--replayed", type=int, nargs="+", default=[16, 30], help="requests that two seeds replay")
    parser.add_argument("--traces", type=int, default=100, help="replayed with four seeds each")
    parser.add_argument("--out", type=Path, default=Path("runs/coverage.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
