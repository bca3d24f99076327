"""Worked examples of miss policies: the rules of their sources, followed by hand; and CPU and link side by side."""

from __future__ import annotations

from collections.abc import Sequence

from moereplay.analysis.forecast_fit import mass_changed
from moereplay.policies.contract import CPU, DROP, NONE, PER_TOKEN, UNIT, Costs, Step
from moereplay.policies.grammar import parse
from moereplay.simulator.config import configure
from moereplay.simulator.platform import Contention, Link, Measured, Platform, Roofline
from moereplay.simulator.platforms import platform
from moereplay.simulator.replay import replay
from moereplay.simulator.times import Times
from moereplay.traces.schema import Geometry
from tests.kit.bound_policies import BARE, PolicyHarness, units
from tests.kit.cases import Cell, ListSource, Prompted, Token, machine, replay_lists, sizes
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, random_trace

EIGHTH = UNIT // 8
MIXTRAL = Sizes(layers=1, experts=8, k=2)


def one_token(weights: Sequence[float]) -> Step:
    """A token of experts 0, 1, ... by falling weight."""
    everyone = list(range(len(weights)))
    demand = {"expert": everyone, "rank": everyone, "tokens": [1] * len(weights)}
    return BARE._replace(ids=[everyone], weight=units([weights]), mass=units([weights])[0], **demand)


# -- precisions -------------------------------------------------------------------------------------------------------


@every(
    "weights, verdicts",
    [((0.55, 0.45), [0, 0]), ((0.59, 0.41), [0, 0]), ((0.75, 0.25), [0, 1]), ((0.95, 0.05), [0, DROP])],
)
def test_hobbit_loads_mixtrals_second_expert_by_the_firsts_weight(weights: tuple[float, float], verdicts: list[int]):
    """s is 0 for the first and its weight for the second: up to .6 high, up to .9 low, beyond it skipped."""
    harness = PolicyHarness("miss", "hobbit", MIXTRAL, sizes=(8, 2))
    assert harness.resolve(one_token(weights), [0, 1]) == verdicts
    low_will_do = [verdict != 0 for verdict in verdicts]  # also for what would be skipped
    assert [harness.want(one_token(weights), n) for n in (0, 1)] == low_will_do


def test_a_resident_high_copy_satisfies_a_low_request_and_not_the_other_way_round():
    """.75 / .25 wants 0 high and 1 low; then 1 is the first and wants high, where it is only low: a miss.

    0 at 4 bits is satisfied by its high copy. 16 bits are 8 bytes, 4 bits are 2.
    """
    heavy_first: list[Token] = [[Cell(ids, [6 * EIGHTH, 2 * EIGHTH])] for ids in ([0, 1], [1, 0])]
    source = ListSource(sizes(1, 4, 2, expert_bytes=8), [Prompted(heavy_first)])
    outcome = replay_lists(source, 32, machine(), miss="hobbit")
    moved = [(event.expert, event.precision) for event in outcome.events if event.kind == "transfer"]
    assert moved == [(0, 0), (1, 1), (1, 0)]
    assert outcome.counts("hits", "misses", "bytes_demand") == (1, 3, 8 + 2 + 8)


def test_the_lowest_bits_are_moved_whatever_the_importance():
    """Ten experts of 8 bytes at 8 bits move as 2 bytes each; all of their weight runs below the highest precision."""
    outcome = replay_lists(ten_experts(), 160, machine(), miss="lowest_bit")
    assert outcome.counts("bytes_demand", "low_precision") == (20, 10)
    assert outcome["mass_low_precision"] == outcome["mass_kept"] == outcome["mass"]


def test_gate_weight_is_counted_below_each_precision():
    """The bottom six of ten experts run at 4 bits or less (11 + 9 + 7 + 5 + 3 + 1 %), three at 2 or less, one at 1."""
    outcome = replay_lists(ten_experts(), 160, machine(), miss="cascade:bits=8/4/2/1:below=0.6/0.3/0.1")
    below = outcome.counts("mass_low_precision", "mass_below_second", "mass_below_third")
    assert [round(100 * mass / UNIT) for mass in below] == [36, 9, 1]


@every(
    "miss, changed",
    [
        ("fetch", 0),
        ("lowest_bit:bits=8", 0),  # as stored
        ("lowest_bit:bits=4", 0.16),  # one precision alone, and all of it below the stored one
        ("lowest_bit:bits=8/4", 0.16),
        ("lowest_bit:bits=8/1", 1),  # at most as if nothing ran
        ("cascade:bits=8/4/2", 0.27 * 0.16 + 0.09 * 0.8),  # 4 bits for 11, 9 and 7 %, 2 for 5, 3 and 1 %
        ("drop:keep=2", 0.64),  # all but 19 and 17 %
        ("drop_cascade:bits=8/4", 0.27 * 0.16 + 0.09),
    ],
)
def test_gate_weight_at_few_bits_changes_by_the_error_of_its_output(miss: str, changed: float):
    """Every expert misses. Output errs by 2.4 steps: at 4 bits 2.4 / 15 = .16, at 2 bits 2.4 / 3 = .8."""
    outcome = replay_lists(ten_experts(), 160, machine(), miss=miss)
    found = mass_changed(outcome.totals, parse("miss", miss).text(full=True), 8)
    assert found is not None and abs(found - changed) < 1e-6


def test_a_drop_cascade_of_two_precisions_skips_the_third_class():
    """Bottom 60 % of ten are six, of which the bottom three are skipped: 4 * 8 + 3 * 4 bytes.

    With keep = 9 the two of rank 8 and 9 are moved at the lowest precision, and only the last is skipped.
    """
    for keep, moved, skipped in ((2, [8] * 4 + [4] * 3, 3), (9, [8] * 4 + [4] * 5, 1)):
        outcome = replay_lists(ten_experts(), 160, machine(), miss=f"drop_cascade:keep={keep}")
        assert [t1 - t0 for t0, t1, _, _ in outcome.spans("transfer")] == moved
        assert outcome["dropped"] == skipped


def test_a_drop_cascade_under_pressure_skips_what_does_not_fit():
    """13 bytes free: one at 8 bits, one at 4, then 1 byte is left, and only ranks within keep are fetched anyway."""
    harness = PolicyHarness("miss", "drop_cascade:when=pressure:keep=3", Sizes(1, 8, 5), sizes=(8, 4))
    assert harness.resolve(one_token([0.3, 0.25, 0.2, 0.15, 0.1]), range(5), free=13) == [0, 1, 1, DROP, DROP]


def ten_experts() -> ListSource:
    """One token of ten experts of 8 bytes, by falling weight."""
    weights = [19, 17, 15, 13, 11, 9, 7, 5, 3, 1]
    cell = Cell(list(range(10)), [weight * UNIT // 100 for weight in weights])
    return ListSource(sizes(1, 16, 10, expert_bytes=8, expert_bits=8), [Prompted([[cell]])])


# -- dropping by weight ------------------------------------------------------------------------------------------------


def test_cold_experts_weigh_less_than_their_fair_share():
    """Six of sum 1: F = 1 skips what is below 1/6, F = .75 what is below 1/8."""
    weights = (0.4, 0.2, 0.15, 0.1, 0.1, 0.05)
    for f, kept in (("1", 2), ("0.75", 3), ("0", 6)):
        verdicts = PolicyHarness("miss", f"drop_below:f={f}", Sizes(1, 8, 6)).resolve(one_token(weights), range(6))
        assert verdicts == [0] * kept + [DROP] * (6 - kept)


def test_a_share_is_meant_where_weights_do_not_sum_to_one():
    """OLMoE does not renormalise: .2 and .1 are both below 1/2, but the first is two thirds of what there is."""
    for of, verdicts in (("weight", [DROP, DROP]), ("share", [0, DROP])):
        assert PolicyHarness("miss", f"drop_below:of={of}", MIXTRAL).resolve(one_token((0.2, 0.1)), [0, 1]) == verdicts


# -- SMoE -------------------------------------------------------------------------------------------------------------

#: Chosen .30, .20 and .12; S = .10, so top is above .135 with alpha .35, and stand-ins lie in (.065, .10].
SCORES = [0.30, 0.20, 0.12, 0.10, 0.08, 0.06, 0.05, 0.02]


def smoe_token() -> Step:
    return one_token((0.5, 0.3, 0.2))._replace(gate=units([SCORES]), choice=[SCORES])


@every(
    "j, resident, stands_in",
    [
        (0, [3, 4, 5], NONE),  # top-score: loaded
        (1, [3, 4, 5], NONE),
        (2, [3, 4, 5], 3),  # low-score: the best in the band
        (2, [4, 5], 4),
        (2, [5, 6], NONE),  # below the band
    ],
)
def test_smoe_replaces_only_low_scores_and_only_from_the_band(j: int, resident: list[int], stands_in: int):
    harness = PolicyHarness("miss", "substitute_band", Sizes(1, 8, 3))
    assert harness.substitute(smoe_token(), 0, j, resident) == stands_in


def test_smoe_loads_a_low_score_that_is_a_top_score_of_another_token():
    """Token 1 gives expert 2 a score of .5, against .1 outside of its choice."""
    other = [0.1, 0.05, 0.5, 0.1, 0.1, 0.05, 0.05, 0.05]
    both = smoe_token()._replace(ids=[[0, 1, 2], [2, 0, 1]], gate=units([SCORES, other]), choice=[SCORES, other])
    harness = PolicyHarness("miss", "substitute_band", Sizes(1, 8, 3))
    harness.at(tokens=2)
    assert harness.substitute(both, 0, 2, [3, 4]) == NONE


def test_smoe_substitutes_in_decode_and_splits_the_rest_from_both_ends():
    """A load costs two tokens on the CPU. 3 is resident and stands in for 2; 0 is loaded, then 1 goes to the CPU."""
    harness = PolicyHarness("miss", "substitute_band:rest=balance:ratio=2", Sizes(1, 8, 3))
    harness.make_resident(3)
    assert harness.resolve(smoe_token(), [0, 1, 2]) == [0, CPU, PER_TOKEN]
    harness.at(phase=0)
    # in prefill no expert stands in: load 0 (2), CPU 2 (1), CPU 1 (2)
    assert harness.resolve(smoe_token(), [0, 1, 2]) == [0, CPU, CPU]


# -- CPU --------------------------------------------------------------------------------------------------------------


def prefill_of(*tokens: int) -> Step:
    return BARE._replace(expert=list(range(len(tokens))), tokens=list(tokens))


def test_fiddler_loads_from_ten_tokens_on():
    """Its constants: 7 ms for a token on the CPU, 70 ms for a load. 9 * 7 < 70, 10 * 7 is not; decode never loads."""
    harness = PolicyHarness("miss", "fiddler:ratio=10", MIXTRAL)
    assert harness.resolve(prefill_of(1), [0]) == [CPU]
    harness.at(phase=0)
    assert harness.resolve(prefill_of(12, 10, 9, 1), range(4)) == [0, 0, CPU, CPU]


def test_fiddler_may_share_the_work_so_that_both_end_soonest():
    """Loads of 10 and tokens 12, 10, 9 and 1: none on the CPU ends at 40, one at 30, two at 20 (CPU 10), three at 20.

    Two and three end alike; the smaller share of the CPU is taken.
    """
    harness = PolicyHarness("miss", "fiddler:ratio=10:goal=max", MIXTRAL)
    harness.at(phase=0)
    assert harness.resolve(prefill_of(12, 10, 9, 1), range(4)) == [0, 0, CPU, CPU]


def test_a_cpu_that_takes_no_time_is_asked_as_one_of_a_nanosecond():
    """Zero would say that there is none, and leave the ratio at zero: no miss would ever run there."""
    geometry = Geometry(layers=1, experts=2, k=1, expert_bytes=(100,))
    free = Platform(name="free", links=(Link(bytes_per_s=1e9),), compute=Measured(), cpu=Measured())
    costs = Times(free, geometry, (geometry.expert_bytes,)).costs
    fiddler = parse("miss", "fiddler")
    assert costs == Costs(100, 0, 1) and fiddler.policy.priced(fiddler.params, costs)["ratio"] == 100


def test_fiddlers_ratio_may_be_the_platforms():
    """A load takes 90 + 10 ns with its compute, a token on the CPU 25: four tokens' worth. Given, it is left alone."""
    fiddler, costs = parse("miss", "fiddler"), Costs(load=90, compute=10, cpu=25)
    assert fiddler.policy.priced(fiddler.params, costs)["ratio"] == 4
    given = parse("miss", "fiddler:ratio=10")
    assert given.policy.priced(given.params, costs) == given.params


def test_a_result_names_the_ratio_that_the_platform_gave():
    """OLMoE-sized figures do not matter: whatever it is, writing it out gives the same events."""
    trace = random_trace(1, Sizes(layers=2, experts=6, k=2, tokens=8, prompt=6))
    settings = {"capacity": "50%", "platform": "h100-pcie5"}
    harness = replay(trace, configure(miss="fiddler:decode=cost", **settings), log=True)
    spelled = harness.about["policies"]["miss"]
    assert "ratio=0:" not in spelled
    written = replay(trace, configure(miss=spelled, **settings), log=True)
    assert written.events == harness.events
    assert written.about["policies"] == harness.about["policies"]


def test_a_platforms_costs_are_those_of_its_mean_expert():
    """Layers of 1000 and 3000 bytes at 1 byte/ns after 10 ns: (1010 + 3010) / 2; compute 5, CPU 40 + 2 a token."""
    where = Platform(
        name="by hand",
        links=(Link(bytes_per_s=1e9, latency_ns=10),),
        compute=Measured(expert_ns=5),
        cpu=Measured(expert_ns=40, expert_ns_per_token=2),
    )
    geometry = sizes(2, 4, 2, expert_bytes=(1000, 3000))
    assert Times(where, geometry, (geometry.expert_bytes,)).costs == Costs(2010, 5, 42)


def test_freetokens_share_on_a_5090_server():
    """The link's 52.7 of the host's 77.3 GB/s: q = .68, so of eight misses 5 are fetched, of one one."""
    harness = PolicyHarness("miss", f"split:q={52.7 / 77.3:.2f}", Sizes(1, 8, 8))
    assert harness.resolve(BARE, range(8)) == [0] * 5 + [CPU] * 3
    assert harness.resolve(BARE, [0]) == [0]


def test_freetokens_share_asked_of_the_platform():
    """An expert takes 9 ns over the link and 3 on the CPU: of four misses one is fetched, and both end after 9."""
    chosen = parse("miss", "split")
    assert chosen.policy.priced(chosen.params, Costs(9, 5, 3))["q"] == 0.25
    assert parse("miss", "split:q=0.75").policy.priced({"q": 0.75}, Costs(9, 5, 3))["q"] == 0.75


@every("name", ["cascade", "drop_cascade"])
def test_importance_is_gate_weight_and_pressure_is_not(name: str):
    """Ranks never stand in for weights that were not recorded."""
    assert parse("miss", name).needs == {"weights"}
    assert not parse("miss", f"{name}:when=pressure").needs


def test_everything_that_is_missing_runs_on_the_cpu():
    """Two tokens; expert 3 is resident. The CPU takes one after the other, and the cache stays as it was."""
    rows: list[Token] = [[Cell(ids, [5 * EIGHTH, 3 * EIGHTH])] for ids in ([0, 3], [3, 1])]
    source = ListSource(sizes(1, 4, 2), [Prompted(rows)])
    outcome = replay_lists(source, 2, machine(dense_ns=1, expert_ns=2, cpu_ns=7), miss="cpu", warm=((0, 3),))
    assert outcome.spans("cpu") == [(1, 8, 0, 0), (9, 16, 0, 1)]
    assert outcome.counts("hits", "cpu_executed", "bytes_demand", "time_ns") == (2, 2, 0, 16)


# -- CPU and link on one memory ---------------------------------------------------------------------------------------


def contended(**shares: float) -> Platform:
    """One byte takes 10 ns on the link; 20 ns per expert on the CPU."""
    where = machine(bytes_per_ns=0.1, cpu_ns=20)
    return where.model_copy(update={"contention": Contention(**shares)})


def two_misses() -> ListSource:
    return ListSource(sizes(1, 4, 2), [Prompted([[Cell([0, 1], [5 * EIGHTH, 3 * EIGHTH])]])])


@every("shares, link, cpu", [
    ({}, 10, 20),
    ({"link": 0.5}, 20, 20),
    ({"cpu": 0.5}, 10, 40),
    ({"link": 0.8, "cpu": 0.6}, 13, 34),
])  # fmt: skip
def test_link_and_cpu_slow_each_other_down_while_both_work(shares: dict[str, float], link: int, cpu: int):
    """The fetched miss and the one on the CPU begin in the same gate: both are slowed. 10 / .8, 20 / .6 are rounded up.

    Measured on one host (our notes on FreeToken): CPU 62 GB/s alone and 37 with the link, link 57 and 38.
    """
    outcome = replay_lists(two_misses(), 2, contended(**shares), miss="split")
    assert outcome.spans("transfer") == [(0, link, 0, 0)]
    assert outcome.spans("cpu") == [(0, cpu, 0, 1)]
    assert outcome["link_busy_ns"] == link


def test_alone_neither_is_slowed():
    slow = contended(link=0.5, cpu=0.5)
    assert replay_lists(two_misses(), 2, slow, miss="cpu").spans("cpu") == [(0, 20, 0, 0), (20, 40, 0, 1)]
    fetched = replay_lists(two_misses(), 2, slow, miss="fetch")
    assert [t1 - t0 for t0, t1, _, _ in fetched.spans("transfer")] == [10, 10]


def test_a_roofline_loses_memory_bandwidth_and_no_flops():
    """1000 bytes at 1 byte/ns: 1000 ns, at half 2000; 4000 tokens of 500 weights at 1 FLOP/ps: 4000 ns either way."""
    roofline = Roofline(flops=1e12, memory_bytes_per_s=1e9)
    assert (roofline.ns(500, 1000, 1), roofline.ns(500, 1000, 1, share=0.5)) == (1000, 2000)
    assert roofline.ns(500, 1000, 4000, share=0.5) == roofline.ns(500, 1000, 4000) == 4000


def test_contention_is_part_of_a_platforms_figures_only_where_it_is_described():
    assert "contention" not in platform("h100-pcie5").figures()
    assert contended(cpu=0.5).figures()["contention"] == {"cpu": 0.5, "link": 1.0}
