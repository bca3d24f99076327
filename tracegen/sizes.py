"""Sizes of a loaded model, as `traces/geometry.py` defines them, measured on its tensors."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn

from moereplay.tracegen.errors import RecordError

#: Dtypes that hold no plain numbers, so that elements cannot be counted.
PACKED = (torch.uint8, torch.int32)


class Sizes(NamedTuple):
    """Fields of `traces.schema.Geometry`. Parameters include biases and norms."""

    expert_bytes: tuple[int, ...]  #: of one expert, per MoE layer, at the loaded precision
    expert_bits: float  #: per parameter, scales of quantised experts included
    expert_params: int
    dense_params: int  #: per MoE layer, on average: all but the routed experts
    head_params: int  #: used by every token outside the MoE layers: head, last norm, dense layers
    dense_bits: float  #: per parameter of these two


def measure(
    model: transformers.PreTrainedModel, experts: list[nn.Module], layers: list[nn.Module], count: int
) -> Sizes:
    """Return sizes from the experts module and the decoder layer of each gate, `count` experts in each.

    Raises RecordError if a layer does not hold `count` experts of one size, or holds them in an unknown packed format.
    """
    held = [_experts(each, count, at) for at, each in enumerate(experts)]
    sizes, params = ([sum(map(size, each)) // count for each in held] for size in (_bytes, _numbers))
    moe = sum(_params(layer) for layer in layers)
    dense = _params(model) - count * sum(params) - _embedding(model)
    return Sizes(
        expert_bytes=tuple(sizes),
        expert_bits=8 * sum(sizes) / sum(params),
        expert_params=sum(params) // len(params),
        dense_params=(moe - count * sum(params)) // len(layers),
        head_params=_params(model) - moe - _embedding(model),
        dense_bits=_dense_bits(model, count * sum(sizes), dense),
    )


def _experts(module: nn.Module, count: int, at: int) -> list[Tensor]:
    """Return the tensors of a layer's experts."""
    tensors = list(chain(module.parameters(), module.buffers()))
    held = int(getattr(module, "num_experts", count))
    if held != count or not tensors or sum(map(_bytes, tensors)) % count or sum(map(_numbers, tensors)) % count:
        raise RecordError(
            f"MoE layer {at}: {type(module).__name__} does not hold the {count} equal experts of its gate"
        )
    for tensor in tensors:
        if tensor.dtype in PACKED and not hasattr(tensor, "quant_state"):
            raise RecordError(f"MoE layer {at}: experts are packed as {tensor.dtype}; load the checkpoint unpacked")
    return tensors


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _numbers(tensor: Tensor) -> int:
    """Count the numbers that a tensor represents: bitsandbytes packs two in a byte and stores the shape separately."""
    packed = getattr(tensor, "quant_state", None)
    return tensor.numel() if packed is None else packed.shape.numel()


def _params(module: nn.Module) -> int:
    return sum(map(_numbers, module.parameters()))


def _dense_bits(model: transformers.PreTrainedModel, experts: int, params: int) -> float:
    """Return the bits per weight of all but routed experts and embedding tables; 16 if there are none."""
    embedding = _embedding(model) and sum(map(_bytes, model.get_input_embeddings().parameters()))
    return 8 * (sum(map(_bytes, model.parameters())) - experts - embedding) / params if params else 16.0


def _embedding(model: transformers.PreTrainedModel) -> int:
    """Return parameters that only look tokens up: none if the head multiplies by the same matrix."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    return 0 if tied else _params(embedding)
