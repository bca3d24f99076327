"""Conformance cases: a file of small replays, and the counters and times that an engine gives for each.

    python -m tests.kit.conformance tests/conformance/cases.json --engine reference --json

docs/conformance.md describes both formats. A file that is not in the format is refused in one line, with exit code 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moereplay.policies.contract import PolicyError
from moereplay.simulator.config import FUTURE, configure
from moereplay.simulator.errors import ConfigError
from moereplay.traces.schema import TraceError
from tests.kit import cases
from tests.kit.cases import ListSource, Outcome, machine, replay_lists, sizes
from tests.kit.conformance_format import Case, CaseError, one_line, read_cases
from tests.kit.conformance_machines import MachineCase
from tests.kit.conformance_machines import result as machine_row

Row = dict[str, Any]
#: Counters and times of a whole case, in the order in which rows have them.
TOTALS = (
    *("accesses", "assignments", "hits", "late", "misses", "compulsory", "collisions", "capacity", "evictions"),
    *("prefetch_issued", "prefetch_started", "prefetch_cancelled", "prefetch_dropped", "prefetch_hits"),
    *("prefetch_used", "predicted", "predicted_demanded", "bytes_demand", "bytes_prefetch", "bytes_wasted"),
    *("bytes_unused_at_end", "stall_ns", "link_busy_ns", "time_ns"),
)
PER_LAYER = ("accesses", "hits", "late", "misses", "collisions")
#: Settings that a case names as a replay does.
SETTINGS = ("eviction", "prefetch", "miss", "routing", "contract", "passes", "reset", "prefetch_at")
#: What a policy can ask of a case.
CAPABILITIES = frozenset({"ids", "weights", "lookahead", FUTURE})
FARTHEST = 10**6


def outcome(case: Case, engine: str) -> Outcome:
    """Replay a case. Raises CaseError where the case asks for what there is not."""
    spent = {name: getattr(case, name) for name in ("dense_ns", "pass_ns", "expert_ns_per_token")}
    where = machine(case.bytes_per_ns, case.latency_ns, **spent)
    geometry = sizes(case.layers, case.experts, case.k, case.expert_bytes)
    settings = {name: getattr(case, name) for name in SETTINGS}
    try:
        configure(**settings).policy_set().check(CAPABILITIES, _reach(case))
        source = ListSource(geometry, [request.prompted() for request in case.requests], case.passes)
        return replay_lists(source, case.pools, where, log=False, engine=engine, **settings)
    except (ConfigError, PolicyError, TraceError) as error:
        raise CaseError(f"case {one_line(case.name)}: {one_line(str(error))}") from error


def _reach(case: Case) -> int:
    """Layers ahead that a policy may look: any number, if there are scores for all that follow."""
    return case.looks_ahead if case.looks_ahead < case.layers - 1 else FARTHEST


def row(case: Case, engine: str) -> Row:
    """A case's counters and times, in the form of tests/conformance/results.json."""
    found = outcome(case, engine)
    per_layer = [_layer_sums(found, layer) for layer in range(case.layers)]
    first_tokens = [request["ttft_ns"] for request in found.requests]
    return {
        "name": case.name,
        **{name: found[name] for name in TOTALS},
        "per_layer": per_layer,
        "ttft_ns": first_tokens,
    }


def _layer_sums(found: Outcome, layer: int) -> Row:
    rows = [row for row in found.layers if row["layer"] == layer]
    return {name: sum(row[name] for row in rows) for name in PER_LAYER}


def as_json(rows: Sequence[Row]) -> str:
    """A JSON list with a row per line, so that two lists can be compared line by line."""
    return "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]"


def as_text(rows: Sequence[Row]) -> str:
    """A line for each case."""
    return "\n".join(map(_in_words, rows))


def _in_words(row: Row) -> str:
    if row.get("refused"):
        return f"{row['name']}: refused, {row['refused']}"
    line = "{name}: {accesses} accesses, {hits} hits, {late} late, {misses} misses in {time_ns} ns"
    return line.format_map(row | row.get("totals", {}))


def _kind(document: Any) -> type[Case | MachineCase]:
    """The format of a case: one of machines has a link."""
    return MachineCase if isinstance(document, dict) and "link" in document else Case


def _any_row(case: Case | MachineCase, engine: str) -> Row:
    return machine_row(case, engine) if isinstance(case, MachineCase) else row(case, engine)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.kit.conformance", description="Replay conformance cases.")
    parser.add_argument("cases", type=Path, metavar="CASES.json", help="in the format of docs/conformance.md")
    parser.add_argument("--engine", choices=cases.ENGINES, default="compiled")
    parser.add_argument("--json", action="store_true", help="print rows in the form of tests/conformance/results.json")
    options = parser.parse_args(arguments)
    try:
        rows = [_any_row(case, options.engine) for case in read_cases(options.cases, _kind)]
    except CaseError as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    print(as_json(rows) if options.json else as_text(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
