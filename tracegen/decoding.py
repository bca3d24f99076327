"""How a prompt is continued: by the model's own generate(), greedy or sampled, without a checkpoint's own defaults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from moereplay.tracegen.plan import Decoding
from moereplay.tracegen.steps import input_device


def continued(model: Any, prompt: Sequence[int], decoding: Decoding, seed: int) -> list[int]:
    """The new tokens after the prompt, the ending token included; at least one. Depends on nothing but its arguments.

    `model` is a PreTrainedModel that can generate().
    A checkpoint's own defaults (temperature, penalties, suppressed tokens) is not used, only its ending tokens are.
    """
    ids = torch.as_tensor(prompt, dtype=torch.long, device=input_device(model)).reshape(1, -1)
    with torch.inference_mode(), _own_defaults(model), _drawing_from(seed, ids.device):
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=_config(decoding), **_all_logits(model)
        )
    return out[0, len(ids[0]) :].tolist()


def seed_of(seed: int, request: int) -> int:
    """A 64-bit seed per request, so that a resumed recording draws what an undisturbed one draws."""
    return int(np.random.SeedSequence([seed, request]).generate_state(1, np.uint64)[0])


def _config(decoding: Decoding) -> GenerationConfig:
    if not decoding.temperature:
        return GenerationConfig(max_new_tokens=decoding.max_new_tokens, do_sample=False, use_cache=True)
    return GenerationConfig(do_sample=True, use_cache=True, **decoding.model_dump())


def _all_logits(model: PreTrainedModel) -> dict[str, int]:
    """generate() asks for the last row's logits only, 1; 0 asks for all, which the prompt's nll needs."""
    return {"logits_to_keep": 0} if "logits_to_keep" in signature(model.forward).parameters else {}


@contextmanager
def _own_defaults(model: PreTrainedModel) -> Iterator[None]:
    """Clear the model's sampling defaults, which generate() would fill in; keep its end tokens."""
    theirs = model.generation_config or GenerationConfig()
    ends = theirs.eos_token_id
    pad = theirs.pad_token_id if theirs.pad_token_id is not None else (ends[0] if isinstance(ends, list) else ends)
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad, bos_token_id=theirs.bos_token_id)
    try:
        yield
    finally:
        model.generation_config = theirs


@contextmanager
def _drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """torch's global generator, seeded, and afterwards as it was: generate() takes no generator of its own."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
