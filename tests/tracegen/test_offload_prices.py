"""Prices of measured durations: fits, runs that alternate with calibrations, and this machine calibrated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moereplay.simulator.calibration import Calibration
from moereplay.simulator.platform import Measured
from moereplay.simulator.platforms import platform
from moereplay.tracegen.offload import calibration
from moereplay.tracegen.offload.calibration import Figure, fit, trimmed_mean
from moereplay.tracegen.offload.compute import as_weights, layout_of, shape_of
from moereplay.tracegen.offload.durations import DENSE, Computed, Durations, Moved, OnCpu
from moereplay.tracegen.offload.memory import BITS_PER_WEIGHT, WEIGHT, marks_of
from moereplay.tracegen.offload.slow_tier import Disk, Memory, Throttled
from moereplay.tracegen.offload.study import Cell, Plan, measure
from tests.kit.offloading import RATE, bench_of, config_of, geometry, trace_of

ABOUT = Calibration(device="here")


# ---------------------------------------------------------------- prices of durations


def computed(y: int, layer: int, tokens: int, beside: bool, spent: int, decided: int, at: int = 0) -> Computed:
    return Computed(y, layer, tokens, beside, at, at + spent, at + spent + decided)


def test_figures_are_means_of_what_was_measured():
    # dense parts 100, before layer 0 140; gates 10; experts 50 alone, 80 beside a transfer, 70 for three tokens
    dense = [computed(DENSE, layer, 1, False, 100 + 40 * (layer == 0), 10) for layer in (0, 1, 2)]
    experts = [computed(1, 0, 1, False, 45, 5), computed(1, 0, 1, True, 70, 10), computed(1, 0, 3, False, 65, 5)]
    moved = [Moved(1, 4_000, 1_000, 1_250), Moved(2, 4_000, 1_000, 1_250)]
    found = fit([Durations([*dense, *experts], moved)], ABOUT, None)
    machine = found.platform
    assert (machine.links[0].bytes_per_s, machine.links[0].latency_ns, machine.loading.gate_ns) == (4e9, 250, 10)
    assert machine.compute == Measured(dense_ns=100, pass_ns=40, expert_ns=40, expert_ns_per_token=10)
    assert machine.contention is not None and machine.contention.compute == 50 / 80
    assert found.warnings == ()


def test_halves_that_differ_are_said():
    moved = [Moved(1, 4_000, ns, ns) for ns in (1_000, 1_000, 1_200, 1_200)]
    dense = [computed(DENSE, 0, 1, False, 100, 10), computed(1, 0, 1, False, 45, 5)]
    said = fit([Durations(dense, moved)], ABOUT, None).warnings
    assert said == (
        "bytes_per_s: the halves of its samples differ by 18%; the machine was not quiet, or is not steady",
    )
    assert fit([Durations(dense, [])], ABOUT, None).warnings[0].startswith("no expert crossed the link")


def test_copies_of_several_precisions_have_times_by_size():
    # of a copy of 4,000 bytes one token takes 50, of one of 1,000 bytes, unpacked, 125
    dense = [computed(DENSE, 0, 1, False, 100, 10)]
    experts = [computed(0, 0, 1, False, 45, 5), computed(1, 0, 1, False, 120, 5)]
    found = fit(
        [Durations([*dense, *experts], [], [OnCpu(0, 1, 70), OnCpu(0, 3, 90)], {0: 4_000, 1: 1_000})], ABOUT, None
    )
    assert found.platform.compute == Measured(dense_ns=100, expert_ns=50, expert_by_size=((1_000, 2.5), (4_000, 1.0)))
    assert found.platform.cpu == Measured(expert_ns=60, expert_ns_per_token=10)


def test_packed_integers_are_unpacked_as_they_stand_for():
    shape = shape_of(geometry())
    for dtype, first in (("int8", [0x1F]), ("int4", [0xF, 0x1]), ("int2", [3, 3, 1, 0])):
        bits = BITS_PER_WEIGHT[dtype]
        slot = torch.full((shape.params * bits // 8,), 0x1F, dtype=torch.uint8)
        weights = as_weights(slot, dtype, shape)
        assert weights.shape == (shape.params,) and weights.dtype == torch.bfloat16
        expected = [(value - (1 << bits - 1)) * WEIGHT for value in first]
        assert weights[: len(first)].tolist() == pytest.approx(expected, rel=0.01)


def test_times_by_tokens_never_fall():
    assert calibration.in_times({n: Figure(ns, 0, 1) for n, ns in ((1, 10), (2, 9), (4, 30), (8, 20))}) == (
        (1, 1.0),
        (2, 1.0),
        (4, 3.0),
        (8, 3.0),
    )


def test_the_extremes_of_a_mean_are_cut():
    assert trimmed_mean([0] * 2 + [10] * 96 + [9_999] * 2) == 10
    assert trimmed_mean([]) == 0


# ---------------------------------------------------------------- many runs


@pytest.mark.long
def test_runs_alternate_with_calibrations_and_are_replayed_on_what_they_found(tmp_path):
    trace, other = trace_of(6), trace_of(4, seed=6)
    configs = [config_of(capacity="40%"), config_of(capacity="60%"), config_of(prefetch="top_k")]
    cells = [Cell(config, RATE) for config in configs]
    plan, done = Plan(cells, 2, trace, other, "here"), []
    found = list(measure(bench_of(trace, configs), plan, tmp_path, lambda: done.append(1)))
    assert len(done) == plan.runs == 2 * 3 + 3 * 2
    assert sorted((run.repeat, run.cell.config.capacity, run.cell.config.prefetch) for run in found) == sorted(
        (repeat, config.capacity, config.prefetch) for repeat in (0, 1) for config in configs
    )
    platforms = {run.simulated.result.config["platform"] for run in found}
    assert {Path(name).name for name in platforms} == {f"platform-{n}-{at}.toml" for n in (0, 1) for at in (0, 1)}
    assert all(run.simulated.result.about["seconds"] == "calibrated" for run in found)
    for run in found:  # 4 ms for each transfer is the least, in either
        least = 4e6 * run.measured.result.totals["misses"] if run.cell.config.prefetch == "none" else 0
        assert min(run.simulated.pass_ns.sum(), run.measured.pass_ns.sum()) >= least


def test_what_a_policy_leaves_to_the_platform_is_settled_once_by_this_machine(tmp_path):
    trace, config = trace_of(6), config_of(miss="fiddler", platform="rtx4090-pcie4")
    plan = Plan([Cell(config, RATE)], 2, trace, trace_of(4, seed=6), "here")
    found = list(measure(bench_of(trace, [config]), plan, tmp_path, lambda: None))
    (miss,) = {run.cell.config.miss for run in found}
    assert miss.startswith("fiddler:ratio=") and float(miss.partition("=")[2]) > 0
    assert all(ran.result.config["miss"] == miss for run in found for ran in (run.measured, run.simulated, run.closure))
    machine = platform(found[0].simulated.result.config["platform"])
    assert machine.cpu is not None


# ---------------------------------------------------------------- this machine, calibrated


@pytest.mark.long
def test_a_machine_is_calibrated_by_its_own_runs(tmp_path):
    slow, done = Throttled(Memory(layout_of(geometry()), "cpu"), RATE), []
    bench = calibration.bench_of(geometry(), {geometry().expert_bytes: slow}, "cpu")
    found = calibration.calibrate(
        bench, geometry(), calibration.about_of("here", "pinned", RATE), tmp_path, lambda: done.append(1)
    )
    assert len(done) == calibration.RUNS == 6
    assert 0 < found.figures["bytes_per_s"].value <= RATE  # by how much it is missed is the machine's load
    assert found.figures["link.lanes_2"].n == 24 and "link.read_65536" not in found.figures  # an expert has 6 KB
    machine = found.fitted.platform
    assert isinstance(machine.compute, Measured) and machine.compute.expert_ns_per_token == 0
    for curve in (machine.compute.dense_by_tokens, machine.compute.expert_by_tokens):
        assert [tokens for tokens, _ in curve] == list(calibration.TOKENS)
    assert {"expert.bfloat16_ns", "expert.int4_ns", "dense.64_tokens_ns"} <= found.figures.keys()
    assert machine.links[0].bytes_per_s == found.figures["bytes_per_s"].value
    assert machine.calibration is not None and machine.calibration.mape == found.on_itself > 0
    assert found.held_out.keys() == {"25%", "75%"}
    said = calibration.document(found, "here")
    assert said.keys() == {"method", "device", "platform", "figures", "fit", "held_out", "warnings"}
    assert said["held_out"]["cells"] == 2


def test_a_read_of_part_of_an_expert_is_what_lies_there(tmp_path):
    layout = layout_of(geometry())
    slow = Disk(tmp_path, layout, "cpu", buffered=True)
    into = slow.buffer()
    slow.read_bytes(layout.offset(3), into[:4096])
    assert int(into.view(torch.int64)[0]) == marks_of(layout)[3]
    assert int(into[4096:].sum()) == 0
    slow.close()
