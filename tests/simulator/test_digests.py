"""Every policy's results are those that tests/digests/digests.json was made with, to the last counter and event."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from moereplay.results.result import Row
from tests.digests.runs import CONTRACTS, SCOPES, Replay, digest_of, exp_of_this_machine, replays

KNOWN = json.loads((Path(__file__).parents[1] / "digests" / "digests.json").read_text())
EVERY = list(replays())
SMALL = [run for run in EVERY if run.trace != "sample"]
#: The specification is slow: each policy in one of the four ways.
BY_REFERENCE = [run for run in SMALL if run.name.endswith(("atomic global", "sequential per_layer"))]


def comparable(runs: list[Replay]) -> list[Replay]:
    """All of them where numpy's `exp` is that of the machine that made the digests, else those that need none."""
    same = exp_of_this_machine() == KNOWN["exp"]
    return [run for run in runs if same or not run.by_exp]


def wrong(
    runs: list[Replay], log: bool, engine: str = "compiled", mapped: Callable = map
) -> dict[str, tuple[Row, Row]]:
    """By name, what is known and what came out, where they differ."""
    found, chosen = {}, comparable(runs)
    made = mapped(partial(digest_of, counters=KNOWN["counters"], log=log, engine=engine), chosen)
    for run, got in zip(chosen, made, strict=True):
        known = KNOWN["digests"][run.name]
        known = known if log else {part: text for part, text in known.items() if part != "events"}
        if got != known:
            found[run.name] = (known, got)
    return found


def test_every_replay_has_a_digest() -> None:
    assert [run.name for run in EVERY] == list(KNOWN["digests"])


def test_no_digest_is_a_refusal_of_a_policy_alone() -> None:
    assert [name for name, digest in KNOWN["digests"].items() if "refused" in digest] == []


@pytest.mark.long
def test_small_traces_give_the_known_results_and_events() -> None:
    assert wrong(SMALL, log=True) == {}


@pytest.mark.long
def test_the_reference_gives_the_known_results_and_events() -> None:
    assert wrong(BY_REFERENCE, log=True, engine="reference") == {}


@pytest.mark.long
def test_without_an_event_log_the_results_are_the_known_ones() -> None:
    """In each of the four ways; the commonest takes the fast path."""
    assert wrong(EVERY, log=False) == {}


#: Half of them in CI, so that each contract and each scope is.
EVENTS = [
    pytest.param(contract, scope, marks=pytest.mark.long if at in (0, 3) else pytest.mark.longest)
    for at, (contract, scope) in enumerate(product(CONTRACTS, SCOPES))
]


@pytest.mark.parametrize(("contract", "scope"), EVENTS)
def test_the_recording_gives_the_known_events(contract: str, scope: str) -> None:
    runs = [run for run in EVERY if run.trace == "sample" and run.name.endswith(f"{contract} {scope}")]
    assert wrong(runs, log=True) == {}
