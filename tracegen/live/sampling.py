"""One token from one row of logits, as generate() picks it: for runs that must see every pass themselves."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moereplay.tracegen.plan import Decoding


class Sampler:
    """Picks the tokens that `tracegen.decoding.continued` would pick under the same settings and seed."""

    def __init__(self, decoding: Decoding, seed: int, device: torch.device) -> None:
        self._greedy = not decoding.temperature
        self._warp = _warpers(decoding)
        self._generator = torch.Generator(device).manual_seed(seed)

    def pick(self, logits: Tensor) -> int:
        """The next token from logits (V,)."""
        row = logits.to(torch.float32, copy=True)[None]
        if self._greedy:
            return int(row.argmax())
        chances = self._warp(torch.empty(1, 0, dtype=torch.long), row).softmax(-1)  # type: ignore[arg-type]
        return int(torch.multinomial(chances, 1, generator=self._generator))


def endings(model: PreTrainedModel) -> frozenset[int]:
    """Tokens with which the model ends a text."""
    ends = model.generation_config.eos_token_id if model.generation_config else None
    return frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,))


def _warpers(decoding: Decoding) -> LogitsProcessorList:
    """In generate()'s order; those that change nothing are left out, as there."""
    chosen = LogitsProcessorList()
    if decoding.temperature not in (0, 1):
        chosen.append(TemperatureLogitsWarper(decoding.temperature))
    if decoding.top_k:
        chosen.append(TopKLogitsWarper(decoding.top_k))
    if decoding.top_p < 1:
        chosen.append(TopPLogitsWarper(decoding.top_p))
    return chosen
