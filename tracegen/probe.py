"""The probe run: one short forward pass that keeps every call of chosen modules, to find and check a model's parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

SEED = 20240924


class Call(NamedTuple):
    """Arguments and output of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def given(self) -> tuple[Any, ...]:
        """All arguments, positional ones first."""
        return (*self.args, *self.kwargs.values())

    @property
    def first(self) -> Any:
        """The first argument, by position or by name: a module's input."""
        return self.given[0]


def probe(
    model: transformers.PreTrainedModel, tokens: int, beneath: Iterable[nn.Module]
) -> dict[nn.Module, list[Call]]:
    """Return the calls of every module beneath the given ones, modules in the order in which they first return.

    The pass is one row of `tokens` random token ids, the same at every call, without a cache.
    """
    calls: dict[nn.Module, list[Call]] = {}

    def keep(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        calls.setdefault(module, []).append(Call(args, kwargs, output))

    watched = dict.fromkeys(module for root in beneath for module in root.modules())
    hooks = [module.register_forward_hook(keep, with_kwargs=True) for module in watched]
    try:
        with torch.inference_mode():
            model(input_ids=random_tokens(model, tokens), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def random_tokens(model: transformers.PreTrainedModel, tokens: int) -> Tensor:
    """Return seeded token ids (1, tokens) on the embedding's device, or on the CPU if it is offloaded."""
    matrix = next(model.get_input_embeddings().parameters())
    ids = torch.randint(0, len(matrix), (1, tokens), generator=torch.Generator().manual_seed(SEED))
    return ids.to("cpu" if matrix.is_meta else matrix.device)
