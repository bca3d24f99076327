"""Sequences that go through one model together, each with the logits that it would have alone, rounding aside.

Sequences of a pass may have different numbers of tokens, or none. Rows are padded on the left, padding is masked, and
each token has its own sequence's position. So what a sequence reads never depends on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moereplay.tracegen.decoding import Stepper, input_device

#: By model, why its texts cannot be padded: a run of it decides, and every set of every task asks.
_KNOWN: WeakKeyDictionary[PreTrainedModel, str | None] = WeakKeyDictionary()
UNLIKE = 0.05  #: share of the logits' spread by which padding may change them


class OneByOne:
    """One sequence as `SideBySide` takes it, read exactly as a recording reads it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._stepper = Stepper(model)

    def step(self, due: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits (n, V) of the one sequence's n tokens."""
        return [self._stepper.step(due[0])]


class SideBySide:
    """B sequences with one key-value cache. Which tokens of a padded pass are whose is said by `places`."""

    def __init__(self, model: PreTrainedModel, batch: int) -> None:
        self._model, self._device = model, input_device(model)
        self._cache: Any = None
        self._mask = torch.zeros(batch, 0, dtype=torch.long)
        self._lengths = [0] * batch

    def step(self, due: Sequence[Sequence[int]]) -> list[Tensor]:
        """One pass over the next tokens of each sequence; logits (n, V) for each, n as many as it had."""
        width = max(map(len, due))
        ids, mask, at = (torch.zeros(len(due), width, dtype=torch.long) for _ in range(3))
        for row, tokens in enumerate(due):
            first = width - len(tokens)
            ids[row, first:] = torch.as_tensor(tokens, dtype=torch.long)
            mask[row, first:] = 1
            at[row, first:] = torch.arange(self._lengths[row], self._lengths[row] + len(tokens))
            self._lengths[row] += len(tokens)
        self._mask = torch.cat([self._mask, mask], dim=1)
        logits = self._forward(ids, at)
        return [logits[row, width - len(tokens) :] for row, tokens in enumerate(due)]

    def _forward(self, ids: Tensor, at: Tensor) -> Tensor:
        with torch.inference_mode():
            seen = self._model(
                input_ids=ids.to(self._device),
                attention_mask=self._mask.to(self._device),
                position_ids=at.to(self._device),
                past_key_values=self._cache,
                use_cache=True,
                return_dict=True,
            )
        self._cache = seen.past_key_values
        return seen.logits


def places(due: Sequence[Sequence[int]]) -> list[slice]:
    """Of each sequence, the rows of a padded pass (B * width) that hold its tokens."""
    width = max(map(len, due))
    return [slice((row + 1) * width - len(tokens), (row + 1) * width) for row, tokens in enumerate(due)]


def unpadded_because(model: PreTrainedModel) -> str | None:
    """Why sequences of a model cannot go through it side by side; None if they can. A short run of it decides, once.

    Linear attention, for one, can carry padding on in its state.
    """
    if model not in _KNOWN:
        _KNOWN[model] = _tried(model)
    return _KNOWN[model]


def _tried(model: PreTrainedModel) -> str | None:
    called = type(model).__name__
    if getattr(model.config.get_text_config(), "index_topk", None):
        return f"the tokens that {called} attends to are picked from padded texts otherwise"
    texts = [list(range(1, 42)), list(range(3, 17))]
    together, steps = SideBySide(model, len(texts)), [OneByOne(model) for _ in texts]
    for due in ([text[:-1] for text in texts], [text[-1:] for text in texts]):
        for padded, (alone, ids) in zip(together.step(due), zip(steps, due, strict=True), strict=True):
            if not _alike(padded, alone.step([ids])[0]):
                return f"{called} computes otherwise where texts are padded"
    return None


def _alike(some: Tensor, others: Tensor) -> bool:
    """Whether two rows of logits differ by rounding alone; an expert more or less on a near tie is rounding too."""
    some, others = some.float(), others.float()
    spread = (others - others.mean(-1, keepdim=True)).norm()
    return bool((some - others).norm() <= UNLIKE * spread)
