"""Dense parts and experts as CUDA graphs: one launch instead of ten, as in inference engines.

From Python, launching a kernel takes longer than a kernel of one token runs. A graph is captured once per number of
tokens. It reads fixed memory, so the bytes of a slot are copied there first, within the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from moereplay.tracegen.offload.compute import Layers
from moereplay.tracegen.offload.memory import Format, Marks
from moereplay.traces.schema import Geometry

SIZES = (1, 2, 4, 8, 16, 32, 64)  #: tokens of a graph; a pass uses the next size, and none beyond the last
Work = Callable[[], None]
Capture = Callable[[Work], Work]


class Graphs(Layers):
    """Layers on a GPU. Every call returns after the device has finished, because slots may be overwritten then."""

    def __init__(self, geometry: Geometry, most_tokens: int, device: str, capture: Capture | None = None) -> None:
        """Allocate as Layers do; `capture` makes a graph of what it is given, and returns what launches it."""
        super().__init__(geometry, _padded(most_tokens), device)
        self._capture = capture or captures(device)
        self._sizes = [size for size in SIZES if size <= len(self._embedded)]
        self._slots: dict[Format, Tensor] = {}
        self._marks = torch.zeros(2, dtype=torch.int64, pin_memory=torch.cuda.is_available())
        self._graphs: dict[Hashable, Work] = {}

    def warm_up(self, formats: Sequence[Format]) -> None:
        """Capture what is not captured yet. A thread's first kernels also set up libraries, for 10 ms."""
        torch.zeros(1, device=self.device)  # cuBLAS expects that the thread has used the device
        super().dense(0, 1)
        for stored in formats:
            if stored not in self._slots:
                self._slots[stored] = torch.zeros(stored.size, dtype=torch.uint8, device=self.device)
        for size in self._sizes:
            for layer in range(len(self._dense)):
                self._captured((layer, size), lambda layer=layer, size=size: super(Graphs, self).dense(layer, size))
            for stored in formats:
                self._captured((stored, size), lambda stored=stored, size=size: self._copied(stored, size))
        self._wait()

    def _captured(self, key: Hashable, work: Work) -> None:
        if key not in self._graphs:
            self._graphs[key] = self._capture(work)

    def _copied(self, stored: Format, tokens: int) -> None:
        """Compute the expert in the fixed memory of its format, and bring its marks to the host."""
        with torch.inference_mode():
            found = self.gated(self._slots[stored], stored.dtype, tokens)
            self._marks.copy_(torch.stack(found), non_blocking=True)

    def dense(self, layer: int, tokens: int) -> None:
        """Launch the graph of the layer; without one, its kernels."""
        graph = self._graphs.get((layer, _padded(tokens)))
        if graph is None:
            super().dense(layer, tokens)
        else:
            graph()
        self._wait()

    def expert(self, slot: Tensor, dtype: str, tokens: int) -> Marks:
        """Copy the slot and launch the graph of its format; without one, the kernels."""
        stored = Format(len(slot), dtype)
        graph = self._graphs.get((stored, _padded(tokens)))
        if graph is None:
            return super().expert(slot, dtype, tokens)  # waits for the marks
        self._slots[stored].copy_(slot)
        graph()
        self._wait()
        return Marks(*self._marks.tolist())

    def _wait(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


def layers_of(geometry: Geometry, most_tokens: int, device: str) -> Layers:
    """Return the layers of a device."""
    return Layers(geometry, most_tokens, device) if device == "cpu" else Graphs(geometry, most_tokens, device)


def captures(device: str) -> Capture:
    """Return a function that captures work as a CUDA graph and returns what launches it."""
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def capture(work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            work()  # libraries are set up outside of a capture
            stream.synchronize()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # the link's thread may copy meanwhile
            work()
            graph.capture_end()
        return graph.replay

    return capture


def _padded(tokens: int) -> int:
    """Return the tokens of the graph that computes so many; beyond the largest, the number itself."""
    return next((size for size in SIZES if tokens <= size), tokens)
