"""The search for differences between the engines finds what it is for: deliberate faults of the reference engine.

The compiled engine stays as it is, so a fault in one engine alone is what every mutant amounts to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import getattr_static, getsource
from textwrap import dedent, indent
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moereplay.simulator.reference.cache import Cache
from moereplay.simulator.reference.compute import Compute
from moereplay.simulator.reference.counters import Counters
from moereplay.simulator.reference.cpu import CpuQueue
from moereplay.simulator.reference.engine import Engine
from moereplay.simulator.reference.gate import Gatekeeper
from moereplay.simulator.reference.hooks import Victims
from moereplay.simulator.reference.link import Link
from moereplay.simulator.reference.links import Links
from moereplay.simulator.reference.machine import SimulatedAccelerator, SimulatedChannel
from moereplay.simulator.reference.state import LowerTier
from moereplay.simulator.times import Times
from tests.kit.parity import anything, batched, by_matrix, hybrid, priced, seen
from tests.kit.scenarios import Scenario

#: Scenarios until a mutant counts as survived; the parity test searches more, and without shrinking most die sooner.
CASES = 400


class DifferentError(Exception):
    """The engines disagree about a scenario, or the mutant cannot finish it."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario.settings)
        self.scenario = scenario


def compare(scenario: Scenario) -> None:
    """Raises DifferentError."""
    correct = seen(scenario, "compiled")
    try:
        mutated = seen(scenario, "reference")
    except Exception as error:
        raise DifferentError(scenario) from error
    if mutated != correct:
        raise DifferentError(scenario)


def search(scenarios: st.SearchStrategy[Scenario], cases: int) -> None:
    """Raises DifferentError."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    how = {"database": None, "phases": [Phase.generate], "report_multiple_bugs": False, "suppress_health_check": slow}
    settings(max_examples=cases, deadline=None, derandomize=True, **how)(given(scenarios)(compare))()


def with_price(**changed: Any) -> Callable[[Scenario], Scenario]:
    """Prices of a scenario, of a table those within."""

    def priced_so(scenario: Scenario) -> Scenario:
        prices = scenario.times["prices"]
        for name, price in changed.items():
            prices[name] = prices[name] | price if isinstance(price, dict) else price
        return scenario

    return priced_so


LOADED = '            yield self._begun(load, "loading_ns", layer, "load", transfer.y, transfer.cause)\n'
QUEUED = """\
            if self._queues_together and not transfer.prefetch:
                waiting.append(transfer)
            else:
                self._links.queue(transfer)
"""
OF_PREFETCH, OF_DEMAND = (f"            if {no}transfer.prefetch:\n{indent(QUEUED, ' ' * 4)}" for no in ("", "not "))
FIRST = "step_pass._replace(rows=step_pass.rows[:1])"
OF_FIRST = "step_pass._replace(rows=[row._replace(request=step_pass.rows[0].request) for row in step_pass.rows])"
#: Few of all cases prefetch well: a demand can be late, and a prefetch loaded, only where they do.
PREFETCHED = priced(prefetch="top_k:factor=2")
#: What is wrong, and where: the text of a method, and what stands in its place.
Mutant = tuple[str, type, str, str, str]
SEARCHES: list[tuple[st.SearchStrategy[Scenario], list[Mutant]]] = [
    (anything(), [
        ("the highest id wins ties", Victims, "_smallest", "min(map(self._orders.__getitem__, candidates))[2]",
         "min(candidates, key=lambda y: (*self._orders[y][:2], -y))"),
        ("the largest key leaves", Victims, "_smallest", "least = min(map", "least = max(map"),
        ("prefetches go before demands", Link, "_start_one", "if self._demands",
         "if self._demands and not self._prefetches"),
        ("the highest link starts first", Links, "wake", "self._rows", "reversed(self._rows)"),
        ("a lower tier forgets who was read", LowerTier, "read", "not self._fifo", "False"),
        ("what was read stays held", LowerTier, "release", "-= 1", "-= 0"),
        ("pins end with the compute", Cache, "computed", "self._done.add(y)", "self._done.add(y), self.release(y)"),
        ("stalls are a nanosecond longer", Counters, "count", "        self._cells",
         '        amount += name == "stall_ns" and amount > 0\n        self._cells'),
    ]),
    (batched(), [
        ("time goes to the first row alone", Counters, "end_pass", "step_pass.parts()", f"{FIRST}.parts()"),
        ("what tokens run goes to the first row", Gatekeeper, "settle", "        mixture =",
         f"        step_pass = {OF_FIRST}\n        mixture ="),
    ]),
    (priced(), [
        ("a demand is queued before it is loaded", Compute, "_load", LOADED + QUEUED, OF_DEMAND + LOADED + OF_PREFETCH),
        ("arrivals are computed as they come", Compute, "_all_here", "return", "return bool(self._ready) or"),
        ("a wire is idle as soon as it is free", SimulatedChannel, "_move", "_done < now", "_done <= now"),
        ("links leave compute its rate", SimulatedAccelerator, "expert", "tokens, contended)", "tokens, False)"),
        ("only the first row looks back", Engine, "_context", "step_pass.rows", "step_pass.rows[:1]"),
        ("links slow decisions", SimulatedAccelerator, "dense", "+ decided)", "+ decided * (1 + contended))"),
        ("victims cost nothing", SimulatedChannel, "start", "transfer.victims", "0"),
        ("several victims cost as one", SimulatedChannel, "start", "transfer.victims", "min(transfer.victims, 1)"),
    ]),
    (priced(contract="atomic").map(with_price(overlap="none")), [
        ("reads begin while others are loaded", Compute, "_load", "self._queues_together", "[]"),
    ]),
    (PREFETCHED, [
        ("a late demand waits for the whole", Links, "meet", "transfer.piece_here", "False"),
        ("a prefetch to be loaded keeps links busy", Links, "announce", "        self._cache",
         "        self._announced += int(transfer.prefetch)\n        self._cache"),
        ("prefetches are queued before they are loaded", Compute, "_load", LOADED + QUEUED,
         OF_PREFETCH + LOADED + OF_DEMAND),
        ("prefetches are queued when all are loaded", Compute, "_load", "and not transfer.prefetch",
         "or transfer.prefetch"),
    ]),
    (priced(miss="fiddler:ratio=2:goal=max:decode=cost"), [
        ("a demand to be loaded is not queued", Links, "busy", "self._announced > 0 or ", ""),
    ]),
    # Few of all cases have a first piece, and no other price in whose time the rest arrives.
    (priced().map(with_price(link={"first_piece": 0.5})), [
        ("a piece is enough for all of the compute", SimulatedAccelerator, "expert", "lands + rest", "1 + rest"),
    ]),
    (by_matrix(), [
        ("a batch is one demand", Link, "_start_batch", "while ", "while not batch.transfers and "),
        ("a stage waits for the first matrix alone", Compute, "_has_landed", ">= matrix", ">= 1"),
        ("a round takes what is there at once", Compute, "_round_is_due", "return there and", "return there or"),
        ("a round waits until nothing moves", Compute, "_round_is_due", "self._links.all_started or ", ""),
        ("links leave the stages their rate", SimulatedAccelerator, "stage", "tokens, contended)", "tokens, False)"),
        ("matrices are equal", Times, "of_matrices", "self.matrices[many - 1], self.matrices[-1]",
         "many, len(self.matrices)"),
        ("a batch is read expert by expert", Times, "batch_ns", " * len(self.matrices)", ""),
        ("the experts of a batch land in the other order", Link, "_complete", "in transfers", "in transfers[::-1]"),
        ("a matrix wakes nothing", Link, "_matrix_landed", "self._landed(())", "pass"),
    ]),
    (by_matrix(prefetch="top_k:factor=2"), [
        ("a delayed hit is computed before it lands", Compute, "_has_landed", "late))", "()))"),
    ]),
    # Experts of one batch differ in bytes only where they differ in precision.
    (by_matrix(miss="cascade:bits=8/2:below=.5"), [
        ("the last expert starts a batch", SimulatedChannel, "start_batch", "transfers[0]", "transfers[-1]"),
    ]),
    (hybrid(), [
        ("a hold ends those of others", LowerTier, "release", "-= 1", "= 0"),
        ("what the CPU finds is not read", Links, "read_by_cpu", "            tier.read(transfer.y)\n", ""),
        ("the links sleep when a work ends", CpuQueue, "_computed", "if self._has_tier", "if False"),
        ("landed work is judged with that of the gate", CpuQueue, "_begin", "tokens, contended",
         "tokens, contended and not self._coming"),
        ("a prefetch behind the CPU is lost", Links, "_filled_for_cpu", "self._send(transfer.onward)",
         "self._cache.forget(transfer.onward.y)"),
        ("residents leave with a reset", Cache, "clear", "state=RESIDENT",
         'state=ABSENT if self.tables.now["step"] else RESIDENT'),
        ("the first pass was predictable", Gatekeeper, "_count_demand", "        gates =",
         "        self._gated.add(layer)\n        gates ="),
    ]),
]  # fmt: skip
#: These die within the first cases, in about a second.
SOON = ("time goes to the first row alone", "what tokens run goes to the first row")


def planted(owner: type, method: str, old: str, new: str) -> Any:
    """The method with one text in place of another, all of its places."""
    right = getattr_static(owner, method)
    text = dedent(getsource(getattr(right, "fget", right)))
    found: dict[str, Any] = {}
    wrong = indent(text, "    ").replace(old, new)
    assert old in indent(text, "    ")
    exec(f"from __future__ import annotations\nif True:\n{wrong}", vars(sys.modules[owner.__module__]), found)
    return found[method]


@pytest.mark.parametrize(
    ("scenarios", "mutant"),
    [
        pytest.param(scenarios, mutant, id=mutant[0], marks=() if mutant[0] in SOON else pytest.mark.long)
        for scenarios, mutants in SEARCHES
        for mutant in mutants
    ],
)
def test_a_search_kills_a_mutant(scenarios: st.SearchStrategy[Scenario], mutant: Mutant) -> None:
    """It is the mutant that it finds: without it the engines agree there."""
    _, owner, method, old, new = mutant
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, planted(owner, method, old, new))
        with pytest.raises(DifferentError) as raised:
            search(scenarios, 10 * CASES if scenarios is PREFETCHED else CASES)
    compare(raised.value.scenario)
