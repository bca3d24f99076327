"""Machines with a CPU, lower tiers and residents: cases on which two implementations agree, events included."""

from __future__ import annotations

import gzip
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.kit import conformance
from tests.kit.cases import ENGINES
from tests.kit.conformance_format import read_cases
from tests.kit.conformance_machines import MachineCase, result

FOLDER = Path(__file__).resolve().parents[1] / "conformance"
#: Cases, and their results in a file of the same name with `-results`.
FILES = {"machines": 553, "machines-draft": 354}
SHARE = 5  #: `make test` tries one case in so many
Document = dict[str, Any]


@cache
def pairs() -> list[tuple[MachineCase, Document]]:
    """Every case with its agreed result, in which the events are a digest."""
    found = []
    for name, many in FILES.items():
        cases = read_cases(FOLDER / f"{name}.json.gz", lambda document: MachineCase)
        results = json.loads(gzip.decompress((FOLDER / f"{name}-results.json.gz").read_bytes()))
        assert len(cases) == many
        found += zip(cases, results, strict=True)
    return found


def different(engine: str, chosen: list[tuple[MachineCase, Document]]) -> dict[str, Any]:
    """Cases, and what differs."""
    found = {}
    for case, agreed in chosen:
        assert case.name == agreed["name"]
        if wrong := {name for name, value in shortened(result(case, engine)).items() if value != agreed.get(name)}:
            found[case.name] = wrong
    return found


def shortened(row: Document) -> Document:
    """A result as it is stored."""
    if row["refused"]:
        return row | {"refused": True}
    events = json.dumps(row.pop("events"), separators=(",", ":"))
    return row | {"events_sha256": hashlib.sha256(events.encode()).hexdigest()}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_share_of_the_cases_gives_the_agreed_result(engine: str) -> None:
    assert different(engine, pairs()[::SHARE]) == {}


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_every_case_gives_the_agreed_result(engine: str) -> None:
    assert different(engine, pairs()) == {}


def test_what_no_replay_has_yet_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = json.loads(gzip.decompress((FOLDER / "machines.json.gz").read_bytes()))[0]
    path = tmp_path / "one.json"
    path.write_text(json.dumps([case | {"arrivals_ns": [0]}]))
    assert conformance.main([str(path), "--engine", "reference", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {"name": case["name"], "refused": "arrivals: not supported yet"}
