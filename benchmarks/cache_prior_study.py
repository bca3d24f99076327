"""Cache-Prior's miss rate against lambda, beside LRU and Belady on the unmodified routing.

The authors' protocol (arXiv 2412.00099 and its first author's code: preset cache-prior-paper): a cache per layer, LRU,
one token per pass, an empty cache every 1,024 tokens; here with half and a quarter of each layer's experts, and the
first J = 0, 1, 2 and 4 experts of a token protected. The first table per capacity is the sweep, the last one says where
it first misses less than Belady, in steps of 0.01. Belady cannot be beaten on a fixed demand; cache_prior changes the
demand. The authors see 0.13 at a quarter of the experts and J = 1, on another model (Nemotron-3-Nano).

OPEN LOOP: recorded logits do not react to the changed mixture, so live miss rates differ (`make study-quality` measures
by how much, and what each lambda costs in perplexity; here the share of gate mass that is kept stands for it).
`make study-cache-prior` runs it on the bundled sample; TRACES="a.zarr b.zarr" on others that hold router logits.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from analysis.tables import console, table
from results.result import Result
from simulator.config import ReplayConfig, configure
from simulator.preset import preset
from sweeps.grid import run_grid
from traces.schema import Trace
from traces.store import open_trace

SAMPLE = Path(__file__).parents[1] / "traces" / "samples" / "miniature.zarr"
CAPACITIES = {"E/2": "50%", "E/4": "25%"}
PROTECTED = (0, 1, 2, 4)  #: J
STEP, FINE = 5, 1  #: hundredths of lambda
Row = dict[str, str | float | None]


class Sweep(NamedTuple):
    """What one trace gives at one capacity."""

    lru: Result
    belady: float  #: miss rate on the recorded demand
    lifted: dict[tuple[int, int], Result]  #: by J and hundredths of lambda


def main() -> None:
    """Replay, print a table per trace and capacity, and a last one of crossings; keep both in --out."""
    options = _options()
    document = {}
    for path in options.traces:
        trace = open_trace(path)
        sweeps = {name: _sweep(trace, share, options.step) for name, share in CAPACITIES.items()}
        crossings = [_crossing(trace, name, sweep, j) for name, sweep in sweeps.items() for j in PROTECTED]
        for name, sweep in sweeps.items():
            title = f"{path.stem}, {trace.tokens:,} tokens, C = {name}: miss rates, open loop"
            console().print(table(list(_rates(sweep, brief=True)), title=title))
        console().print(table(crossings, title=f"{path.stem}: the least lambda that misses less than Belady"))
        rates = {name: list(_rates(sweep)) for name, sweep in sweeps.items()}
        document[path.stem] = {"digest": trace.digest, "rates": rates, "crossings": crossings}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="*", default=[SAMPLE], help="with router logits")
    parser.add_argument("--step", type=int, default=STEP, help="of the sweep, in hundredths of lambda")
    parser.add_argument("--out", type=Path, default=Path("runs/cache_prior_study.json"))
    return parser.parse_args()


def _config(capacity: str, routing: str) -> ReplayConfig:
    return configure(**preset("cache-prior-paper").values() | {"capacity": capacity, "routing": routing})


def _lifted(capacity: str, j: int, hundredths: int) -> ReplayConfig:
    return _config(capacity, f"cache_prior:lam={hundredths / 100}:top_j={j}:delta=running_range")


def _run(trace: Trace, configs: list[ReplayConfig]) -> list[Result]:
    return [result for result, _ in run_grid(trace, configs, os.cpu_count() or 1, bounded=False)]


def _sweep(trace: Trace, capacity: str, step: int) -> Sweep:
    """The coarse sweep of every J, and the steps of 0.01 before each crossing."""
    standard = _config(capacity, "standard")
    [(lru, bound)] = run_grid(trace, [standard])
    assert bound
    belady = 1 - bound["belady_hits"] / bound["accesses"]
    cells = [(j, lam) for j in PROTECTED for lam in range(0, 101, step)]
    lifted = dict(zip(cells, _run(trace, [_lifted(capacity, *cell) for cell in cells]), strict=True))
    crossed = {j: _least(lifted, j, belady) for j in PROTECTED}
    near = [(j, lam) for j, at in crossed.items() if at for lam in range(at - step + FINE, at, FINE)]
    fine = dict(zip(near, _run(trace, [_lifted(capacity, *cell) for cell in near]), strict=True))
    return Sweep(lru, belady, lifted | fine)


def _least(lifted: dict[tuple[int, int], Result], j: int, belady: float) -> int | None:
    return min((lam for (each, lam), result in lifted.items() if each == j and _missed(result) < belady), default=None)


def _missed(result: Result) -> float:
    return 1 - result.totals["hits"] / result.totals["accesses"]


def _kept(result: Result) -> float:
    return result.totals["mass_kept"] / result.totals["mass"]


def _rates(sweep: Sweep, brief: bool = False) -> Iterator[Row]:
    """Every lambda that all J were replayed at; `brief` leaves most of those out at which the rates hardly move."""
    yield {"routing": "standard, LRU", "lambda": None} | {f"J = {j}": _missed(sweep.lru) for j in PROTECTED}
    yield {"routing": "standard, Belady", "lambda": None} | {f"J = {j}": sweep.belady for j in PROTECTED}
    for lam in sorted({lam for _, lam in sweep.lifted if all((j, lam) in sweep.lifted for j in PROTECTED)}):
        if brief and lam > 20 and lam % 20:
            continue
        missed = {f"J = {j}": _missed(sweep.lifted[j, lam]) for j in PROTECTED}
        kept = {f"mass kept, J = {j}": _kept(sweep.lifted[j, lam]) for j in PROTECTED}
        yield {"routing": "cache_prior, LRU", "lambda": lam / 100} | missed | kept


def _crossing(trace: Trace, name: str, sweep: Sweep, j: int) -> Row:
    at = _least(sweep.lifted, j, sweep.belady)
    best = min(_missed(result) for (each, _), result in sweep.lifted.items() if each == j)
    return {
        "C": name,
        "J": j,
        "LRU": _missed(sweep.lru),
        "Belady": sweep.belady,
        "lowest with cache_prior": best,
        "beats Belady from lambda": None if at is None else at / 100,
        "mass kept there": None if at is None else _kept(sweep.lifted[j, at]),
        "lambda = 0 is standard": "yes" if _same(sweep.lru, sweep.lifted[j, 0]) else "NO",
    }


def _same(one: Result, other: Result) -> bool:
    """Every counter of every layer and request, and every time."""
    return (one.totals, one.per_layer, one.per_request) == (other.totals, other.per_layer, other.per_request)


if __name__ == "__main__":
    main()
