"""Accounting of the router's own gate weight (kept, at which precision, substituted or dropped), by hand."""

from __future__ import annotations

from typing import Any

from moereplay.policies.contract import UNIT
from moereplay.simulator.config import PolicySet, configure
from moereplay.simulator.reference.counters import Counters, count_fidelity, reweighed, weights_of
from moereplay.simulator.source import Gate, Mixture, Pass
from moereplay.traces.demand import union_of
from tests.kit.cases import Cell, ListSource, Outcome, Prompted, Token, machine, replay_lists, sizes
from tests.kit.every import every

QUARTER = UNIT // 4
MASSES = ("mass", "mass_kept", "mass_low_precision", "mass_substituted", "mass_dropped")
ALIKE = (0.0, 0.0, -1.0, 0.0)


def replayed(cells: list[Cell], **settings: Any) -> Outcome:
    rows: list[Token] = [[cell] for cell in cells]
    source = ListSource(sizes(1, 4, 2, expert_bytes=8, expert_bits=8), [Prompted(rows, prompt=len(rows))])
    return replay_lists(source, 32, machine(), **settings)


def test_what_runs_at_fewer_bits_is_kept_and_counted() -> None:
    # the less important half at 4 bits: 1/4 of token 0, and all of token 1's half for the same expert
    cells = [Cell([0, 1], [3 * QUARTER, QUARTER]), Cell([0, 1], [3 * QUARTER, QUARTER])]
    outcome = replayed(cells, miss="cascade:bits=8/4:below=0.5")
    assert outcome.counts(*MASSES) == (2 * UNIT, 2 * UNIT, 2 * QUARTER, 0, 0)


def test_a_changed_choice_is_a_substitution() -> None:
    # lifted by the range of 1, the resident 3 ties with 0 and 1 no more: it is first, and 1 is evicted
    cell = Cell([0, 1], [3 * QUARTER, QUARTER], logits=ALIKE)
    outcome = replayed([cell], routing="cache_prior:lam=1:top_j=1", warm=((0, 3),))
    assert outcome.counts(*MASSES) == (UNIT, 3 * QUARTER, 0, QUARTER, 0)


class NoSource:
    """Weighs every executed expert alike."""

    def weigh(self, step: Pass, layer: int, ids: list[list[int]]) -> list[list[int]]:
        return [[UNIT // 4 if e >= 0 else 0 for e in row] for row in ids]


@every(
    "routed, run, masses",
    [
        # 4 came for one of two lost: for 1, in whose slot something runs; 2's slot is empty
        ([4, 0, -1], [4, 0, -1], (5, 0, 2, 1)),
        # 4 came and was dropped at its miss: no expert stands in for 2
        ([0, 1, 4], [0, 1, -1], (7, 0, 0, 1)),
        # the same slots in another order are the same mixture
        ([2, 1, 0], [2, 1, 0], (8, 0, 0, 0)),
        # 0 is dropped at its miss; that 1 moved into its slot does not make it a substitute
        ([1, 0, 2], [1, -1, 2], (3, 0, 0, 5)),
    ],
)
def test_lost_mass_is_shared_between_stand_ins_and_drops(
    routed: list[int], run: list[int], masses: tuple[int, ...]
) -> None:
    """The router's own: 5, 2 and 1 eighths for experts 0, 1 and 2."""
    own, weights = [[0, 1, 2]], [[5 * UNIT // 8, 2 * UNIT // 8, UNIT // 8]]
    counters, here = Counters(1), Pass.of_slice(0, 0, 1, 1, 0)
    counters.begin_pass(0, here)
    gate = Gate(own, union_of(own, weights), weights)
    count_fidelity(counters, NoSource(), here, 0, Mixture(gate, [routed], [run], {}))  # pyright: ignore
    totals = counters.totals(0)
    assert tuple(totals[name] * 8 // UNIT for name in MASSES[1:]) == masses


def test_a_token_is_weighed_anew_when_it_was_routed_elsewhere_and_not_when_a_miss_was_dropped() -> None:
    assert not reweighed([0, 1], [0, 1], [0, -1])
    assert not reweighed([0, 1], [1, 0], [1, 0])
    assert reweighed([0, 1], [0, -1], [0, -1])
    assert reweighed([0, 1], [0, 2], [0, 2])
    assert reweighed([0, 1], [0, 1], [0, 2])


def test_a_token_that_keeps_its_experts_keeps_their_recorded_weights() -> None:
    """Token 0 keeps both, in another order; token 1 drops one at a miss; token 2 is given a new one: weighed anew."""

    class Tenths:
        def weigh(self, step: Pass, layer: int, ids: list[list[int]]) -> list[list[int]]:
            return [[10 * e for e in row] for row in ids]

    gate = Gate([[0, 1], [1, 2], [2, 0]], union_of([[0]], [[1]]), [[5, 3], [4, 2], [7, 1]])
    routed, run = [[1, 0], [1, 2], [2, 3]], [[1, 0], [1, -1], [2, 3]]
    given: Any = Tenths()
    assert weights_of(given, Pass.of_slice(0, 0, 1, 3, 0), 0, gate, routed, run) == [[3, 5], [4, 0], [20, 30]]


def test_what_a_routing_policy_drops_was_still_chosen() -> None:
    """Two tokens of two experts each; pruned to one, half of the choice is kept, as of the four that there were."""
    cell = Cell([0, 1], [3 * UNIT // 4, UNIT // 4], logits=[1.0986122886681098, 0.0, -9.0, -9.0])
    source = ListSource(sizes(1, 4, 2), [Prompted([[cell], [cell]])])
    outcome = replay_lists(source, 4, machine(), routing="prune:keep=1")
    assert outcome.counts("assignments", "assignments_kept") == (4, 2)


def test_policies_that_change_the_mixture_are_labelled_open_loop() -> None:
    def open_loop(**policies: str) -> bool:
        chosen: PolicySet = configure(**policies).policy_set()
        return chosen.open_loop

    changing = ["lowest_bit", "hobbit", "drop_cascade", "drop_below", "substitute_band"]
    assert all(open_loop(miss=miss) for miss in changing)
    assert all(open_loop(routing=routing) for routing in ("max_rank", "cumulative", "reuse_distance", "prune", "swap"))
    assert not any(open_loop(miss=miss) for miss in ("cpu", "split", "fiddler"))
