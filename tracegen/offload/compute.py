"""The accelerator's work with torch: dense parts and experts of a model's real size, with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from moereplay.simulator.errors import ConfigError
from moereplay.tracegen.offload.memory import BITS_PER_WEIGHT, SEED, WEIGHT, Layout
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
        f"measure requires experts at 2, 4 or 8 bits (with or without scales), 16 or 32; these have {bits:g} bits. "
        "Import or synthesise the trace with --expert-bits 16"
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
        self._state = self._embedded

    def _weights(self, rows: int, draw: torch.Generator) -> Tensor:
        values = torch.randn(max(rows, 1), self.shape.hidden, generator=draw) * WEIGHT
        return values.to(self.device, DTYPES[self.shape.dtype])

    def warm_up(self) -> None:
        """Compute once on the calling thread of a GPU: a thread's first product there sets up libraries, for 10 ms."""
        if self.device != "cpu":
            of = self.shape
            self.dense(0, 1)
            self.expert(torch.zeros(of.params, dtype=DTYPES[of.dtype], device=self.device), 1)

    def dense(self, layer: int, tokens: int) -> None:
        """Multiply with all dense weights of the layer, and before layer 0 with those of the head."""
        with torch.inference_mode():
            if layer == 0:
                linear(self._state[-1:], self._head).argmax()
                self._state = self._embedded[:tokens]
            state = rms_norm(self._state, (self.shape.hidden,))
            mixed = linear(state, self._dense[layer])[:, : self.shape.hidden]
            self._state = self._state + torch.nn.functional.pad(mixed, (0, self.shape.hidden - mixed.shape[1]))
            self._wait()

    def expert(self, weights: Tensor, tokens: int) -> None:
        """Compute a gated MLP over the first `tokens` rows; `weights` are the expert's, flat."""
        of = self.shape
        with torch.inference_mode():
            gate, up, down = weights[: of.params].view(MATRICES, -1)
            state = self._state[:tokens]
            inner = silu(linear(state, gate.view(of.width, of.hidden))) * linear(state, up.view(of.width, of.hidden))
            linear(inner, down.view(of.hidden, of.width))
            self._wait()

    def _wait(self) -> None:
        """Wait until the device has finished: the slot may be overwritten after that."""
        if self.device != "cpu":
            torch.cuda.current_stream(self.device).synchronize()


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
