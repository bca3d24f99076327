"""Quality of a policy set: the modified model's predictions compared with the baseline's, given the same tokens.

Every token but a request's first is predicted twice, given the same tokens before it. All in float64, from the logits
as float32.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import transformers
from torch import Tensor

from moereplay.tracegen.decoding import Stepper, nll, refuse_no_numbers
from moereplay.tracegen.live.source import Emulation

LARGEST_EXPONENT = math.log(sys.float_info.max)  #: a model that gives a token zero probability has infinite perplexity
ROWS_AT_ONCE = 64  #: three float64 copies of all logits of a long prompt would not fit


@dataclass(frozen=True)
class Score:
    """Sums over predicted tokens; natural logarithms."""

    tokens: int = 0
    nll_base: float = 0.0  #: negative log-likelihood under the unmodified model
    nll: float = 0.0  #: under the modified one
    kl: float = 0.0  #: Kullback-Leibler divergence, unmodified from modified
    agreed: int = 0  #: tokens for which both find the same token likeliest
    differing: int = 0  #: tokens for which any of the two models' logits differs in any bit

    def __add__(self, other: Score) -> Score:
        return Score(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def perplexity_base(self) -> float | None:
        """Perplexity of the baseline; None, as all of these, without a predicted token."""
        return _exp(self._mean(self.nll_base))

    @property
    def perplexity(self) -> float | None:
        """Perplexity of the modified model."""
        return _exp(self._mean(self.nll))

    @property
    def mean_kl(self) -> float | None:
        """KL(unmodified || modified) in nats per token."""
        return self._mean(self.kl)

    @property
    def top1(self) -> float | None:
        """Share of tokens for which both models find the same token likeliest."""
        return self._mean(self.agreed)

    @property
    def identical(self) -> bool | None:
        """True if all logits are equal bit for bit."""
        return self.differing == 0 if self.tokens else None

    def row(self) -> dict[str, float | int | bool | None]:
        """Return the sums and the values derived from them."""
        derived = ("perplexity_base", "perplexity", "mean_kl", "top1", "identical")
        return vars(self) | {name: getattr(self, name) for name in derived}

    def _mean(self, total: float) -> float | None:
        return total / self.tokens if self.tokens else None


@dataclass(frozen=True)
class Quality:
    """A score for every request, in run order."""

    per_request: tuple[Score, ...]

    @property
    def total(self) -> Score:
        """Over all requests, each token weighing the same."""
        return sum(self.per_request, Score())


def score(base: Tensor, modified: Tensor, targets: Tensor) -> Score:
    """Return predictions of `targets` (n,) by both models' logits (n, V)."""
    total = Score()
    for start in range(0, len(targets), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        total += _score(base[rows], modified[rows], targets[rows])
    return total


def _score(base: Tensor, modified: Tensor, targets: Tensor) -> Score:
    log_base, log_modified = (logits.float().double().log_softmax(-1) for logits in (base, modified))
    picked = targets.to(log_base.device)[:, None]
    chance = log_base.exp()
    # a token that a model rules out has log probability -inf and adds nothing: 0 * (-inf + inf) would be nan
    kl = torch.where(chance > 0, chance * (log_base - log_modified), 0).sum()
    agreed = (log_base.argmax(-1) == log_modified.argmax(-1)).sum()
    nll_base, nll = (-logs.gather(-1, picked).sum() for logs in (log_base, log_modified))
    differing = (base != modified).any(-1).sum()
    return Score(len(targets), nll_base.item(), nll.item(), kl.item(), int(agreed), int(differing))


def _exp(mean: float | None) -> float | None:
    """Return e**mean, as large as a float can be."""
    return None if mean is None else math.exp(min(mean, LARGEST_EXPONENT))


# -- A live run and its baseline: the model under policies and the unmodified model read the same tokens.


class Readers:
    """Both models, each with its own key-value cache. Per request: `begin`, `read` each pass, `take`.

    No hooks are on while the baseline reads.
    """

    def __init__(self, model: transformers.PreTrainedModel, emulation: Emulation, quality: bool) -> None:
        """Store `quality`; without it there is no baseline."""
        self._emulation = emulation
        self._modified, self._base = Stepper(model), Stepper(model) if quality else None

    def begin(self, request: int) -> None:
        """Begin a request with empty key-value caches; the cache of experts continues."""
        self._request, self._score, self._nll = request, Score(), [torch.zeros(1)]
        self._last: tuple[Tensor, Tensor | None] | None = None
        for stepper in filter(None, (self._modified, self._base)):
            stepper.reset()

    def read(self, ids: Sequence[int], prefill: bool) -> Tensor:
        """Run a pass over `ids`; return the modified model's logits (V,) for the token that comes next."""
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
        """Return (T,) f32 nll of the request's tokens under the modified model, and the comparison of both models."""
        return torch.cat(self._nll).numpy(), self._score

    def _judge(self, logits: Tensor, base: Tensor | None, targets: Tensor) -> None:
        refuse_no_numbers(logits)
        self._nll.append(nll(logits, targets).cpu())
        if base is not None:
            self._score += score(base, logits, targets)
