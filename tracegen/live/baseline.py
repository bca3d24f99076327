"""A live run beside its baseline: the model under policies and the unmodified model read the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moereplay.tracegen.decoding import Stepper, nll
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.quality import Score, score
from moereplay.tracegen.live.source import Emulation


class Readers:
    """Both models, each with its own key-value cache. Per request: `begin`, `read` each pass, `take`.

    No hooks are on while the baseline reads.
    """

    def __init__(self, model: PreTrainedModel, emulation: Emulation, quality: bool) -> None:
        """Without `quality` there is no baseline."""
        self._emulation = emulation
        self._modified, self._base = Stepper(model), Stepper(model) if quality else None

    def begin(self, request: int) -> None:
        """A request starts with empty key-value caches; the experts' cache goes on."""
        self._request, self._score, self._nll = request, Score(), [torch.zeros(1)]
        self._last: tuple[Tensor, Tensor | None] | None = None
        for stepper in filter(None, (self._modified, self._base)):
            stepper.reset()

    def read(self, ids: Sequence[int], prefill: bool) -> Tensor:
        """One pass over `ids`; returns the modified model's logits (V,) for the token that comes next."""
        logits = self._emulation.forward(lambda: self._modified.step(ids), len(ids), self._request, prefill)
        base = self._base.step(ids) if self._base else None
        wanted = torch.as_tensor(ids, device=logits.device)
        if self._last is not None:
            self._judge(*self._last, wanted[:1])
        if len(ids) > 1:
            self._judge(logits[:-1], None if base is None else base[:-1], wanted[1:])
        # copies: a view would keep the whole prompt's logits alive
        self._last = logits[-1:].clone(), None if base is None else base[-1:].clone()
        return self._last[0][0]

    def take(self) -> tuple[np.ndarray, Score]:
        """(T,) f32 nll of the request's tokens under the modified model, and both models' predictions compared."""
        return torch.cat(self._nll).numpy(), self._score

    def _judge(self, logits: Tensor, base: Tensor | None, targets: Tensor) -> None:
        if torch.isnan(logits).any():
            raise RecordError("the model's logits are not numbers (NaN); try --dtype bfloat16 or float32")
        self._nll.append(nll(logits, targets).cpu())
        if base is not None:
            self._score += score(base, logits, targets)
