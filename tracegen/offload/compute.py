"""The accelerator's work with torch: dense parts and experts of a model's real size, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from moereplay.simulator.errors import ConfigError
from moereplay.tracegen.offload.memory import BITS_PER_WEIGHT, SEED, WEIGHT, Format, Layout, Marks, page_marks
from moereplay.traces.geometry import known_models
from moereplay.traces.schema import Geometry

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MATRICES = 3  #: gate, up and down
SCALES = 1  #: bits that scales of a group add to a weight's at most


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's experts: two products (width, hidden) and one back."""

    hidden: int
    width: int
    dtype: str  #: of dense weights and activations
    dense_rows: int  #: of hidden weights each, in a layer's dense part
    head_rows: int  #: the same of what a pass does before layer 0

    @property
    def params(self) -> int:
        """Weights of an expert."""
        return MATRICES * self.width * self.hidden


def shape_of(geometry: Geometry) -> Shape:
    """Raises ConfigError for experts that are not of equal size, or of bits that torch does not compute."""
    sizes = set(geometry.expert_bytes)
    if len(sizes) > 1:
        raise ConfigError(f"measure requires experts of one size; these have {len(sizes)} sizes")
    dtype = format_at(geometry.expert_bits)
    params = geometry.expert_params or int(sizes.pop() * 8 // geometry.expert_bits)
    hidden = _hidden(geometry, params)
    rows = [(each or 0) // hidden for each in (geometry.dense_params, geometry.head_params)]
    return Shape(hidden, params // (MATRICES * hidden), "float32" if dtype == "float32" else "bfloat16", *rows)


def experts_only(geometry: Geometry) -> Geometry:
    """Return the model without the weights that are always resident."""
    return geometry.model_copy(update={"dense_params": None, "head_params": None})


def format_at(bits: float) -> str:
    """Return the format of weights of `bits`, scales included. Raises ConfigError if torch cannot compute it."""
    for name, own in BITS_PER_WEIGHT.items():
        if bits == own or (name.startswith("int") and own < bits < own + SCALES):
            return name
    raise ConfigError(
        f"measure requires experts at 2, 4 or 8 bits (with or without scales), 16 or 32; these have {bits:g} bits; "
        "choose such bits in --miss, or import or synthesise the trace with --expert-bits 16"
    )


def layout_of(geometry: Geometry, bits: float | None = None) -> Layout:
    """Return the layout of the experts, as stored or at `bits`.

    Raises ConfigError if torch cannot compute them.
    """
    shape_of(geometry)
    bits = geometry.expert_bits if bits is None else bits
    return Layout(geometry.experts, geometry.bytes_at(bits), format_at(bits))


def _hidden(geometry: Geometry, params: int) -> int:
    """Return the residual width of the known model with these experts, else that of square matrices."""
    size = (geometry.experts, geometry.k, params)
    known = {
        model.hidden
        for model in known_models().values()
        if (model.geometry.experts, model.geometry.k, model.geometry.expert_params) == size
    }
    return min(known) if known else max(1, isqrt(params // MATRICES))


class Layers:
    """Layers that the accelerator computes. Called by one thread."""

    def __init__(self, geometry: Geometry, most_tokens: int, device: str) -> None:
        """Allocate the dense weights; weights of experts come from slots."""
        self.shape = shape_of(geometry)
        self.device, draw = device, torch.Generator().manual_seed(SEED)
        self._dense = [self._weights(self.shape.dense_rows, draw) for _ in range(geometry.layers)]
        self._head = self._weights(self.shape.head_rows, draw)
        self._embedded = self._weights(most_tokens, draw)
        self._state = self._embedded.clone()  # (most_tokens, hidden), of which a pass uses its first rows

    def _weights(self, rows: int, draw: torch.Generator) -> Tensor:
        values = torch.randn(max(rows, 1), self.shape.hidden, generator=draw) * WEIGHT
        return values.to(self.device, DTYPES[self.shape.dtype])

    def warm_up(self, formats: Sequence[Format]) -> None:
        """Prepare for copies in these formats, on the thread that computes: nothing to do on a CPU."""

    def dense(self, layer: int, tokens: int) -> None:
        """Multiply with all dense weights of the layer, and before layer 0 with those of the head."""
        with torch.inference_mode():
            if layer == 0:
                linear(self._state[:1], self._head).argmax()
                self._state[:tokens] = self._embedded[:tokens]
            state = self._state[:tokens]
            mixed = linear(rms_norm(state, (self.shape.hidden,)), self._dense[layer])[:, : self.shape.hidden]
            state[:, : mixed.shape[1]] += mixed

    def expert(self, slot: Tensor, dtype: str, tokens: int) -> Marks:
        """Compute an expert for the first `tokens` rows, and return the marks of the pages of its slot.

        The slot, (n,) uint8 in whole pages, has the expert's weights.
        """
        with torch.inference_mode():
            return Marks(*(int(each) for each in self.gated(slot, dtype, tokens)))

    def gated(self, slot: Tensor, dtype: str, tokens: int) -> tuple[Tensor, Tensor]:
        """Compute a gated MLP, and return the least and the largest mark of the slot's pages."""
        of = self.shape
        gate, up, down = as_weights(slot, dtype, of).view(MATRICES, -1)
        state = self._state[:tokens]
        inner = silu(linear(state, gate.view(of.width, of.hidden))) * linear(state, up.view(of.width, of.hidden))
        linear(inner, down.view(of.hidden, of.width))
        least, most = torch.aminmax(page_marks(slot))
        return least, most


def as_weights(slot: Tensor, dtype: str, shape: Shape) -> Tensor:
    """Return the bytes of a slot as weights (params,): a view, or expanded from packed integers.

    torch has no kernel that computes with packed integers everywhere, so they are expanded each time.
    """
    if dtype in DTYPES:
        return slot.view(DTYPES[dtype])[: shape.params]
    bits = BITS_PER_WEIGHT[dtype]
    packed = slot[: shape.params * bits // 8]
    parts = [packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return (torch.stack(parts, -1).view(-1).to(DTYPES[shape.dtype]) - (1 << bits - 1)) * WEIGHT


# -- The same as CUDA graphs: one launch instead of ten, as in inference engines. From Python, launching a kernel takes
# -- longer than a kernel of one token runs. A graph is captured once per number of tokens. It reads fixed memory, so
# -- the bytes of a slot are copied there first, within the device.


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
