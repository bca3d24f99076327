"""A live model whose experts are really read: the decisions of the emulated run, the bits of the unmodified model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.reference.engine import FinishedRun
from moereplay.simulator.reference.machine import LINK
from moereplay.tracegen.checkpoint import Loaded, load
from moereplay.tracegen.decoding import Decoding, Stepper
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.experts import implemented
from moereplay.tracegen.live.offloaded import (
    Transfers,
    check_movable,
    contents_of,
    layout_of,
    real_transfers,
    weights_in,
)
from moereplay.tracegen.live.requests import check_offloadable
from moereplay.tracegen.live.run import LiveRequest, Prepared, prepare, proven
from moereplay.tracegen.live.source import Emulation
from moereplay.tracegen.modules import MoeModules, discover
from moereplay.tracegen.offload.machine import RealClock, Worker
from moereplay.tracegen.offload.part import Named
from moereplay.tracegen.offload.slow_tier import Memory
from moereplay.tracegen.offload.study import agreement
from tests.kit.every import every
from tests.kit.live_runs import DTYPES, TO_RUN, loaded, modules, tokens
from tests.kit.tiny_models import tiny_model

IDS = tokens(10)
PARTS = [IDS[:6], *([token] for token in IDS[6:])]
CLASSES = ("hits", "late", "misses", "compulsory", "collisions", "evictions", "bytes_demand")
IN_MEMORY = Named(None)


def prepared(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Prepared:
    config = configure(**{"capacity": "30%", **settings})
    return prepare(loaded(family, dtype), [LiveRequest(IDS, 6)], config, modules=modules(family, dtype))


def opened(ready: Prepared, rate: float | None = None, named: Named = IN_MEMORY) -> Any:
    """The transfers of one run."""
    return real_transfers(ready.loaded, ready.modules, ready.plan, named, rate)


def run(ready: Prepared, transfers: Transfers | None = None) -> tuple[list[Tensor], FinishedRun]:
    """Logits of every pass, and the engine's run."""
    emulation = Emulation(ready.modules, ready.plan, True, ready.header.lookahead_depth, transfers)
    stepper = Stepper(ready.loaded.model)
    logits = [emulation.forward(partial(stepper.step, part), len(part), 0, len(part) > 1) for part in PARTS]
    return logits, emulation.close()


def really(ready: Prepared, rate: float | None = None) -> tuple[list[Tensor], FinishedRun]:
    """Run with real transfers from memory."""
    with opened(ready, rate) as transfers:
        return run(ready, transfers)


@contextmanager
def eager(ready: Prepared) -> Iterator[Stepper]:
    """The model alone, with its `eager` experts: others round otherwise, and a later gate may then choose otherwise."""
    with implemented(ready.loaded.model, "eager"):
        yield Stepper(ready.loaded.model)


def alone(ready: Prepared) -> list[Tensor]:
    """Logits of every pass."""
    with eager(ready) as stepper:
        return [stepper.step(part) for part in PARTS]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss", "deepseek_v3", "granitemoe"])
def test_without_prefetch_decisions_are_the_emulated_runs_and_no_bit_changes(family: str, dtype: torch.dtype) -> None:
    for settings in ({}, {"contract": "sequential", "eviction": "least_stale"}):
        ready = prepared(family, dtype, **settings)
        logits, real = really(ready)
        with eager(ready):
            _, emulated = run(ready)
        said = agreement(real.events, emulated.events)
        assert said["same"] == said["accesses"] and said["first_divergence"] is None
        ours, theirs = (each.counters.totals(each.end_ns) for each in (real, emulated))
        assert {name: ours[name] for name in CLASSES} == {name: theirs[name] for name in CLASSES}
        assert ours["misses"] > 0 and ours["hits"] > 0
        assert all(torch.equal(*pair) for pair in zip(logits, alone(ready), strict=True))


def test_prefetch_changes_no_bit_either_and_a_slow_link_takes_its_time() -> None:
    ready = prepared("olmoe", prefetch="top_k")
    size = layout_of(ready.loaded, ready.modules).sizes[0]
    logits, real = really(ready, size / 2e-3)  # 2 ms for each expert
    assert all(torch.equal(*pair) for pair in zip(logits, alone(ready), strict=True))
    totals = real.counters.totals(real.end_ns)
    assert totals["prefetch_started"] > 0
    assert real.end_ns >= 2e6 * (totals["misses"] + totals["prefetch_used"])


def test_other_bytes_than_the_models_end_the_run() -> None:
    ready = prepared("olmoe")
    layout = layout_of(ready.loaded, ready.modules)
    content = next(contents_of(ready.modules, layout))
    module = ready.modules.sites[0].experts
    slot = torch.from_numpy(content)
    assert weights_in(slot, module, 0).keys() == {"gate_up_proj", "down_proj"}
    slot[layout.sizes[0] - 1] ^= 1
    with pytest.raises(ConfigError, match=r"returned wrong bytes for expert 0; .* remove its file"):
        weights_in(slot, module, 0)


# ---------------------------------------------------------------- whole runs


CONTINUED = Decoding(max_new_tokens=4)


@cache
def miniature() -> tuple[Loaded, MoeModules]:
    """The bundled model."""
    found = load("miniature", device="cpu")
    return found, proven(found)


@pytest.mark.long
@every(
    "contract, eviction, capacity",
    [
        ("atomic", "lru", "10%"),
        ("atomic", "least_stale", "40%"),
        ("sequential", "lfu", "10%"),
        ("sequential", "lru", "40%"),
    ],
)
def test_the_miniature_decides_and_predicts_as_if_emulated(contract: str, eviction: str, capacity: str) -> None:
    model, found = miniature()
    config = configure(contract=contract, eviction=eviction, capacity=capacity)
    ready = prepare(model, [LiveRequest((7, 99, 1234), 3)], config, decoding=CONTINUED, modules=found)
    emulated = ready.run(log=True, eager=True)
    with opened(ready) as transfers:
        real = ready.run(log=True, transfers=transfers)
    assert (real.result.about["label"], emulated.result.about["label"]) == ("LIVE, measured", "LIVE, emulated")
    said = agreement(real.result.events, emulated.result.events)
    assert said["same"] == said["accesses"] == real.result.totals["accesses"] and said["first_divergence"] is None
    assert {name: real.result.totals[name] for name in CLASSES} == {
        name: emulated.result.totals[name] for name in CLASSES
    }
    assert real.quality and emulated.quality and real.quality == emulated.quality
    total = real.quality.total
    assert total.identical and (total.differing, total.kl, total.nll) == (0, 0, total.nll_base)
    assert (real.requests[0].token_ids == emulated.requests[0].token_ids).all()  # pyright: ignore


def test_several_requests_are_one_run_and_a_reset_and_a_warm_start_change_no_bit() -> None:
    settings = {"reset": "request", "warm": ((0, 1), (1, 2)), "prefetch": "side_buffer:buffers=2:fetch=2"}
    config = configure(capacity="30%", **settings)
    ready = prepare(loaded("olmoe"), TO_RUN, config, modules=modules("olmoe"))
    with opened(ready, layout_of(ready.loaded, ready.modules).sizes[0] / 1e-3) as transfers:
        ran = ready.run(transfers=transfers)
    assert ran.quality and all(score.identical for score in ran.quality.per_request)
    about = ran.result.about
    assert (about["seconds"], about["slow_tier"]) == ("measured", "memory")
    assert about["throttle_bytes_per_s"] is not None
    assert ran.result.config["platform"] == "this machine"
    assert [row["request"] for row in ran.result.per_request] == [0, 1, 2]


# ---------------------------------------------------------------- what time is counted


def timed(ready: Prepared, around: Callable[[Callable[[], Tensor]], Tensor], between: float = 0) -> FinishedRun:
    """A run in which `around` calls the model's pass, with so many seconds after each pass."""
    with opened(ready) as transfers:
        emulation = Emulation(ready.modules, ready.plan, True, ready.header.lookahead_depth, transfers)
        stepper = Stepper(ready.loaded.model)
        for part in PARTS:
            emulation.forward(partial(around, partial(stepper.step, part)), len(part), 0, len(part) > 1)
            time.sleep(between)
        return emulation.close()


def test_what_happens_between_passes_is_not_counted() -> None:
    began = time.perf_counter_ns()
    ran = timed(prepared("olmoe"), lambda step: step(), between=0.1)
    assert ran.end_ns < time.perf_counter_ns() - began - len(PARTS) * 1e8


def test_a_pass_is_counted_from_its_first_layer_to_its_head() -> None:
    def around(step: Callable[[], Tensor]) -> Tensor:
        time.sleep(0.02)
        logits = step()
        time.sleep(0.03)
        return logits

    ran = timed(prepared("olmoe"), around)
    took = {
        kind: [event.t1 - event.t0 for event in ran.events if event.kind == kind and event.layer in (0, last)]
        for kind, last in (("dense", 0), ("head", modules("olmoe").geometry.layers - 1))
    }
    assert len(took["dense"]) == len(took["head"]) == len(PARTS)
    assert min(took["dense"]) > 2e7 and min(took["head"]) > 3e7
    (row,) = ran.counters.per_request()
    assert (row["ttft_ns"] or 0) > 5e7 and row["decode_ns"] > 4 * 5e7
    assert row["dense_ns"] > len(PARTS) * 5e7


def test_a_clock_that_is_paused_stands_and_a_read_still_takes_its_time() -> None:
    clock = RealClock()
    reader = Worker(clock, LINK)
    read = reader.begin(lambda: time.sleep(0.05))
    time.sleep(0.01)
    with clock.paused():
        at = clock.now
        time.sleep(0.1)
        assert clock.now == at
    clock.run(until=read)
    assert read.span and read.span.spent > 5e7  # of which more than 30 ms after the pause
    assert clock.now >= read.span.ended and clock.now - at > 3e7
    reader.close()


# ---------------------------------------------------------------- the slow tier


def test_a_disk_has_a_file_of_each_models_weights(tmp_path: Path) -> None:
    ready = prepared("olmoe")
    with opened(ready, named=Named(tmp_path, True)) as transfers:
        logits, _ = run(ready, transfers)
    assert all(torch.equal(*pair) for pair in zip(logits, alone(ready), strict=True))
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    with opened(ready, named=Named(tmp_path, True)):
        assert file.stat().st_mtime_ns == written
    other = ready.loaded._replace(weights_sha256="others")
    with real_transfers(other, ready.modules, ready.plan, Named(tmp_path, True)):
        assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_was_damaged_is_refused_by_name(tmp_path: Path) -> None:
    ready = prepared("olmoe")
    with opened(ready, named=Named(tmp_path, True)):
        pass
    (file,) = tmp_path.iterdir()
    file.write_bytes(bytes(file.stat().st_size))
    with opened(ready, named=Named(tmp_path, True)) as transfers, pytest.raises(ConfigError, match="remove its file"):
        run(ready, transfers)


def test_writing_that_is_interrupted_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> Iterator[Any]:
        yield from list(contents_of(*arguments))[:3]
        raise KeyboardInterrupt

    monkeypatch.setattr("moereplay.tracegen.live.offloaded.contents_of", interrupted)
    with pytest.raises(KeyboardInterrupt), opened(prepared("olmoe"), named=Named(tmp_path, True)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_read_that_fails_ends_the_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ready, reads = prepared("olmoe"), []

    def failing(self: Memory, y: int, into: Tensor) -> None:
        reads.append(y)
        if len(reads) == 9:
            raise OSError(5, "Input/output error", "experts.bin")
        into[: self.layout.padded(y)] = self._of(y)

    monkeypatch.setattr(Memory, "read", failing)
    with (
        opened(ready) as transfers,
        pytest.raises(ConfigError, match=r"experts.bin: Input/output error; .* discarded"),
    ):
        ready.run(transfers=transfers)
    assert ready.loaded.model.get_experts_implementation() != "eager"


def test_slots_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepared("olmoe")
    monkeypatch.setattr("moereplay.tracegen.offload.memory.available_memory", lambda: 10_000)
    with pytest.raises(ConfigError, match=r"the cache needs .* are free; .*--capacity"), opened(ready):
        pass


def test_experts_on_several_devices_are_refused() -> None:
    spread = discover(tiny_model("olmoe"))
    spread.sites[0].experts.to("meta")
    with pytest.raises(RecordError, match=r"--slow-tier .* cpu, meta; .*--device-map"):
        check_movable(spread)


@every(
    "settings", [{"routing": "cache_prior"}, {"miss": "drop"}, {"miss": "fiddler"}, {"miss": "lowest_bit:bits=16/8"}]
)
def test_policies_that_change_what_runs_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--slow-tier requires routing standard"):
        check_offloadable(configure(**settings))
    check_offloadable(configure(eviction="least_stale", prefetch="top_k"))
