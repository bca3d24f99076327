"""The accelerator's work with torch: dense parts and experts of a model's real size, with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from simulator.errors import ConfigError
from tracegen.offload.experts import BYTES_PER_WEIGHT, SEED, WEIGHT, Layout
from traces.geometry import MODELS
from traces.schema import Geometry

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MATRICES = 3  #: gate, up and down


@dataclass(frozen=True)
class Shape:
    """Of one model: every expert is two products (width, hidden) and one back."""

    hidden: int
    width: int
    dtype: str
    dense_rows: int  #: of hidden weights each, in a layer's dense part
    head_rows: int  #: the same of what a pass does before layer 0


def shape_of(geometry: Geometry) -> Shape:
    """Raises ConfigError for experts that are not of equal size in 16 or 32 bits."""
    sizes, bits = set(geometry.expert_bytes), geometry.expert_bits
    dtype = {16: "bfloat16", 32: "float32"}.get(int(bits))
    if dtype is None or bits != int(bits) or len(sizes) > 1:
        raise ConfigError(
            f"measure computes experts of one size at 16 or 32 bits; these have {bits:g} bits and {len(sizes)} sizes. "
            "Import or synthesise the trace with --expert-bits 16"
        )
    params = sizes.pop() // BYTES_PER_WEIGHT[dtype]
    hidden = _hidden(geometry, params)
    rows = [(each or 0) // hidden for each in (geometry.dense_params, geometry.head_params)]
    return Shape(hidden, params // (MATRICES * hidden), dtype, *rows)


def layout_of(geometry: Geometry) -> Layout:
    """Of its experts. Raises ConfigError for such as cannot be computed."""
    return Layout(geometry.experts, geometry.expert_bytes, shape_of(geometry).dtype)


def _hidden(geometry: Geometry, params: int) -> int:
    """The residual width of the known model with such experts, else that of square matrices."""
    size = (geometry.experts, geometry.k, params)
    known = {
        model.hidden
        for model in MODELS.values()
        if (model.geometry.experts, model.geometry.k, model.geometry.expert_params) == size
    }
    return min(known) if known else max(1, isqrt(params // MATRICES))


class Layers:
    """What the accelerator computes. One thread calls it."""

    def __init__(self, geometry: Geometry, most_tokens: int, device: str) -> None:
        """Dense weights are made at once; those of experts come from slots."""
        self.shape = shape_of(geometry)
        self._device, draw = device, torch.Generator().manual_seed(SEED)
        self._dense = [self._weights(self.shape.dense_rows, draw) for _ in range(geometry.layers)]
        self._head = self._weights(self.shape.head_rows, draw)
        self._embedded = self._weights(most_tokens, draw)
        self._state = self._embedded

    def _weights(self, rows: int, draw: torch.Generator) -> Tensor:
        values = torch.randn(max(rows, 1), self.shape.hidden, generator=draw) * WEIGHT
        return values.to(self._device, DTYPES[self.shape.dtype])

    def dense(self, layer: int, tokens: int) -> None:
        """One product with all dense weights of the layer; before layer 0 with those of the head."""
        with torch.inference_mode():
            if layer == 0:
                linear(self._state[-1:], self._head).argmax()
                self._state = self._embedded[:tokens]
            state = rms_norm(self._state, (self.shape.hidden,))
            mixed = linear(state, self._dense[layer])[:, : self.shape.hidden]
            self._state = self._state + torch.nn.functional.pad(mixed, (0, self.shape.hidden - mixed.shape[1]))
            self._wait()

    def expert(self, weights: Tensor, tokens: int) -> None:
        """A gated MLP over the first `tokens` rows; `weights` are the expert's, flat."""
        of = self.shape
        with torch.inference_mode():
            gate, up, down = weights[: MATRICES * of.width * of.hidden].view(MATRICES, -1)
            state = self._state[:tokens]
            inner = silu(linear(state, gate.view(of.width, of.hidden))) * linear(state, up.view(of.width, of.hidden))
            linear(inner, down.view(of.hidden, of.width))
            self._wait()

    def _wait(self) -> None:
        """Until it is computed: then its slot may be overwritten."""
        if self._device != "cpu":
            torch.cuda.current_stream(self._device).synchronize()


def as_weights(slot: Tensor, dtype: str) -> Tensor:
    """The bytes of a slot as weights, not copied."""
    return slot.view(DTYPES[dtype])
