"""Every shared conformance case: counters, per-layer figures and times equal to two independent implementations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from policies.contract import UNIT
from tests.cases import Cell, ListSource, Outcome, Prompted, machine, replay_lists, sizes

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data" / "conformance"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the conformance cases are not beside the repository")

Document = dict[str, Any]
PASSED_ON = ("eviction", "prefetch", "contract", "passes", "reset", "prefetch_at")
NOT_TOTALS = ("name", "per_layer", "ttft_ns")


def load(name: str) -> list[Document]:
    return json.loads((FOLDER / name).read_text()) if FOLDER.is_dir() else []


PAIRS = list(zip(load("cases.json"), load("results.json"), strict=True))


def units(values: list[float]) -> list[int]:
    return [round(value * UNIT) for value in values]


def cell(document: Document) -> Cell:
    look = [units(document["look"][depth]) for depth in sorted(document["look"])]
    return Cell(document["chosen"], units(document["weights"]), look)


def requests(case: Document) -> list[Prompted]:
    return [
        Prompted([[cell(layer) for layer in token] for token in request["tokens"]], request["prompt_length"])
        for request in case["requests"]
    ]


def pools(case: Document) -> int | tuple[int, ...]:
    if case["scope"] == "global":
        return case["capacity_bytes"]
    each = case["capacity_bytes_per_layer"]
    return tuple(each) if isinstance(each, list) else (each,) * case["layers"]


def replayed(case: Document) -> Outcome:
    spent = {name: case[name] for name in ("dense_ns", "pass_ns", "expert_ns_per_token")}
    where = machine(case["bytes_per_ns"], case["latency_ns"], **spent)
    geometry = sizes(case["layers"], case["experts"], case["k"], case["expert_bytes"])
    source = ListSource(geometry, requests(case), case["passes"])
    return replay_lists(source, pools(case), where, log=False, **{name: case[name] for name in PASSED_ON})


def layer_sums(outcome: Outcome, layer: int, names: list[str]) -> dict[str, int]:
    rows = [row for row in outcome.layers if row["layer"] == layer]
    return {name: sum(row[name] for row in rows) for name in names}


@pytest.mark.parametrize(("case", "expected"), PAIRS, ids=[case["name"] for case, _ in PAIRS])
def test_a_case_gives_the_agreed_result(case: Document, expected: Document, engine: str) -> None:
    outcome = replayed(case)
    totals = {name: figure for name, figure in expected.items() if name not in NOT_TOTALS}
    assert {name: outcome[name] for name in totals} == totals
    assert [request["ttft_ns"] for request in outcome.requests] == expected["ttft_ns"]
    for layer, row in enumerate(expected["per_layer"]):
        assert layer_sums(outcome, layer, list(row)) == row


def test_there_are_288_cases() -> None:
    assert len(PAIRS) == 288
