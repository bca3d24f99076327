"""Where several copies must leave for one, a policy that may decline is asked about each of them before any leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from moereplay import policies
from moereplay.policies import files
from moereplay.policies.contract import PolicyError
from tests.kit.cases import Cell, ListSource, Outcome, Prompted, Token, machine, naming, replay_lists, sizes, tokens
from tests.kit.every import every
from tests.kit.scenarios import Scenario, scenarios
from tests.kit.search import searched

GUARDED = 3  # every third expert, in the policy below
#: A policy without a key: it remembers what is in a pool, and its hook looks for the lowest itself.
POLITE = f'''
"""Polite: the lowest leaves, but every third never does."""

from moereplay.policies.contract import Eviction, Memory


def on_insert(now, experts, copies, own, y, prefetched):
    """It is in its pool."""
    own.rows[y][0] = 1


def on_evict(now, experts, copies, own, y):
    """And not any more."""
    own.rows[y][0] = 0


def victim(now, experts, copies, own, pool, y_in):
    """The lowest that may leave."""
    for y in range(now["layers"] * now["experts"] * now["precisions"]):
        if own.rows[y][0] == 1 and copies[y]["pool"] == pool and copies[y]["protected"] == 0:
            return y
    return -1


def admit(now, experts, copies, own, y_in, prefetched, y_out):
    """Not over every third expert."""
    return y_out // now["precisions"] % {GUARDED} > 0


POLICY = Eviction(
    name="polite",
    summary="for this test",
    source="here",
    memory=Memory(rows=1),
    on_insert=on_insert,
    on_evict=on_evict,
    victim=victim,
    admit=admit,
)
'''


WHERE = machine(dense_ns=20, expert_ns=2)


def victims(outcome: Outcome) -> list[tuple[int, int]]:
    return [(layer, expert) for _, _, layer, expert in outcome.spans("evict")]


def small_then_large() -> ListSource:
    """Experts of layer 0 take one byte and of layer 1 three: 0.0, 0.1 and 0.2 come first, then 1.0, then they again."""
    rows = tokens([[0], [-1]], [[1], [-1]], [[2], [-1]], [[-1], [0]], [[0], [-1]], [[1], [-1]], [[2], [-1]])
    return ListSource(sizes(2, 3, 1, (1, 3)), [Prompted(rows)])


@every(
    "eviction, profile, evicted",
    [
        # the pool has 4 bytes and one of them is free: 1.0 needs 0.2, and then one more. 0.0 and 0.1 fill the half that
        # is pinned; so nothing leaves, 1.0 is streamed, and all of layer 0 hits afterwards
        ("pinned:profile=given", ((0, 0), (0, 1)), []),
        # a quarter pins 0.0 alone: 0.2 would be the older only after 0.1
        ("pinned:profile=given:share=.25:rest=fifo", ((0, 0), (0, 1)), [(0, 1), (0, 2)]),
        # 0.2 has no rank and would give way, 0.1 ranks above 1.0
        ("static:profile=given", ((0, 0), (0, 1), (1, 0)), []),
        # both rank below it
        ("static:profile=given", ((0, 0), (1, 0), (0, 1)), [(0, 2), (0, 1)]),
    ],
)
def test_nothing_leaves_unless_all_that_must_leave_may(
    eviction: str, profile: tuple[tuple[int, int], ...], evicted: list[tuple[int, int]]
) -> None:
    outcome = replay_lists(small_then_large(), 4, WHERE, eviction=eviction, profile=profile)
    assert victims(outcome)[:2] == evicted
    if not evicted:
        assert outcome.counts("declined", "evictions", "hits") == (1, 0, 3)


def test_belady_decides_on_the_first_victim_for_all() -> None:
    # 1.0 comes back at position 7, 0.2 at 6, 0.1 at 5 and 0.0 at 4, so bypass declines; if 0.2 never does, it is the
    # farthest, and one that 1.0 may push out: then 0.1 leaves as well, though it comes back before 1.0
    back = [[[0], [-1]], [[1], [-1]]]
    first = [[[0], [-1]], [[1], [-1]], [[2], [-1]], [[-1], [0]]]
    for more, evicted in (([[[2], [-1]]], []), ([], [(0, 2), (0, 1)])):
        source = ListSource(sizes(2, 3, 1, (1, 3)), [Prompted(tokens(*first, *back, *more, [[-1], [0]]))])
        outcome = replay_lists(source, 4, WHERE, eviction="belady:bypass=true")
        leaving = [event for event in outcome.events if event.kind == "evict" and event.step_pass == 3]
        assert [(event.layer, event.expert) for event in leaving] == evicted


@every("allowed, dropped, evicted", [("false", 1, []), ("true", 0, [(0, 1), (0, 0)])])
def test_a_prefetch_that_needs_a_current_copy_too_takes_none(
    allowed: str, dropped: int, evicted: list[tuple[int, int]]
) -> None:
    # 4 bytes; warm are 0.0, 0.1 and 1.0, one byte each. The pass uses 0.0, which is current then; the gate of layer 1,
    # at 42, demands 1.0 and names 2.0, whose 3 bytes need 0.1, which is stale, and 0.0 too
    pass_of_one: Token = [
        Cell([0], look=[naming(3, [0])]),
        Cell([0], look=[naming(3, [0])]),
        Cell([-1], look=[naming(3, [0])]),
    ]
    outcome = replay_lists(
        ListSource(sizes(3, 3, 1, (1, 1, 3)), [Prompted([pass_of_one])]),
        4,
        WHERE,
        eviction=f"least_stale:prefetch_evicts_current={allowed}",
        prefetch="top_k",
        warm=((0, 0), (0, 1), (1, 0)),
    )
    assert outcome["prefetch_dropped"] == dropped
    assert victims(outcome) == evicted


#: Misses that bring experts as they are stored: the others' sizes are another share of the pool.
AS_STORED = ("fetch", "drop:keep=1", "substitute:tolerance=.5", "split", "cpu")

# -- laws, where spare copies and pools of a few experts come in too ------------------------------------------------


@pytest.fixture
def polite(tmp_path: Path) -> Iterator[str]:
    """A user's own policy with a queue's hook that may decline."""
    (tmp_path / "polite.py").write_text(POLITE)
    yield files.register(tmp_path / "polite.py").name
    policies.REGISTERED["eviction"].clear()


@st.composite
def tight(draw: st.DrawFn) -> Scenario:
    """A scenario whose layers' experts differ in size, in one pool of hardly more than the largest."""
    scenario = draw(scenarios())
    unequal = tuple(draw(st.permutations([1, 4, 7]))[: scenario.source.geometry.layers])
    scenario.source.geometry = scenario.source.geometry.model_copy(update={"expert_bytes": unequal})
    return scenario._replace(pools=(max(unequal) + draw(st.integers(0, 8)),))


@searched(60, HealthCheck.function_scoped_fixture)
@given(scenario=tight())
def test_what_a_queue_guards_never_leaves(polite: str, scenario: Scenario) -> None:
    """No copy is lost between selection and eviction: both engines log the same to the last event."""
    scenario.settings["eviction"] = polite
    gone = {layer * scenario.source.geometry.experts + expert for layer, expert in victims_in_pools(scenario.replay())}
    assert all(x % GUARDED > 0 for x in gone)


@searched(60, HealthCheck.function_scoped_fixture)
@given(scenario=tight(), share=st.sampled_from([0.3, 0.6, 1]))
def test_what_is_pinned_never_leaves(scenario: Scenario, share: float) -> None:
    """The experts that a profile of the smallest layer fills the share with."""
    geometry = scenario.source.geometry
    small = min(geometry.expert_bytes)
    layer = geometry.expert_bytes.index(small)
    profile = tuple((layer, expert) for expert in range(geometry.experts))
    scenario.settings.update(eviction=f"pinned:profile=given:share={share}", profile=profile)
    fitting = int(scenario.pools[0] * share) // small if scenario.settings["miss"] in AS_STORED else 0
    assert not set(profile[:fitting]) & set(victims_in_pools(scenario.replay()))


def victims_in_pools(outcome: Outcome) -> list[tuple[int, int]]:
    """Those that left a pool, and not a side buffer, whose oldest is overwritten whatever the policy says."""
    if any(event.kind == "promote" for event in outcome.events):
        return []
    return victims(outcome)


def test_the_declaration_of_deciding_once_is_yes_or_no(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(POLITE.replace("admit=admit,\n", "admit=admit, decides_once=1,\n"))
    with pytest.raises(PolicyError, match="invalid decides_once 1: expected True or False"):
        files.register(tmp_path / "mine.py")
