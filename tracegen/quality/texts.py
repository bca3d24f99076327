"""Texts that are read a pass at a time: one kind is given and scored, the other is continued.

The prompt goes through the model in one pass, the rest token by token, as in a serving engine: a policy that uses
whole passes then sees the same passes. The last token does not run, because nothing after it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moereplay.tracegen.decoding import Sampler, refuse_no_numbers
from moereplay.tracegen.live.quality import Score, score


@dataclass
class TeacherForced:
    """A text whose tokens are scored, from position `scored`."""

    ids: Sequence[int]
    prompt: int  #: tokens of the first pass, at least 1 and less than all
    scored: int  #: place of the first token that is scored, at least 1
    logprob: float = 0.0  #: natural, summed over the scored tokens
    greedy: bool = True  #: whether each scored token is the likeliest
    compared: Score = field(default_factory=Score)  #: with the unmodified model, if that read the same tokens
    read: list[int] = field(default_factory=list)  #: tokens that have gone through the model

    @property
    def first(self) -> int:
        """Tokens of its first pass: the prompt's."""
        return self.prompt

    def due(self) -> Sequence[int]:
        """Return the prompt, then one token after the other."""
        at = len(self.read)
        return self.ids[: self.prompt] if not at else self.ids[at : min(at + 1, len(self.ids) - 1)]

    def receive(self, logits: Tensor, base: Tensor | None) -> None:
        """Score the tokens that follow those that were read, from the logits (n, V) after each of the n that were due.

        `base` are the unmodified model's. Raises RecordError if the model gives no numbers.
        """
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
    """A prompt and its continuation by the model: at most `most` tokens, fewer if `over` returns True."""

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
        """Return the prompt, then each new token."""
        if not self.read:
            return self.prompt
        ended = len(self.added) >= self.most or self.over(self.added)
        return () if ended else self.added[-1:]

    def receive(self, logits: Tensor, base: Tensor | None) -> None:
        """Pick the next token."""
        refuse_no_numbers(logits[-1:])
        self.added.append(self.sampler.pick(logits[-1]))


Text = TeacherForced | Continued  #: one sequence; its first pass, and no other, is its prompt
