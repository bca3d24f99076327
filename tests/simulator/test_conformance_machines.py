"""Machines with a CPU, lower tiers and residents: cases on which two implementations agree, events included."""

from __future__ import annotations

import gzip
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cases import ENGINES
from tests.kit.conformance_format import read_cases
from tests.kit.conformance_machines import MachineCase, result

FOLDER = Path(__file__).resolve().parents[1] / "conformance"
#: Files of cases: of CPU, lower tiers and residents; of drafts, also of requests that arrive; of arrivals alone.
FILES = {"machines": 553, "machines-draft": 450, "machines-arrivals": 318}
SHARE = 5  #: `make test` tries one case in so many
Document = dict[str, Any]


@cache
def pairs() -> list[tuple[MachineCase, Document]]:
    """Every case with its agreed result, in which the events are a digest."""
    return [pair for name in FILES for pair in pairs_of(name)]


def pairs_of(name: str) -> list[tuple[MachineCase, Document]]:
    results = json.loads(gzip.decompress((FOLDER / f"{name}-results.json.gz").read_bytes()))
    return list(zip(read_cases(FOLDER / f"{name}.json.gz", lambda document: MachineCase), results, strict=True))


def different(engine: str, chosen: list[tuple[MachineCase, Document]]) -> dict[str, Any]:
    """Cases, and what differs."""
    found = {}
    for case, agreed in chosen:
        assert case.name == agreed["name"]
        row = shortened(result(case, engine), agreed.get("totals", {}))
        if wrong := {name for name, value in row.items() if value != agreed.get(name)}:
            found[case.name] = wrong
    return found


def shortened(row: Document, counters: Document) -> Document:
    """A result as it is stored, with the counters that there were when it was agreed."""
    if row["refused"]:
        return row | {"refused": True}
    events = json.dumps(row.pop("events"), separators=(",", ":"))
    totals = {name: row["totals"][name] for name in counters}
    return row | {"totals": totals, "events_sha256": hashlib.sha256(events.encode()).hexdigest()}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_share_of_the_cases_gives_the_agreed_result(engine: str) -> None:
    assert different(engine, pairs()[::SHARE]) == {}


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_every_case_gives_the_agreed_result(engine: str) -> None:
    assert {name: len(pairs_of(name)) for name in FILES} == FILES
    assert different(engine, pairs()) == {}
