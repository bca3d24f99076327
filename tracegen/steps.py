"""Drive a causal language model over given token ids with its key-value cache: batch 1, no gradients, no sampling.

What the model computes is the checkpoint's own forward; nothing here knows that it is a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


class Stepper:
    """One sequence through one model: `prefill` starts it, `step` continues it, `reset` forgets it."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model` is any causal language model of transformers, in evaluation mode."""
        self._model = model
        self._device = input_device(model)
        self._cache: Any = None  #: whatever cache class the model makes for itself
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens that have gone through since the last reset."""
        return self._length

    def prefill(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Forget what was before, then one pass over `ids`; returns logits (T, V) in the model's dtype and device."""
        self.reset()
        return self.step(ids)

    def step(self, ids: Sequence[int] | Tensor) -> Tensor:
        """One pass over the next `ids`, one or several, after those in the cache; returns logits (len(ids), V)."""
        given = torch.as_tensor(ids, dtype=torch.long, device=self._device).reshape(1, -1)
        # MiniMax counts from 0 at every step unless told where it is
        at = torch.arange(self._length, self._length + given.shape[1], device=self._device)[None]
        with torch.inference_mode():
            seen = self._model(
                input_ids=given, position_ids=at, past_key_values=self._cache, use_cache=True, return_dict=True
            )
        self._cache = seen.past_key_values
        self._length += given.shape[1]
        return seen.logits[0]

    def reset(self) -> None:
        """Drop the cache: the next tokens start a new sequence."""
        self._cache = None
        self._length = 0


def input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids must be: the embedding's device; the CPU if accelerate has offloaded it and moves ids itself."""
    device = next(model.get_input_embeddings().parameters()).device
    return torch.device("cpu") if device.type == "meta" else device
