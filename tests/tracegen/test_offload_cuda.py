"""Real offloading on CUDA, as far as a machine without it shows: what is asked of torch, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from moereplay.simulator.calibration import Calibration
from moereplay.simulator.reference.machine import COMPUTE
from moereplay.tracegen.offload.compute import Layers, as_weights, layout_of
from moereplay.tracegen.offload.machine import RealClock, Worker
from moereplay.tracegen.offload.memory import contents
from moereplay.tracegen.offload.slow_tier import copier
from tests.kit.offloading import geometry

ABOUT = Calibration(device="here")


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


def test_the_thread_that_computes_sets_up_its_libraries_before_the_clock_runs(monkeypatch):
    layers = Layers(geometry(), 2, "cpu")
    layers.warm_up()  # nothing to set up: no state is touched
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device, **more: torch.full(sizes, 0.0, **more))
    monkeypatch.setattr(torch, "cuda", cuda := Cuda())
    layers.device = "cuda"
    clock = RealClock()
    worker = Worker(clock, COMPUTE, layers.warm_up)
    assert cuda.asked == ["compute's stream of cuda", "awaited"] * 2  # a dense part and an expert, waited for here
    worker.close()
    with pytest.raises(RuntimeError, match="no kernel"):
        Worker(clock, COMPUTE, _failing)


def _failing() -> None:
    raise RuntimeError("no kernel image is available")
