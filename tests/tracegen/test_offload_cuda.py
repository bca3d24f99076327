"""Real offloading on CUDA, as far as a machine without it shows: what is asked of torch, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import pytest
import torch

from moereplay.simulator.reference.machine import COMPUTE
from moereplay.tracegen.offload.compute import Graphs, Layers, Work, captures, layout_of
from moereplay.tracegen.offload.machine import RealClock, Worker
from moereplay.tracegen.offload.memory import contents, marks_of
from moereplay.tracegen.offload.slow_tier import copier
from tests.kit.offloading import geometry

LAYOUT = layout_of(geometry())
STORED = LAYOUT.format(0)
MARKS = marks_of(LAYOUT)


def slot_of(y: int) -> torch.Tensor:
    """Return the bytes of an expert."""
    return torch.from_numpy(next(islice(contents(LAYOUT), y, None)).copy())


class Cuda:
    """Stands for torch.cuda: says in which order it was asked for what."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def is_available(self) -> bool:
        return False

    def Stream(self, device: str) -> Cuda:  # noqa: N802 - torch's name
        self.name = f"a stream of {device}"
        return self

    def __str__(self) -> str:
        return self.name

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 1)

    def CUDAGraph(self) -> Cuda:  # noqa: N802 - torch's name
        return self

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        self.asked.append(f"capture {capture_error_mode}")

    def capture_end(self) -> None:
        self.asked.append("captured")

    def replay(self) -> None:
        self.asked.append("replayed")

    @contextmanager
    def stream(self, which: Cuda) -> Iterator[None]:
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


def graphs(most_tokens: int, captured: list[str]) -> Graphs:
    """Return layers whose graphs run what was captured, on the CPU."""

    def capture(work: Work) -> Work:
        captured.append("captured")
        return work

    return Graphs(geometry(), most_tokens, "cpu", capture)


def test_what_cuda_computes_is_awaited_before_its_slot_may_be_overwritten(monkeypatch):
    monkeypatch.setattr(torch, "cuda", cuda := Cuda())
    layers = graphs(2, [])
    layers.warm_up([STORED])
    cuda.asked.clear()
    layers.expert(slot_of(0), "bfloat16", 1)
    layers.dense(0, 1)
    assert cuda.asked == ["compute's stream of cpu", "awaited"] * 2


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 64, 65, 70])
def test_graphs_compute_what_layers_compute(monkeypatch, tokens):
    """Rows of a graph that has more tokens do not change the others; beyond 64 tokens there is no graph."""
    monkeypatch.setattr(torch, "cuda", Cuda())
    plain, captured = Layers(geometry(), tokens, "cpu"), list[str]()
    graphed = graphs(tokens, captured)
    graphed.warm_up([STORED])
    sizes = min(7, (tokens - 1).bit_length() + 1)
    assert len(captured) == sizes * 3  # two layers and a format
    for layer in (0, 1, 0):
        for each in (plain, graphed):
            each.dense(layer, tokens)
        torch.testing.assert_close(graphed._state[:tokens], plain._state[:tokens])
    assert [graphed.expert(slot_of(y), "bfloat16", tokens) for y in range(3)] == [(y, y) for y in MARKS[:3]]
    graphed.warm_up([STORED])
    assert len(captured) == sizes * 3  # what is captured is kept


def test_a_format_without_a_graph_is_computed_as_well(monkeypatch):
    monkeypatch.setattr(torch, "cuda", Cuda())
    layers = graphs(1, [])
    layers.warm_up([])
    assert layers.expert(slot_of(1), "bfloat16", 1) == (MARKS[1], MARKS[1])


def test_the_thread_that_computes_prepares_before_the_clock_runs(monkeypatch):
    Layers(geometry(), 2, "cpu").warm_up([STORED])  # nothing to set up on a CPU
    monkeypatch.setattr(torch, "cuda", cuda := Cuda())
    layers, captured = graphs(2, names := []), RealClock()
    worker = Worker(captured, COMPUTE, lambda: layers.warm_up([STORED]))
    assert len(names) == 2 * 3 and cuda.asked == ["compute's stream of cpu", "awaited"]  # waited for here
    worker.close()
    with pytest.raises(RuntimeError, match="no kernel"):
        Worker(captured, COMPUTE, _failing)


def test_a_capture_launches_what_was_recorded_beside_the_copies_of_another_thread(monkeypatch):
    monkeypatch.setattr(torch, "cuda", cuda := Cuda())
    ran: list[int] = []
    launch = captures("cuda:1")(lambda: ran.append(1))
    assert len(ran) == 2 and cuda.asked == [
        "into a stream of cuda:1",
        "awaited",  # libraries are set up before the capture
        "capture thread_local",
        "captured",
        "out of it",
    ]
    launch()
    assert cuda.asked[-1] == "replayed"


def _failing() -> None:
    raise RuntimeError("no kernel image is available")
