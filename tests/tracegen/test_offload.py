"""Real offloading: decisions are the replay's where timing cannot matter, bytes are checked, faults are named."""

from __future__ import annotations

import errno
import os
import resource
import time
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from moereplay.simulator.calibration import Calibration
from moereplay.simulator.compiled.engine import Stepper
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.reference.engine import Engine
from moereplay.tracegen.offload.bench import Bench, Ran, check_measurable, replayed
from moereplay.tracegen.offload.compute import Layers, layout_of, shape_of
from moereplay.tracegen.offload.memory import Marks, contents, marks_of, page_marks
from moereplay.tracegen.offload.part import tokens_of
from moereplay.tracegen.offload.slow_tier import Copies, Disk, Memory, Throttled, experts_file
from moereplay.tracegen.offload.study import agreement, figures
from moereplay.traces.geometry import known
from tests.kit import offloading
from tests.kit.every import every
from tests.kit.offloading import RATE, Broken, bench_of, config_of, geometry, trace_of, undisturbed

ABOUT = Calibration(device="here")


# ---------------------------------------------------------------- a run and its replays


@pytest.mark.parametrize("way", ["compiled", pytest.param("reference", marks=pytest.mark.long)])
@every("eviction, contract", product(["lru", "least_stale", "lfu", "belady"], ["atomic", "sequential"]))
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


@every("settings", [{}, {"prefetch": "top_k"}, {"miss": "cpu"}, {"miss": "lowest_bit:bits=16/8"}])
@undisturbed
def test_a_replay_of_measured_durations_takes_what_the_run_took(settings):
    trace, config = trace_of(), config_of(**settings)
    ran, durations = bench_of(trace, [config]).measured(trace, config, RATE)
    closure = replayed(trace, config, durations)
    alone = ran.result.totals["misses"] > ran.result.totals["cpu_executed"]  # the CPU's misses are microseconds
    assert closure.pass_ns.sum() == pytest.approx(ran.pass_ns.sum(), rel=0.05 if alone else 0.5)
    # a transfer is throttled; what is not hidden by compute, of which there is next to none, is time
    assert ran.pass_ns.sum() > 0.9 * ran.result.totals["bytes_demand"] / RATE * 1e9
    assert len(durations.on_cpu) == ran.result.totals["cpu_executed"]


# ---------------------------------------------------------------- the parts of its time

PARTS = ("dense_ns", "expert_ns", "stall_ns")


class Sleeping:
    """Layers that take a known time and compute nothing."""

    def __init__(self, of: Layers, dense_s: float, expert_s: float) -> None:
        self.shape, self._dense_s, self._expert_s = of.shape, dense_s, expert_s

    def warm_up(self, formats: object) -> None:
        pass

    def dense(self, layer: int, tokens: int) -> None:
        time.sleep(self._dense_s)

    def expert(self, slot: torch.Tensor, dtype: str, tokens: int) -> Marks:
        time.sleep(self._expert_s)
        return Marks(*[int(slot.view(torch.int64)[0])] * 2)


def sleeping(bench: Bench, dense_s: float, expert_s: float) -> Bench:
    return replace(bench, layers=Sleeping(bench.layers, dense_s, expert_s))  # type: ignore[arg-type]


def assert_parts_are_those_of(ran: Ran, closure: Ran, within: float) -> None:
    """Each part differs by at most this share of the whole run."""
    whole = ran.pass_ns.sum()
    assert closure.pass_ns.sum() == pytest.approx(whole, rel=within)
    for name in PARTS:
        assert closure.result.totals[name] == pytest.approx(ran.result.totals[name], abs=within * whole), name


@pytest.mark.parametrize("way", ["compiled", "reference"])
@pytest.mark.parametrize("contract", ["atomic", "sequential"])
@undisturbed
def test_the_parts_of_a_run_are_those_that_a_replay_of_its_durations_gives(way, contract):
    """Computing takes a millisecond and reading nearly none: what the engine itself takes is no stall."""
    trace, config = trace_of(), config_of(contract=contract)
    bench = sleeping(bench_of(trace, [config], way=way), 1e-3, 1e-3)
    ran, durations = bench.measured(trace, config)
    assert_parts_are_those_of(ran, replayed(trace, config, durations), 0.03)
    totals, passes = ran.result.totals, len(ran.pass_ns)
    assert sum(totals[name] for name in PARTS) == ran.pass_ns.sum()
    assert totals["dense_ns"] >= passes * 2 * 1e6 and totals["expert_ns"] >= totals["accesses"] * 1e6
    assert ran.engine_ns * passes == sum(totals[name] for name in PARTS[:2]) - sum(
        each.worked for each in durations.computed
    )
    for name in PARTS:
        assert sum(row[name] for row in ran.result.per_layer) == totals[name]
    assert {row["phase"] for row in ran.result.per_layer} == {"prefill", "decode"}


@every("way", ["compiled", "reference"])
@undisturbed
def test_a_link_that_compute_waits_for_is_a_stall_in_both(way):
    trace, config = trace_of(), config_of()
    bench = sleeping(bench_of(trace, [config], way=way), 1e-4, 1e-4)
    ran, durations = bench.measured(trace, config, RATE)  # 4 ms for an expert
    assert_parts_are_those_of(ran, replayed(trace, config, durations), 0.05)
    assert ran.result.totals["stall_ns"] > 0.6 * ran.result.totals["misses"] * 4e6


@every("way", ["compiled", "reference"])
@undisturbed
def test_experts_of_a_few_kilobytes_are_replayed_in_the_time_they_took(way):
    """With real products, from memory: most of the time is the engine's own."""
    trace, config = trace_of(40), config_of()
    ran, durations = bench_of(trace, [config], way=way).measured(trace, config)
    assert_parts_are_those_of(ran, replayed(trace, config, durations), 0.05)
    assert ran.engine_ns > 0.3 * ran.pass_ns.mean()


@every("way, engine", [("compiled", Stepper), ("reference", Engine)], apart=True)
def test_what_comes_after_a_run_is_no_time_of_it(way, engine, monkeypatch):
    trace, config = trace_of(), config_of()
    close = engine.close

    def slowly(self: object) -> object:
        closed = close(self)
        time.sleep(0.2)
        return closed

    monkeypatch.setattr(engine, "close", slowly)
    ran, durations = bench_of(trace, [config], way=way).measured(trace, config)
    assert ran.pass_ns[-1] < 0.15e9 and durations.computed[-1].lasted < 0.15e9


@pytest.mark.timeout(900)  # the first one compiles the hooks of these policies, where that was not done before
@pytest.mark.parametrize("way", ["auto", pytest.param("reference", marks=pytest.mark.long)])
@every(
    "settings",
    [
        {"prefetch": "side_buffer:buffers=2:fetch=2"},
        {"reset": "4"},
        {"eviction": "belady:bypass=true"},
        {"warm": ((0, 1),)},
        {"miss": "lowest_bit:bits=16/8"},
        {"miss": "hobbit:bits=16/4/2:t1=.3:t2=.6"},
        {"miss": "cpu"},
        {"miss": "fiddler", "platform": "rtx4090-pcie4"},
        {"routing": "cache_prior:lam=.5"},
        {"scope": "per_layer"},
        {"miss": "drop:keep=1"},
        {"passes": "token"},
    ],
)
def test_any_policy_set_runs_and_computes_the_right_bytes(settings, way):
    trace, config = trace_of(), config_of(**settings)
    ran, _ = bench_of(trace, [config], way=way).measured(trace, config)
    totals = ran.result.totals
    assert totals["hits"] + totals["late"] + totals["misses"] == totals["accesses"] > 0


def test_an_expert_of_other_bytes_ends_the_run():
    trace, config = trace_of(), config_of()
    slow = Broken(layout_of(trace.geometry), 6, None)
    with pytest.raises(AssertionError, match=r"the slot of expert \d+ holds wrong bytes"):
        bench_of(trace, [config], slow).measured(trace, config)


def test_every_page_of_an_expert_is_checked():
    layout = layout_of(geometry())
    layers, copies = Layers(geometry(), 1, "cpu"), Copies([Memory(layout, "cpu")])
    content = next(contents(layout)).copy()
    copies.check(0, layers.expert(torch.from_numpy(content), layout.dtype, 1))
    for first in (0, 4096):  # the beginning of each of its pages
        other = content.copy()
        other[first] ^= 1
        with pytest.raises(AssertionError, match="expert 0 holds wrong bytes"):
            copies.check(0, layers.expert(torch.from_numpy(other), layout.dtype, 1))


def test_all_experts_differ_and_lie_side_by_side(tmp_path):
    layout = layout_of(geometry())
    slow = Disk(tmp_path, layout, "cpu", buffered=True)
    into = torch.zeros(2 * 4096, dtype=torch.uint8)
    for y, mark in enumerate(marks_of(layout)):
        slow.read(y, into)
        assert page_marks(into).tolist() == [mark, mark]
    slow.close()
    assert experts_file(tmp_path, layout).stat().st_size == layout.total == 16 * 2 * 4096


# ---------------------------------------------------------------- what is refused, and what fails


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"miss": "lowest_bit:bits=16/3"}, "^measure .* 2, 4 or 8 bits.*these have 3 bits.* --expert-bits 16"),
        ({"draft": "recorded"}, "^--draft recorded: not possible in a measured run .* pass --draft N"),
        ({"passes": "batch:2", "arrivals": "every:1"}, "^--arrivals: not possible in a measured run"),
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


@every(
    "error, said",
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
    monkeypatch.setattr("moereplay.tracegen.offload.slow_tier.available_memory", lambda: 10_000)
    with pytest.raises(ConfigError, match=r"--slow-tier pinned: .* of experts in .* of free memory"):
        Memory(layout_of(geometry()), "cpu")
    monkeypatch.undo()
    monkeypatch.setattr("moereplay.tracegen.offload.memory.available_memory", lambda: 10_000)
    trace, config = trace_of(), config_of()
    with pytest.raises(ConfigError, match=r"the cache needs .* are free; .*--capacity"):
        bench_of(trace, [config])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"invalid --device cuda: "):
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
    slot = torch.from_numpy(next(contents(layout_of(geometry()))).copy())
    for layer in range(2):
        layers.dense(layer, 3)
        layers.expert(slot, "bfloat16", 3)
    assert torch.isfinite(layers._state.float()).all() and layers._state.shape == (4, 32)
    torch.testing.assert_close(layers._state[3], layers._embedded[3])  # three tokens were computed
    assert not torch.equal(layers._state[2], layers._embedded[2])


def test_a_part_of_a_trace_has_its_layers_and_tokens():
    trace = trace_of(10, 2)
    part = tokens_of(trace, 1, 3, 8, 2)
    assert (part.tokens, part.geometry.layers, part.prompt_lengths.tolist()) == (5, 1, [2])
    np.testing.assert_array_equal(part.request(0).chosen, trace.request(0).chosen[3:8, :1])
    np.testing.assert_array_equal(part.request(0).lookahead[0], trace.request(0).lookahead[0][3:8, :1])
    with pytest.raises(ConfigError, match="has 10 tokens, not 11"):
        tokens_of(trace, None, 0, 11)
    with pytest.raises(ConfigError, match="invalid --layers 3: expected at most 2"):
        tokens_of(trace, 3, 0, 4)
