"""Texts that are read a pass at a time: one that is given and scored, and one that is continued.

The prompt goes through the model in one pass, what follows token by token, as an engine serves it: a policy that looks
at whole passes then meets what it would meet there. The last token goes through no pass: nothing after it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, inf
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from moereplay.tracegen.decoding import Sampler
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.quality import LARGEST_EXPONENT, Score, score
from moereplay.tracegen.prompts import Prompts, read_texts
from moereplay.tracegen.quality.answers import Answers, Example, Measure, sha256_of
from moereplay.tracegen.quality.named import PERPLEXITY
from moereplay.tracegen.record import room_of
from moereplay.tracegen.tokens import windows

if TYPE_CHECKING:
    from moereplay.tracegen.quality.session import Session


class Text(Protocol):
    """One sequence. Its first pass, and no other, is its prompt."""

    read: list[int]  #: tokens that have gone through the model

    @property
    def first(self) -> int:
        """Tokens of its first pass."""
        ...

    def due(self) -> Sequence[int]:
        """The tokens of its next pass; none when it is over."""
        ...

    def receive(self, logits: Tensor, base: Tensor | None) -> None:
        """The logits (n, V) after each of the n tokens that were due; `base` are the unmodified model's."""


@dataclass
class Given:
    """Tokens whose probabilities are asked for, from the one at `scored` on."""

    ids: Sequence[int]
    prompt: int  #: tokens of the first pass, at least 1 and less than all
    scored: int  #: place of the first token that is scored, at least 1
    logprob: float = 0.0  #: natural, summed over the scored tokens
    greedy: bool = True  #: whether each scored token is the likeliest
    compared: Score = field(default_factory=Score)  #: with the unmodified model, where that was read beside
    read: list[int] = field(default_factory=list)

    @property
    def first(self) -> int:
        """The prompt's tokens."""
        return self.prompt

    def due(self) -> Sequence[int]:
        """The prompt, then one token after the other."""
        at = len(self.read)
        return self.ids[: self.prompt] if not at else self.ids[at : min(at + 1, len(self.ids) - 1)]

    def receive(self, logits: Tensor, base: Tensor | None) -> None:
        """Score the tokens that follow those that were read. Raises RecordError if the model gives no numbers."""
        first, last = len(self.read) - len(logits), len(self.read)  # row i predicts token first + i + 1
        skipped = max(self.scored - first - 1, 0)
        if first + skipped >= last:
            return
        rows, wanted = logits[skipped:], torch.as_tensor(self.ids[first + skipped + 1 : last + 1], device=logits.device)
        refuse_no_numbers(rows)
        chances = rows.float().log_softmax(-1)
        self.logprob += float(chances.gather(-1, wanted[:, None]).double().sum())
        self.greedy = self.greedy and bool((chances.argmax(-1) == wanted).all())
        if base is not None:
            self.compared += score(base[skipped:], rows, wanted)


@dataclass
class Continued:
    """A prompt and what the model adds: at most `most` tokens, fewer if `over` says so of those added."""

    prompt: Sequence[int]
    most: int
    over: Callable[[Sequence[int]], bool]
    sampler: Sampler
    added: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)

    @property
    def first(self) -> int:
        """The prompt's tokens."""
        return len(self.prompt)

    def due(self) -> Sequence[int]:
        """The prompt, then each new token."""
        if not self.read:
            return self.prompt
        ended = len(self.added) >= self.most or self.over(self.added)
        return () if ended else self.added[-1:]

    def receive(self, logits: Tensor, base: Tensor | None) -> None:
        """Pick the next token."""
        refuse_no_numbers(logits[-1:])
        self.added.append(self.sampler.pick(logits[-1]))


def refuse_no_numbers(logits: Tensor) -> None:
    """Raises RecordError for NaN."""
    if torch.isnan(logits).any():
        raise RecordError("the model's logits are not numbers (NaN); try --dtype bfloat16 or float32")


# -- The task `perplexity:FILE`: windows of a text, token by token, beside the unmodified model.


@dataclass(frozen=True)
class Perplexity:
    """A text file in windows of `window` tokens, the first `limit` of them."""

    path: Path
    texts: Prompts
    window: int
    limit: int | None

    @classmethod
    def of(cls, path: Path, window: int, limit: int | None) -> Perplexity:
        """Raises RecordError if the file cannot be read."""
        return cls(path, read_texts([path]), window, limit)

    compared = True  #: with the unmodified model, token by token

    @property
    def name(self) -> str:
        """Name in tables and files."""
        return f"{PERPLEXITY}{self.path.name}"

    @property
    def definition(self) -> list[object]:
        """All inputs besides the model that determine the answers."""
        return ["perplexity", self.texts.sha256, self.window, self.limit]

    def answers(self, session: Session) -> Answers:
        """Read every window. Raises RecordError for a text shorter than one."""
        loaded = session.subject.loaded
        work = windows(self.texts, loaded.tokenizer, room_of(loaded), self.window, self.limit)
        texts = [Given(ids.tolist(), prompt=1, scored=1) for ids in work.sequences]
        session.read(texts)
        examples = [each for number, text in enumerate(texts) for each in _examples(number, text)]
        return Answers(_measures(texts), examples)


def _examples(number: int, text: Given) -> list[Example]:
    tokens, of = len(text.ids) - 1, (str(number), sha256_of(str(list(text.ids))))
    values = {"nll": -text.logprob / tokens, "kl": text.compared.kl / tokens, "top1": _agreed(text) / tokens}
    return [Example(*of, name, value, tokens) for name, value in values.items()]


def _measures(texts: list[Given]) -> list[Measure]:
    tokens = sum(len(text.ids) - 1 for text in texts)
    nll = -sum(text.logprob for text in texts) / tokens
    kl, agreed = sum(text.compared.kl for text in texts), sum(map(_agreed, texts))
    return [
        Measure("nll", nll, False),
        Measure("perplexity", exp(nll) if nll < LARGEST_EXPONENT else inf, False),
        Measure("kl", kl / tokens, False),
        Measure("top1", agreed / tokens, True),
    ]


def _agreed(text: Given) -> int:
    """Count the agreeing tokens; all of them for the unmodified model."""
    return text.compared.agreed if text.compared.tokens else len(text.ids) - 1
