"""The closed form against sums by hand, and against replays of steps whose misses are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moereplay.calibration.prediction import StepPrices, mean_waiting, miss_ns, step_prices, waiting
from moereplay.calibration.runs import Sizes
from moereplay.simulator.config import configure
from moereplay.simulator.platform import Platform, Roofline
from moereplay.simulator.replay import replay
from moereplay.simulator.wires import Link
from moereplay.traces.schema import Geometry, Header, Request, memory_trace

ONE = StepPrices(k=3, load=10, latency=5, start=7, wire=100, depth=4, expert=20, waits_for_all=False)


def test_a_step_without_a_miss_waits_for_nothing():
    assert waiting(ONE)[0] == 0


def test_one_miss_is_awaited_behind_two_hits():
    """Asked for at 10, it arrives at 10 + 5 + 7 + 100 = 122; the hits are computed until 10 + 40 = 50."""
    assert waiting(ONE)[1] == 122 - 50


def test_the_second_miss_crosses_behind_the_first_and_starts_no_idle_wire():
    """Arrivals at 122 and 222. Loading ends at 20, the hit at 40; waits are 122 - 40 and 222 - (122 + 20)."""
    assert waiting(ONE)[2] == (122 - 40) + (222 - 142)


def test_an_engine_that_reads_first_waits_for_the_last():
    """Both are asked for when all loading is done, at 20; the last arrives at 20 + 12 + 200."""
    assert waiting(ONE._replace(waits_for_all=True))[2] == 12 + 200


def test_lanes_hide_latencies_and_one_lane_does_not():
    alone = ONE._replace(load=0, start=0, latency=50, depth=1)
    assert waiting(alone._replace(waits_for_all=True))[3] == 3 * 150
    assert waiting(alone._replace(waits_for_all=True, depth=4))[3] == 50 + 300


def test_the_first_miss_of_a_step_costs_more_than_a_further_one():
    """Alone 10 of loading, latency 5, start 7, wire 100, all before compute; each further one 10 and 100."""
    assert miss_ns(ONE._replace(waits_for_all=True)) == (122, 110)


BATCH = ONE._replace(k=2, expert=30, matrices=(2, 1), batches=(0.0, 150.0, 300.0))


def test_a_batch_arrives_by_matrices_and_compute_follows_in_stages():
    """Two of two miss: the first matrix lands at 12 + 200, is computed until 252, and the second has landed at 312.

    Its stage takes 20 more, so the step ends at 332: 60 of compute, 272 of stall. Loading comes before and is no stall.
    """
    assert waiting(BATCH)[2] == 332 - 60


def test_hits_are_computed_with_the_stages_of_a_batch():
    """One of two misses: 12 + 100, compute of both until 152, the second matrix at 162; 20 more, 182 in all."""
    assert waiting(BATCH)[1] == 182 - 60


def test_a_batch_without_overlap_is_awaited_whole():
    assert waiting(BATCH._replace(waits_for_all=True))[2] == 12 + 300
    assert waiting(BATCH)[0] == waiting(BATCH._replace(waits_for_all=True))[0] == 0


def test_few_reads_occupy_few_lanes_and_the_first_read_sets_the_start():
    """A link of 1 GB/s with lanes of 300 MB/s: three reads use three lanes, six use all four."""
    link = Link(bytes_per_s=1e9, lane_bytes_per_s=3e8, depth=4, start_ns=5, start_ns_per_mib=2**20, by_matrix=True)
    machine = Platform(name="made", links=(link,), compute=Roofline(flops=1e18, memory_bytes_per_s=1e9))
    prices = step_prices(machine, Sizes(1, 8, 2, 900, None, "", "", (1, 1, 1)))
    assert prices.batches == pytest.approx((0, 900 / 0.9, 1800 / 1.0))
    assert prices.start == 5 + 300
    assert step_prices(machine, Sizes(1, 8, 2, 900, None, "", "", (2, 1))).batches[1] == pytest.approx(900 / 0.6)


def test_misses_are_binomial():
    """At a half of three: one, three, three and one of eight steps have 0, 1, 2 and 3 misses."""
    mean = mean_waiting(ONE, np.array([0.5, 0.0, 1.0]))
    each = [waiting(ONE)[missed] for missed in range(4)]
    assert mean[0] == pytest.approx((each[0] + 3 * each[1] + 3 * each[2] + each[3]) / 8)
    assert list(mean[1:]) == [each[0], each[3]]


@settings(max_examples=40, deadline=None)
@given(
    missed=st.integers(0, 4),
    figures=st.tuples(*[st.integers(0, 60)] * 3),
    wire=st.integers(1, 90),
    depth=st.integers(1, 5),
    expert=st.integers(0, 90),
    waits_for_all=st.booleans(),
)
def test_a_step_waits_as_long_as_in_a_replay(tmp_path_factory, missed, figures, wire, depth, expert, waits_for_all):
    """Without loading, which an engine that reads first spends before it reads, and a replay beside its reads."""
    load, latency, start = figures
    load = 0 if waits_for_all else load
    step = StepPrices(4, load, latency, start, wire, depth, expert, waits_for_all)
    machine = tmp_path_factory.mktemp("machine") / "made.toml"
    machine.write_text(_machine(step))
    result = replay(_second_token_misses(missed, wire), _configuration(str(machine)), engine="reference")
    decode = next(row for row in result.per_layer if row["phase"] == "decode")
    assert decode["misses"] == missed
    assert decode["stall_ns"] == waiting(step)[missed]


@settings(max_examples=40, deadline=None)
@given(
    missed=st.integers(0, 4),
    figures=st.tuples(*[st.integers(0, 60)] * 3),
    wire=st.integers(1, 30),
    expert=st.integers(0, 30),
    matrices=st.sampled_from([(2, 1), (1, 1, 1), (1,)]),
    waits_for_all=st.booleans(),
)
def test_a_step_of_batches_waits_as_long_as_in_a_replay(
    tmp_path_factory, missed, figures, wire, expert, matrices, waits_for_all
):
    """Sizes and times are multiples of the shares, so that no part is rounded."""
    (load, latency, start), size = figures, 3 * wire
    batches = tuple(float(many * size) for many in range(5))
    step = StepPrices(4, load, latency, start, size, 1, 3 * expert, waits_for_all, matrices, batches)
    machine = tmp_path_factory.mktemp("machine") / "made.toml"
    machine.write_text(_machine(step))
    result = replay(_second_token_misses(missed, size, matrices), _configuration(str(machine)), engine="reference")
    decode = next(row for row in result.per_layer if row["phase"] == "decode")
    assert (decode["misses"], decode["stall_ns"]) == (missed, waiting(step)[missed])


def _second_token_misses(missed: int, size: int, matrices: tuple[int, ...] = ()):
    """A prompt of one token that uses experts 0 to 3 of so many bytes, and a token that uses so many others."""
    rows = np.array([[[0, 1, 2, 3]], [[*range(missed, 4), *range(4, 4 + missed)]]])
    geometry = Geometry(layers=1, experts=8, k=4, expert_bytes=(size,), matrices=matrices)
    return memory_trace(Header(geometry=geometry), [Request(chosen=rows, prompt_length=1)])


def _configuration(machine: str):
    return configure(capacity="8experts", platform=machine, passes="token")


def _machine(step: StepPrices) -> str:
    """A platform whose link moves a byte per nanosecond."""
    return "\n".join(
        (
            'name = "made"',
            f'overlap = "{"none" if step.waits_for_all else "arrival"}"',
            "[link]",
            "bytes_per_s = 1e9",
            f"latency_ns = {int(step.latency)}",
            f"start_ns = {int(step.start)}",
            f"depth = {step.depth}",
            f"by_matrix = {str(bool(step.matrices)).lower()}",
            "[compute]",
            'kind = "measured"',
            f"expert_ns = {int(step.expert)}",
            "dense_ns = 1",  # so that the wire has been idle when the second token begins
            "[loading]",
            f"ns_per_expert = {int(step.load)}",
        )
    )
