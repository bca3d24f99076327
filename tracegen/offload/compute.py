"""The accelerator's work with torch: dense parts and experts of a model's real size, with random weights."""

from __future__ import annotations

from collections.abc import Sequence
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
