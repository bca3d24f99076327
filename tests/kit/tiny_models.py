"""Tiny random models of every family, shared by the tests of recording: seeded, in evaluation mode, biases filled."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

from moereplay.tracegen import families
from moereplay.tracegen.modules import BIAS_NAMES

FAMILIES = {family.name: family for family in families.FAMILIES}


def tiny_model(name: str, dtype: torch.dtype = torch.float32, **keys: Any) -> transformers.PreTrainedModel:
    """A new model of a family's tiny config, with config keys changed."""
    config = FAMILIES[name].tiny()
    config.update(keys)
    return random_model(config, dtype)


@cache
def shared_model(name: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Return one shared model for tests that do not modify it."""
    return tiny_model(name, dtype)


def random_model(config: Any, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """A model of random weights. Correction biases start at zero, where they would prove nothing."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for path, tensor in [*model.named_buffers(), *model.named_parameters()]:
            if path.rpartition(".")[2] in BIAS_NAMES:
                tensor.copy_(0.3 * torch.randn(tensor.shape))
    return model


def some_ids(count: int, seed: int = 1) -> Tensor:
    """Token ids (1, count)."""
    return torch.randint(0, 96, (1, count), generator=torch.Generator().manual_seed(seed))
