"""Rank policy sets twice: with free decisions, and with 10 us per layer for each policy that predicts or scores.

Last changed in commit bb8bebef. Does the cost of decisions change which set is fastest?
Answer: docs/recommend.md.

`python -m studies.decision_cost TRACE... --platforms h100-pcie5,phone-ufs4`. Sets are every eviction of --evictions
with every prefetch of --prefetches. A row per trace, platform and capacity names the fastest set both ways, its
tokens/s and its lead over the second. SIMULATED.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from moereplay import policies
from moereplay.analysis.tables import console, table
from moereplay.policies.grammar import parse
from moereplay.results.remarks import ASSUMED_NS
from moereplay.results.result import Result, values_of
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.sweeps.grid import run_grid
from moereplay.sweeps.recommend.runner import NO_TPOT
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace

SETS = ("eviction", "prefetch")


def main() -> None:
    """Replay and print one table."""
    options = _options()
    rows = [
        _row(Path(name).stem, platform, capacity, _ranked(open_trace(Path(name)), platform, capacity, options))
        for name, platform, capacity in product(options.traces, options.platforms, options.capacities)
    ]
    changed = sum(row["first changes"] == "yes" for row in rows)
    console().print(table(rows, title=f"the fastest set changes in {changed} of {len(rows)} rankings. SIMULATED"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed: dict[str, Any] = {"type": lambda text: text.split(",")}
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--platforms", default=["h100-pcie5", "rtx4090-pcie4", "phone-ufs4"], **listed)
    parser.add_argument("--capacities", default=["25%", "50%", "75%"], **listed)
    parser.add_argument("--evictions", default=["lru", "lfu_decay", "least_stale", "lfru", "class_lru"], **listed)
    parser.add_argument("--prefetches", default=["none", "coactivation", "previous_token"], **listed)
    parser.add_argument("--passes", default="token")
    return parser.parse_args()


def _ranked(trace: Trace, platform: str, capacity: str, options: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """Return the sets by tokens/s, fastest first: with free decisions, then with charged ones."""
    sets = list(product(options.evictions, options.prefetches))

    def ranking(machine: str) -> list[dict[str, Any]]:
        configs = [_config(machine, capacity, options.passes, each) for each in sets]
        results = [result for result, _ in run_grid(trace, configs, os.cpu_count() or 1, bounded=False)]
        made = [{"set": "+".join(each), "tokens/s": _speed(result)} for each, result in zip(sets, results, strict=True)]
        return sorted(made, key=lambda row: -row["tokens/s"])

    return [ranking(platform), ranking(charged(platform, sets))]


def charged(platform: str, sets: Sequence[Sequence[str]]) -> str:
    """Return the platform with the assumed price of each policy of the sets that predicts or scores."""
    named = {(kind, text) for each in sets for kind, text in zip(SETS, each, strict=True)}
    chosen = [parse(kind, text) for kind, text in sorted(named)]
    deciding = dict.fromkeys(each.policy.name for each in chosen if each.policy.decides(each.params))
    assert all(name in policies.NAMES[kind] for kind, text in named for name in [text.partition(":")[0]])
    return "".join([platform, *(f":decisions.by_policy.{name}={ASSUMED_NS}" for name in deciding)])


def _config(platform: str, capacity: str, passes: str, chosen: Sequence[str]) -> ReplayConfig:
    return configure(platform=platform, capacity=capacity, passes=passes, **dict(zip(SETS, chosen, strict=True)))


def _speed(result: Result) -> float:
    tpot_ms = values_of(result)["tpot_ms"]
    if not tpot_ms:
        raise SystemExit(NO_TPOT)
    return 1000 / tpot_ms


def _row(trace: str, platform: str, capacity: str, rankings: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    free, paid = rankings
    again = {row["set"]: row["tokens/s"] for row in paid}
    return {
        "trace": trace,
        "platform": platform,
        "capacity": capacity,
        "first, free": free[0]["set"],
        "tokens/s": free[0]["tokens/s"],
        "lead %": 100 * (free[0]["tokens/s"] / free[1]["tokens/s"] - 1),
        "then": again[free[0]["set"]],
        "first, charged": paid[0]["set"],
        "its tokens/s": paid[0]["tokens/s"],
        "first changes": "yes" if paid[0]["set"] != free[0]["set"] else "no",
    }


if __name__ == "__main__":
    main()
