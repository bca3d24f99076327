"""Both engines give the same: every counter, row, time, executed expert and line of the event log.

Scenarios have times of a few nanoseconds, so that events collide, and scores so coarse that they tie. `MOEREPLAY_CASES`
is the number of scenarios of each search (make parity).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.simulator.compiled import engine
from moereplay.simulator.compiled.fast_path import fast_path
from moereplay.simulator.compiled.kernel import kernel
from tests.kit.parity import (
    EVERY_EVICTION,
    EVERY_MISS,
    EVERY_PREFETCH,
    EVERY_ROUTING,
    PLAIN_EVICTION,
    PLAIN_PREFETCH,
    PLAIN_ROUTING,
    anything,
    arriving,
    by_link,
    by_matrix,
    hybrid,
    priced,
    seen,
    uneven,
)
from tests.kit.policy_catalogue import by_policy
from tests.kit.scenarios import CONTRACTS, Scenario
from tests.kit.search import searched

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("contract", CONTRACTS)
@searched(80)
@given(anything())
def test_the_engines_agree_to_the_last_event(contract: str, scenario: Scenario) -> None:
    scenario.settings.update(contract=contract)
    assert seen(scenario, "compiled") == seen(scenario, "reference")


@pytest.mark.parametrize("contract", CONTRACTS)
@searched(60)
@given(priced())
def test_the_engines_agree_under_all_prices(contract: str, scenario: Scenario) -> None:
    scenario.settings.update(contract=contract)
    assert seen(scenario, "compiled") == seen(scenario, "reference")


@pytest.mark.parametrize("contract", CONTRACTS)
@searched(70)
@given(by_matrix())
def test_the_engines_agree_where_links_read_matrix_by_matrix(contract: str, scenario: Scenario) -> None:
    scenario.settings.update(contract=contract)
    assert seen(scenario, "compiled") == seen(scenario, "reference")


@pytest.mark.parametrize("contract", CONTRACTS)
@searched(80)
@given(uneven())
def test_the_engines_agree_where_experts_of_a_layer_differ_in_bytes(contract: str, scenario: Scenario) -> None:
    scenario.settings.update(contract=contract)
    assert seen(scenario, "compiled") == seen(scenario, "reference")


@pytest.mark.parametrize("contract", CONTRACTS)
@searched(80)
@given(arriving())
def test_the_engines_agree_where_requests_arrive(contract: str, scenario: Scenario) -> None:
    scenario.settings.update(contract=contract)
    assert seen(scenario, "compiled") == seen(scenario, "reference")


@pytest.mark.parametrize("contract", CONTRACTS)
@searched(80)
@given(hybrid())
def test_the_engines_agree_where_the_cpu_reads_a_lower_tier(contract: str, scenario: Scenario) -> None:
    scenario.settings.update(contract=contract)
    assert seen(scenario, "compiled") == seen(scenario, "reference")


@pytest.mark.parametrize("contract", CONTRACTS)
@searched(80)
@given(by_link())
def test_the_engines_agree_where_each_link_has_a_pool(contract: str, scenario: Scenario) -> None:
    scenario.settings.update(contract=contract)
    assert seen(scenario, "compiled") == seen(scenario, "reference")


#: Kinds of order: two queues, keys that change by touch, keys that change by layer, and any.
ORDERS = {"lru": ("lru",), "fifo": ("fifo",), "lfu": ("lfu",), "least_stale": ("least_stale",), "any": PLAIN_EVICTION}


@pytest.mark.parametrize("evictions", ORDERS.values(), ids=ORDERS)
@searched(70)
@given(anything(contract="atomic", miss="fetch", warm=()), st.data())
def test_the_fast_path_gives_the_same(evictions: tuple[str, ...], scenario: Scenario, data: st.DataObject) -> None:
    """`replay_lists` compares both ways of the compiled engine with each other, here always two different ones."""
    scenario.settings["eviction"] = data.draw(st.sampled_from(evictions))
    scenario.settings["prefetch"] = data.draw(st.sampled_from(PLAIN_PREFETCH))
    if not scenario.settings["eviction"].startswith("belady"):
        scenario.settings["routing"] = data.draw(st.sampled_from(PLAIN_ROUTING))
    scenario.times.update(more=(), tiers=(), prices={})
    with kernels_noted() as used:
        compiled = seen(scenario, "compiled")
    assert used == [kernel, fast_path]
    assert compiled == seen(scenario, "reference")


@contextmanager
def kernels_noted() -> Iterator[list[Callable]]:
    """Which kernels are used, in order."""
    used: list[Callable] = []
    with pytest.MonkeyPatch.context() as patch:
        machine_code = engine.machine_code
        patch.setattr(engine, "machine_code", lambda of: used.append(of) or machine_code(of))
        yield used


def check_every_spelling(kind: str, texts: tuple[str, ...], scenario: Scenario) -> None:
    drawn = dict(scenario.settings)
    for policy in texts:
        scenario.settings.update(drawn | {kind: policy})
        if scenario.settings["eviction"].startswith("belady"):
            scenario.settings["routing"] = "standard"
        assert seen(scenario, "compiled") == seen(scenario, "reference"), policy


@by_policy(EVERY_EVICTION)
@searched(10)
@given(anything())
def test_the_engines_agree_under_every_eviction(texts: tuple[str, ...], scenario: Scenario) -> None:
    check_every_spelling("eviction", texts, scenario)


@by_policy(EVERY_PREFETCH)
@searched(10)
@given(anything())
def test_the_engines_agree_under_every_prefetch(texts: tuple[str, ...], scenario: Scenario) -> None:
    check_every_spelling("prefetch", texts, scenario)


@by_policy(EVERY_MISS)
@searched(10)
@given(anything())
def test_the_engines_agree_under_every_miss_policy(texts: tuple[str, ...], scenario: Scenario) -> None:
    check_every_spelling("miss", texts, scenario)


@by_policy(EVERY_ROUTING)
@searched(10)
@given(anything())
def test_the_engines_agree_under_every_routing(texts: tuple[str, ...], scenario: Scenario) -> None:
    check_every_spelling("routing", texts, scenario)


@pytest.mark.long
@pytest.mark.skipif(bool(os.environ.get("NUMBA_DISABLE_JIT")), reason="this is the run without a compiler")
def test_the_engines_agree_without_a_compiler_too() -> None:
    """The same functions as plain Python: what would be undefined in machine code is an error here."""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "MOEREPLAY_CASES": "40", "PYTHONPATH": str(ROOT)}
    chosen = "last_event or fast_path or all_prices or matrix_by_matrix or lower_tier or has_a_pool"
    options = ["-p", "no:cacheprovider", "--hypothesis-seed=0", "-k", chosen]
    command = [sys.executable, "-m", "pytest", *options, str(Path(__file__).relative_to(ROOT))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{5 * len(CONTRACTS) + len(ORDERS)} passed" in done.stdout
