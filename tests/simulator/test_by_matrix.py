"""Links that read matrix by matrix, to the nanosecond: batches, rounds and stages on both engines; their figures."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise
from math import floor
from typing import Any

import numpy as np
import pytest

from moereplay.simulator.compiled.link import duration, portion
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Link
from moereplay.simulator.platforms import platform
from moereplay.simulator.rates import NS, ceiling
from moereplay.simulator.replay import plan
from moereplay.simulator.times import Times
from moereplay.traces.geometry import known, with_matrices
from moereplay.traces.schema import Geometry, Header, Provenance, Request, TraceError, memory_trace
from tests.kit.cases import Cell, ListSource, Outcome, Prompted, machine, naming, replay_lists, sizes
from tests.kit.cases import tokens as rows_of

BY_MATRIX = {"link": {"by_matrix": True}}
TWO_TO_ONE = {"matrices": (2, 1)}


def step(demand: list[int], prices: dict[str, Any], pool: int = 64, **settings: Any) -> Outcome:
    """One token that demands these of 4 experts of 4 bytes, at 1 byte/ns. Dense 2 ns: the gate is at 2; an expert 3."""
    where, of = settings.pop("where", {}), settings.pop("of", {})
    source = ListSource(sizes(1, 4, len(demand), expert_bytes=4, **of), [Prompted(rows_of([demand]))])
    return replay_lists(source, pool, machine(dense_ns=2, expert_ns=3, prices=prices, **where), **settings)


# ---------------------------------------------------------------- batches and stages


def test_compute_follows_the_matrices_of_all_missing_experts() -> None:
    # the gate at 2: 0 and 1 are one transfer of 8 bytes, 2-10; its thirds land at 2 + 2.7, 2 + 5.3, both rounded up,
    # and 10. The hit 2 is computed with them, 9 ns in three stages: 5-8, 8-11, 11-14. Waits: 2-5
    outcome = step([0, 1, 2], BY_MATRIX, warm=((0, 2),))
    assert outcome.spans("transfer") == [(2, 10, 0, 0), (2, 10, 0, 1)]
    assert outcome.spans("stage") == [(5, 8, 0, -1), (8, 11, 0, -1), (11, 14, 0, -1)]
    assert outcome.counts("expert_ns", "stall_ns", "link_busy_ns", "bytes_demand", "insertions") == (9, 3, 8, 8, 2)
    assert (outcome["time_ns"], outcome.spans("expert")) == (14, [])


def test_the_model_says_how_large_the_matrices_are() -> None:
    # gate and up are one matrix of two thirds: it lands at 2 + 5.3, rounded up, the other at 10. 6 ns of compute: two
    # thirds 8-12, one third 12-14
    outcome = step([0, 1], BY_MATRIX, of=TWO_TO_ONE)
    assert outcome.spans("stage") == [(8, 12, 0, -1), (12, 14, 0, -1)]
    one = step([0, 1], BY_MATRIX, of={"matrices": (7,)})
    assert one.spans("stage") == [(10, 16, 0, -1)]


def test_a_batch_starts_once_and_by_its_first_matrix() -> None:
    # 1 ns a byte to start: of the first matrix of the first expert, 2.7 bytes rounded up to 3. Latency 1: bytes from
    # 2 + 1 + 3 to 14
    prices = {"link": {"by_matrix": True, "start_ns_per_mib": 1 << 20}}
    outcome = step([0, 1], prices, of=TWO_TO_ONE, where={"latency_ns": 1})
    assert outcome.spans("transfer") == [(2, 14, 0, 0), (2, 14, 0, 1)]
    assert outcome.spans("stage") == [(12, 16, 0, -1), (16, 18, 0, -1)]  # the first part after 5.3 ns: 6 + 6


def test_a_batch_has_the_bandwidth_of_its_reads_and_as_many_lanes() -> None:
    # reads of ⌊8 / (2 * 3)⌋ = 1 byte at 2 bytes/ns, and 4 lanes of .25 bytes/ns, as there are 6 reads: 8 ns. One
    # expert alone has 3 reads for 4 lanes: .75 bytes/ns, 5.3 ns rounded up
    link = {"by_matrix": True, "by_size": ((1, 2e9), (2, 9e9)), "lane_bytes_per_s": 0.25e9}
    assert step([0, 1], {"link": link}, where={"depth": 4}).spans("transfer")[0] == (2, 10, 0, 0)
    assert step([0], {"link": link}, where={"depth": 4}).spans("transfer") == [(2, 8, 0, 0)]
    # without lanes: 8 bytes at 2 bytes/ns; in one matrix they are two reads of 4 bytes, at 9 bytes/ns
    free = {"link": {"by_matrix": True, "by_size": ((1, 2e9), (2, 9e9))}}
    assert step([0, 1], free).spans("transfer")[0] == (2, 6, 0, 0)
    assert step([0, 1], free, of={"matrices": (1,)}).spans("transfer")[0] == (2, 3, 0, 0)


def test_a_batch_starts_when_all_its_demands_are_loaded() -> None:
    # loaded 2-7 and 7-12; a batch 12-20, its parts at 15, 18 and 20. 9 ns with the hit: 15-18-21-24
    outcome = step([0, 1, 2], BY_MATRIX | {"loading": {"ns_per_expert": 5}}, warm=((0, 2),))
    assert outcome.spans("load") == [(2, 7, 0, 0), (7, 12, 0, 1)]
    assert outcome.spans("transfer") == [(12, 20, 0, 0), (12, 20, 0, 1)]
    assert outcome.spans("stage") == [(15, 18, 0, -1), (18, 21, 0, -1), (21, 24, 0, -1)]
    assert outcome.counts("loading_ns", "stall_ns", "time_ns") == (10, 3, 24)


def test_what_does_not_fit_is_the_next_round() -> None:
    # a pool of two: 0 and 1 are a batch 2-10, parts at 5, 8, 10: 6 ns of compute 5-7, 8-10, 10-12. Then 2 takes the
    # place of 0: 12-16, parts at 14, 15, 16
    outcome = step([0, 1, 2], BY_MATRIX, pool=8)
    assert outcome.spans("transfer") == [(2, 10, 0, 0), (2, 10, 0, 1), (12, 16, 0, 2)]
    assert outcome.spans("stage")[:3] == [(5, 7, 0, -1), (8, 10, 0, -1), (10, 12, 0, -1)]
    assert outcome.spans("stage")[3:] == [(14, 15, 0, -1), (15, 16, 0, -1), (16, 17, 0, -1)]
    assert outcome.counts("evictions", "stall_ns", "time_ns") == (1, 3 + 1 + 2, 17)


def test_a_stage_waits_for_its_matrix_on_every_link() -> None:
    # 0 and 1 lie behind link 0: 2-10, parts at 5, 8, 10. 2 lies behind link 1, latency 4: bytes 6-10, parts at 8, 9, 10
    more = (Link(bytes_per_s=1e9, by_matrix=True, share=1.0, latency_ns=4),)
    outcome = step([0, 1, 2], BY_MATRIX, where={"share": 1.0, "more": more})
    assert outcome.spans("transfer") == [(2, 10, 0, 0), (2, 10, 0, 1), (2, 10, 0, 2)]
    assert outcome.spans("stage") == [(8, 11, 0, -1), (11, 14, 0, -1), (14, 17, 0, -1)]


def test_a_delayed_hit_is_awaited_as_a_whole() -> None:
    # gate at 4: the hit 0 is computed 4-5, a prefetch of (1, 2) moves 4-12. Gate of layer 1 at 9: a demand for 3 waits
    # behind it, 12-20, parts at 15, 18, 20; 2 ns of both in three stages: 1 after 15, 1 after 18, none after 20
    token = [Cell([0, -1], look=[naming(4, [2])]), Cell([2, 3])]
    source = ListSource(sizes(2, 4, 2, expert_bytes=8), [Prompted([token])])
    where = machine(dense_ns=4, expert_ns=1, prices=BY_MATRIX)
    outcome = replay_lists(source, 64, where, prefetch="top_k:factor=.5", warm=((0, 0),))
    assert outcome.spans("transfer") == [(4, 12, 1, 2), (12, 20, 1, 3)]
    assert outcome.spans("stage") == [(4, 5, 0, -1), (15, 16, 1, -1), (18, 19, 1, -1), (20, 20, 1, -1)]
    assert outcome.counts("late", "misses", "prefetch_used", "time_ns") == (1, 1, 1, 20)


def test_a_step_that_misses_nothing_is_one_activity() -> None:
    outcome = step([0, 1, 2], BY_MATRIX, warm=((0, 0), (0, 1), (0, 2)))
    assert outcome.spans("stage") == [(2, 11, 0, -1)]
    assert outcome.counts("hits", "stall_ns", "time_ns") == (3, 0, 11)


def test_contention_is_judged_stage_by_stage() -> None:
    # parts land at 5, 8, 10. The link works when the first two stages begin, at half the rate: each is a third of 12
    # ns; the third begins alone: a third of 6
    outcome = step([0, 1], BY_MATRIX | {"contention": {"compute": 0.5}})
    assert outcome.spans("stage") == [(5, 9, 0, -1), (9, 13, 0, -1), (13, 15, 0, -1)]
    assert outcome["expert_ns"] == 4 + 4 + 2


def test_without_overlap_a_batch_is_computed_after_its_last_part() -> None:
    outcome = step([0, 1, 2], BY_MATRIX | {"overlap": "none"}, warm=((0, 2),))
    assert outcome.spans("transfer") == [(2, 10, 0, 0), (2, 10, 0, 1)]
    assert outcome.spans("expert") == [(10, 13, 0, 0), (13, 16, 0, 1), (16, 19, 0, 2)]


def test_sequentially_each_expert_is_a_batch_and_a_round() -> None:
    # 0 moves 2-6, parts at 4, 5, 6: a nanosecond each. 1 moves 7-11, parts at 9, 10, 11. The hit 2 is one activity
    outcome = step([0, 1, 2], BY_MATRIX, contract="sequential", warm=((0, 2),))
    assert outcome.spans("transfer") == [(2, 6, 0, 0), (7, 11, 0, 1)]
    assert [(begin, end) for begin, end, _, _ in outcome.spans("stage")] == [
        (4, 5), (5, 6), (6, 7), (9, 10), (10, 11), (11, 12), (12, 15)
    ]  # fmt: skip


def test_a_substitute_leaves_the_batch_to_the_expert_that_another_token_fetches() -> None:
    # three tokens want expert 0, which moves 2-6, parts at 4, 5, 6. Two take 1 and 2 in its place: rounds of their own,
    # 2-5 and 5-8, the second after the batch has started. Then the parts of 0 are computed: 8-9, 9-10, 10-11
    logits = [1, 1, -9, -9], [1, -9, 1, -9], [5, -5, -5, -9]
    source = ListSource(sizes(1, 4, 1, expert_bytes=4), [Prompted([[Cell([0], logits=row)] for row in logits], 3)])
    where = machine(dense_ns=2, expert_ns=3, prices=BY_MATRIX)
    outcome = replay_lists(source, 64, where, contract="sequential", miss="substitute", warm=((0, 1), (0, 2)))
    assert outcome.spans("transfer") == [(2, 6, 0, 0)]
    assert [(begin, end) for begin, end, _, _ in outcome.spans("stage")] == [(2, 5), (5, 8), (8, 9), (9, 10), (10, 11)]


def test_a_rejected_demand_is_part_of_the_batch() -> None:
    # static never admits 2: it takes the bypass buffer, of one expert, so 3 waits for the next round
    outcome = step([2, 3], BY_MATRIX, pool=8, eviction="static:profile=given", profile=((0, 0), (0, 1)),
                   warm=((0, 0), (0, 1)))  # fmt: skip
    assert outcome.spans("transfer", "streamed") == [(2, 6, 0, 2), (7, 11, 0, 3)]
    assert outcome.counts("declined", "insertions", "time_ns") == (2, 0, 12)


def scattered(seed: int, **of: Any) -> ListSource:
    """A request of 9 tokens that demand 2 of 6 experts of 5 bytes in each of 3 layers."""
    draw = random.Random(seed)
    rows = [[draw.sample(range(6), 2) for _ in range(3)] for _ in range(9)]
    return ListSource(sizes(3, 6, 2, expert_bytes=5, **of), [Prompted(rows_of(*rows))])


@pytest.mark.parametrize("expert_ns", [0, 4, 100])
def test_a_step_takes_what_the_closed_form_says(expert_ns: int) -> None:
    # a pool holds all of a step, one link, no prefetch, so from a gate: bytes begin after latency and start, part p
    # lands ⌈m * 5 * p / 3⌉ later, and compute follows stage by stage
    where = machine(latency_ns=3, dense_ns=2, expert_ns=expert_ns,
                    prices={"link": {"by_matrix": True, "start_ns": 7}})  # fmt: skip
    outcome = replay_lists(scattered(3), 20, where)
    time = 0
    for at in range(27):
        time += 2
        missed = sum(1 for event in outcome.events if event.kind == "transfer"
                     and event.step_pass * 3 + event.layer == at)  # fmt: skip
        whole, begins = 2 * expert_ns, time + 10
        for part in (1, 2, 3) if missed else ():
            landed = begins + ceiling(missed * 5 * part, 3)
            time = max(time, landed) + ceiling(whole * part, 3) - ceiling(whole * (part - 1), 3)
        time += 0 if missed else whole
    assert outcome["misses"] > 5
    assert outcome["time_ns"] == time


# ---------------------------------------------------------------- figures


def test_long_division_is_exact() -> None:
    draw = random.Random(5)
    for _ in range(400):
        whole = draw.randrange(1, 1 << draw.randrange(1, 64))
        part, amount = draw.randrange(whole + 1), draw.randrange(1 << draw.randrange(1, 60))
        assert portion(amount, part, whole) == amount * part // whole
        size, rate = draw.randrange(1 << 40), draw.randrange(1, 10**18)
        assert duration(size, rate) == ceiling(size * NS, rate)


def test_the_time_on_the_wire_is_that_of_the_text_in_fractions() -> None:
    draw = random.Random(8)
    for _ in range(300):
        places = sorted(draw.sample(range(1, 40), draw.randrange(3)))
        points = tuple((place, round(draw.uniform(1, 9e9), draw.randrange(3))) for place in places)
        lanes = draw.choice((None, round(draw.uniform(1, 4e9), 1)))
        link = Link(bytes_per_s=round(draw.uniform(1, 9e9), 1), by_size=points, depth=draw.randrange(1, 9),
                    lane_bytes_per_s=lanes, by_matrix=True)  # fmt: skip
        size, reads, share = draw.randrange(1, 400), draw.randrange(1, 12), draw.choice((1, 0.7, 0.3))
        assert link.batch_ns(size, reads, share) == by_text(link, size, reads, Fraction(str(share)))


def by_text(link: Link, size: int, reads: int, share: Fraction) -> int:
    figures = link.by_size or ((1, link.bytes_per_s),)
    points = [(x, max(1, floor(Fraction(str(y)) * share))) for x, y in figures]
    place = size // reads
    rate = points[0][1] if place <= points[0][0] else points[-1][1]
    for (left, low), (right, high) in pairwise(points):
        if left <= place <= right:
            rate = floor(low + Fraction(high - low) * (place - left) / (right - left))
    if link.lane_bytes_per_s is not None:
        lanes = min(link.depth, reads) * Fraction(str(link.lane_bytes_per_s)) * share
        rate = min(rate, max(1, floor(lanes)))
    return ceiling(size * NS, rate)


def test_a_batch_that_no_run_can_wait_for_is_refused() -> None:
    slow = machine(1e-9, prices=BY_MATRIX)  # a byte per second
    with pytest.raises(ConfigError, match="bytes_per_s"):
        _ = Times(slow, sizes(1, 4, 2, expert_bytes=300_000), ((300_000,),)).wire_ns


def test_matrices_are_those_of_the_trace_or_of_its_known_model() -> None:
    gemma, olmoe = known("gemma-4-26b-a4b"), known("olmoe-1b-7b")
    assert (gemma.geometry.matrices, gemma.matrices, olmoe.matrices) == ((), (2, 1), (1, 1, 1))
    assert known("nemotron-3-nano-30b-a3b").matrices == (1, 1)
    bare = gemma.geometry
    assert with_matrices(bare, "google/gemma-4-26B-A4B-it").matrices == (2, 1)
    own = bare.model_copy(update={"matrices": (3, 1)})
    assert with_matrices(own, "google/gemma-4-26B-A4B-it").matrices == (3, 1)
    assert with_matrices(bare, "a model of my own") is bare


def test_a_replay_of_a_known_model_reads_its_matrices() -> None:
    geometry = known("gemma-4-26b-a4b").geometry
    ids = np.tile(np.arange(8, dtype=np.int16), (1, 30, 1))
    header = Header(geometry=geometry, provenance=Provenance(model="google/gemma-4-26B-A4B-it"))
    trace = memory_trace(header, [Request(ids, prompt_length=0)])
    ready = plan(trace, configure(platform="phone-ufs4:link.by_matrix=true"))
    assert (ready.spec(log=False).times.matrices, ready.layout.geometry.matrices) == ((2, 3), (2, 1))
    assert ready.warning is None or "matrices" not in ready.warning
    assert plan(trace, configure(platform="phone-ufs4")).layout.geometry.matrices == ()


def test_unknown_matrices_are_named_as_an_assumption() -> None:
    header = Header(geometry=sizes(1, 4, 2), provenance=Provenance(importer="test"))
    trace = memory_trace(header, [Request(np.array([[[0, 1]]], np.int16), prompt_length=0)])

    def warning(platform: str) -> str:
        return plan(trace, configure(capacity="75%", platform=platform)).warning or ""

    assert "--matrices" in warning("phone-ufs4:link.by_matrix=true")
    assert "--matrices" not in warning("phone-ufs4")


@pytest.mark.parametrize("matrices", [(0,), (-1, 1), (1.5,), (True,), ("2",), (1,) * 17, (10**7,)], ids=str)
def test_matrices_are_a_few_whole_numbers(matrices: Any) -> None:
    with pytest.raises(TraceError, match="matrices"):
        Geometry(layers=1, experts=2, k=1, expert_bytes=(4,), matrices=matrices)


def test_by_matrix_is_a_figure_of_a_platform() -> None:
    plain, changed = platform("phone-ufs4"), platform("phone-ufs4:link.by_matrix=true")
    assert changed.by_matrix and not plain.by_matrix
    assert changed.figures() != plain.figures()
    assert platform("phone-ufs4:link.by_matrix=false").figures() == plain.figures()
