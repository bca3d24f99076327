"""Real offloading: decisions are the replay's where timing cannot matter, bytes are checked, faults are named."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from simulator.errors import ConfigError
from simulator.platform import Calibration, Measured
from simulator.platform_files import platform
from tests.kit import offloading
from tests.kit.offloading import RATE, Broken, bench_of, config_of, geometry, trace_of
from tracegen.offload import calibration, kernels
from tracegen.offload.bench import check_measurable, replayed
from tracegen.offload.comparison import agreement, figures
from tracegen.offload.compute import Layers, as_weights, layout_of, shape_of
from tracegen.offload.durations import DENSE, Computed, Durations, Moved, OnCpu
from tracegen.offload.experts import BITS_PER_WEIGHT, WEIGHT, check_marks, contents, marks_of
from tracegen.offload.fit import Figure, fit, trimmed_mean
from tracegen.offload.part import tokens_of
from tracegen.offload.slow_tier import Disk, Memory, Throttled, copier, experts_file
from tracegen.offload.study import Cell, Plan, measure
from traces.geometry import known

ABOUT = Calibration(device="here")


# ---------------------------------------------------------------- a run and its replays


@pytest.mark.parametrize("eviction", ["lru", "least_stale", "lfu", "belady"])
@pytest.mark.parametrize("contract", ["atomic", "sequential"])
@pytest.mark.parametrize("way", ["scripted", "compiled", "reference"])
def test_without_prefetch_every_access_is_classified_as_replayed(eviction, contract, way):
    trace, config = trace_of(), config_of(eviction=eviction, contract=contract)
    ran, durations = bench_of(trace, [config], way=way).measured(trace, config)
    assert ran.decisions == way and ran.gate_ns > 0
    simulated = replayed(trace, config)
    said = agreement(ran.result.events, simulated.result.events)
    assert said == {"accesses": simulated.result.totals["accesses"], "same": said["accesses"], "first_divergence": None}
    assert figures(ran)["bytes_per_token"] == figures(simulated)["bytes_per_token"]
    assert len(durations.moved) == simulated.result.totals["misses"]
    assert ran.result.about["label"] == "MEASURED" and ran.result.about["seconds"] == "measured"


@pytest.mark.parametrize(
    "settings", [{}, {"prefetch": "top_k"}, {"miss": "cpu"}, {"miss": "lowest_bit:bits=16/8"}], ids=str
)
def test_a_replay_of_measured_durations_takes_what_the_run_took(settings):
    trace, config = trace_of(), config_of(**settings)
    ran, durations = bench_of(trace, [config]).measured(trace, config, RATE)
    closure = replayed(trace, config, durations)
    alone = ran.result.totals["misses"] > ran.result.totals["cpu_executed"]  # the CPU's misses are microseconds
    assert closure.pass_ns.sum() == pytest.approx(ran.pass_ns.sum(), rel=0.05 if alone else 0.5)
    # a transfer is throttled; what is not hidden by compute, of which there is next to none, is time
    assert ran.pass_ns.sum() > 0.9 * ran.result.totals["bytes_demand"] / RATE * 1e9
    assert len(durations.on_cpu) == ran.result.totals["cpu_executed"]


@pytest.mark.parametrize(
    "settings",
    [{"prefetch": "side_buffer:buffers=2:fetch=2"}, {"reset": "4"}, {"eviction": "belady:bypass=true"},
     {"warm": ((0, 1),)}, {"miss": "lowest_bit:bits=16/8"}, {"miss": "hobbit:bits=16/4/2:t1=.3:t2=.6"},
     {"miss": "cpu"}, {"miss": "fiddler", "platform": "rtx4090-pcie4"}, {"routing": "cache_prior:lam=.5"},
     {"scope": "per_layer"}, {"miss": "drop:keep=1"}, {"passes": "token"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("way", ["auto", "reference"])
def test_any_policy_set_runs_and_computes_the_right_bytes(settings, way):
    trace, config = trace_of(), config_of(**settings)
    ran, _ = bench_of(trace, [config], way=way).measured(trace, config)
    totals = ran.result.totals
    assert totals["hits"] + totals["late"] + totals["misses"] == totals["accesses"] > 0


def test_an_expert_of_other_bytes_ends_the_run():
    trace, config = trace_of(), config_of()
    slow = Broken(layout_of(trace.geometry), 6, None)
    with pytest.raises(AssertionError, match=r"the slot of expert \d+ holds other bytes"):
        bench_of(trace, [config], slow).measured(trace, config)


def test_every_page_of_an_expert_is_checked():
    layout = layout_of(geometry())
    content = next(contents(layout)).copy()
    mark = marks_of(layout)[0]
    check_marks(torch.from_numpy(content), layout.size(0), mark, 0)
    content[4096] ^= 1
    with pytest.raises(AssertionError, match="expert 0 holds other bytes"):
        check_marks(torch.from_numpy(content), layout.size(0), mark, 0)


def test_all_experts_differ_and_lie_side_by_side(tmp_path):
    layout = layout_of(geometry())
    slow = Disk(tmp_path, layout, "cpu", buffered=True)
    into = torch.zeros(2 * 4096, dtype=torch.uint8)
    for y, mark in enumerate(marks_of(layout)):
        slow.read(y, into)
        check_marks(into, layout.size(y), mark, y)
    slow.close()
    assert experts_file(tmp_path, layout).stat().st_size == layout.total == 16 * 2 * 4096


# ---------------------------------------------------------------- what is refused, and what fails


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"miss": "lowest_bit:bits=16/3"}, "measure computes experts at 2, 4, 8 bits"),
    ],
)
def test_what_no_real_run_can_do_is_refused_by_name(settings, said):
    with pytest.raises(ConfigError, match=said):
        check_measurable(trace_of(), config_of(platform="rtx4090-pcie4", **settings))


def test_experts_that_torch_cannot_compute_are_refused():
    with pytest.raises(ConfigError, match=r"these have 6\.5 bits"):
        shape_of(geometry(expert_bits=6.5))
    with pytest.raises(ConfigError, match="of one size; these have 2"):
        shape_of(geometry(expert_bytes=(6144, 6150)))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EIO, "Input/output error", "experts.bin"), "failed: experts.bin: Input/output error"),
        (OSError("the cable is out"), "the slow tier failed: the cable is out"),
    ],
)
def test_a_read_that_fails_ends_the_run_and_leaves_the_bench_usable(error, said):
    trace, config = trace_of(), config_of()
    broken = bench_of(trace, [config], Broken(layout_of(trace.geometry), 5, error))
    with pytest.raises(ConfigError, match=said):
        broken.measured(trace, config)
    whole = bench_of(trace, [config])
    assert whole.measured(trace, config)[0].result.totals["misses"] > 0


def test_a_file_that_is_too_short_names_the_expert(tmp_path):
    trace, config = trace_of(), config_of()
    slow = Disk(tmp_path, layout_of(trace.geometry), "cpu", buffered=True)
    os.truncate(experts_file(tmp_path, slow.layout), 3 * 4096)
    with pytest.raises(
        ConfigError, match=r"experts-\w+.bin: has no byte [\d,]+ of 131,072: it was cut off; remove the file"
    ):
        bench_of(trace, [config], slow).measured(trace, config)
    slow.close()
    again = Disk(tmp_path, slow.layout, "cpu", buffered=True)  # it is not of its full size, so it is made anew
    assert bench_of(trace, [config], again).measured(trace, config)[0].result.totals["misses"] > 0
    again.close()


def test_a_full_disk_leaves_no_file_behind(tmp_path):
    layout = layout_of(geometry())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (layout.total // 2, before[1]))  # as a disk that is full half-way
    try:
        with pytest.raises(ConfigError, match=r"File too large; .* are needed there; nothing was left behind"):
            Disk(tmp_path / "new", layout, "cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_that_cannot_be_read_past_the_page_cache_is_refused(tmp_path, monkeypatch):
    opened = os.open

    def refusing(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", refusing)
    layout = layout_of(geometry())
    with pytest.raises(ConfigError, match=r"cannot be read past the page cache .* or disk:.*:buffered"):
        Disk(tmp_path, layout, "cpu")
    assert Disk(tmp_path, layout, "cpu", buffered=True).label.startswith("disk, buffered")


def test_more_than_the_memory_holds_is_refused_before_it_is_taken(monkeypatch):
    monkeypatch.setattr("tracegen.offload.slow_tier.available_memory", lambda: 10_000)
    with pytest.raises(ConfigError, match=r"--slow-tier pinned: .* of experts in .* of free memory"):
        Memory(layout_of(geometry()), "cpu")
    monkeypatch.undo()
    monkeypatch.setattr("tracegen.offload.device.available_memory", lambda: 10_000)
    trace, config = trace_of(), config_of()
    with pytest.raises(ConfigError, match=r"the cache needs .* are free; take less --capacity"):
        bench_of(trace, [config])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"--device cuda: .*; take cpu, or a machine and a torch with CUDA"):
        offloading.Bench.of([check_measurable(trace_of(), config_of())], {}, 1, "cuda")


# ---------------------------------------------------------------- the throttle, the shapes and the part


def test_a_throttled_read_takes_at_least_its_bytes_over_the_rate():
    durations = bench_of(trace := trace_of(), [config := config_of()]).measured(trace, config, RATE)[1]
    reads = [each.read for each in durations.moved]
    assert min(reads) >= 4e6
    assert Throttled(Memory(layout_of(geometry()), "cpu"), RATE).label == "memory"


def test_a_known_models_experts_have_its_shape():
    shape = shape_of(known("olmoe-1b-7b").geometry)
    assert (shape.hidden, shape.width, shape.dtype) == (2048, 1024, "bfloat16")
    assert shape.dense_rows == 4 * 2048 + 2 + 64
    assert (shape_of(geometry()).hidden, shape_of(geometry()).width) == (32, 32)


def test_dense_parts_and_experts_compute_with_all_of_their_weights():
    layers = Layers(geometry(), 4, "cpu")
    weights = torch.from_numpy(next(contents(layout_of(geometry()))).copy()).view(torch.bfloat16)
    for layer in range(2):
        layers.dense(layer, 3)
        layers.expert(weights, 3)
    assert torch.isfinite(layers._state.float()).all() and layers._state.shape == (3, 32)


def test_a_part_of_a_trace_has_its_layers_and_tokens():
    trace = trace_of(10, 2)
    part = tokens_of(trace, 1, 3, 8, 2)
    assert (part.tokens, part.geometry.layers, part.prompt_lengths.tolist()) == (5, 1, [2])
    np.testing.assert_array_equal(part.request(0).chosen, trace.request(0).chosen[3:8, :1])
    np.testing.assert_array_equal(part.request(0).lookahead[0], trace.request(0).lookahead[0][3:8, :1])
    with pytest.raises(ConfigError, match="has 10 tokens, not 11; take fewer --tokens"):
        tokens_of(trace, None, 0, 11)
    with pytest.raises(ConfigError, match="--layers 3: the trace has 2"):
        tokens_of(trace, 3, 0, 4)


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
    assert kernels.in_times({n: Figure(ns, 0, 1) for n, ns in ((1, 10), (2, 9), (4, 30), (8, 20))}) == (
        (1, 1.0),
        (2, 1.0),
        (4, 3.0),
        (8, 3.0),
    )


def test_the_extremes_of_a_mean_are_cut():
    assert trimmed_mean([0] * 2 + [10] * 96 + [9_999] * 2) == 10
    assert trimmed_mean([]) == 0


# ---------------------------------------------------------------- many runs


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
        assert [tokens for tokens, _ in curve] == list(kernels.TOKENS)
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


# ---------------------------------------------------------------- CUDA, as far as a machine without it shows


class Cuda:
    """Stands for torch.cuda: says in which order it was asked for what."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def Stream(self, device: str) -> str:  # noqa: N802 - torch's name
        return f"a stream of {device}"

    @contextmanager
    def stream(self, which: str) -> Iterator[None]:
        self.asked.append(f"into {which}")
        yield
        self.asked.append("out of it")

    def Event(self) -> Cuda:  # noqa: N802 - torch's name
        return self

    def record(self) -> None:
        self.asked.append("event recorded")

    def synchronize(self) -> None:
        self.asked.append("awaited")

    def current_stream(self, device: str) -> Cuda:
        self.asked.append(f"compute's stream of {device}")
        return self


def test_a_copy_to_cuda_has_a_stream_of_its_own_and_is_awaited(monkeypatch):
    monkeypatch.setattr(torch, "cuda", cuda := Cuda())
    into = torch.zeros(8, dtype=torch.uint8)
    copier("cuda:1")(torch.arange(4, dtype=torch.uint8), into)
    assert into.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    assert cuda.asked == ["into a stream of cuda:1", "event recorded", "out of it", "awaited"]


def test_what_cuda_computes_is_awaited_before_its_slot_may_be_overwritten(monkeypatch):
    layers = Layers(geometry(), 2, "cpu")
    layers.device = "cuda"
    monkeypatch.setattr(torch, "cuda", cuda := Cuda())
    layers.expert(as_weights(torch.from_numpy(next(contents(layout_of(geometry())))), "bfloat16", layers.shape), 1)
    assert cuda.asked == ["compute's stream of cuda", "awaited"]
