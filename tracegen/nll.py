"""Negative log-likelihood of every token that goes through a model, from the logits of its own passes.

nll[t] = -ln P(token t | tokens before it in the same sequence), nats, in float32. Nothing predicts a sequence's first
token: its nll is 0.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from moereplay.tracegen.errors import RecordError

ROWS_AT_ONCE = 256  #: a float32 copy of all logits of a long prompt would double the memory that they take


def nll(logits: Tensor, targets: Tensor) -> Tensor:
    """(T,) float32 nats: -ln softmax(logits[t])[targets[t]], from logits (T, V) of any dtype and ids (T,)."""
    parts = zip(logits.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([cross_entropy(rows.float(), wanted, reduction="none") for rows, wanted in parts])


class Surprise:
    """Inside `with Surprise(model) as surprise:`, the nll of every token of every pass; `take` ends a sequence.

    It works on generate() and on plain passes alike: it sees what goes in and what comes out. Batch 1.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._parts: list[Tensor] = []
        self._next: Tensor | None = None  #: (1, V) logits of the token that comes next
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        self._hooks = [self._model.register_forward_hook(self._after_pass, with_kwargs=True)]
        head = self._model.get_output_embeddings()
        if head is not None:
            self._hooks.append(head.register_forward_hook(last_row_as_if_alone))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def take(self) -> np.ndarray:
        """(T,) float32 of the tokens since the last take, which were one sequence; the next pass starts another."""
        parts, self._parts, self._next = self._parts, [], None
        return torch.cat([part.cpu() for part in parts]).numpy()

    def _after_pass(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        ids, logits = kwargs["input_ids"][0], output.logits[0]
        ids = ids.to(logits.device)
        first = torch.zeros(1, device=logits.device) if self._next is None else nll(self._next, ids[:1])
        self._parts += [first, nll(logits[:-1], ids[1:])] if len(ids) > 1 else [first]
        last = logits[-1:].clone()  # a view would keep the whole prompt's logits alive
        self._next = last
        if torch.isnan(last).any():
            raise RecordError("the model's logits are not numbers (NaN); try --dtype bfloat16 or float32")


def last_row_as_if_alone(head: torch.nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    """Give the last row of a prompt's logits the bits it has when the head sees that row only, as in plain generate().

    A matrix product over many rows rounds differently from one over a single row, and could pick another token.
    """
    if output.shape[1] > 1:
        output[:, -1:] = head.forward(args[0][:, -1:])
