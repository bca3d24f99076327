"""The task `perplexity:FILE`: windows of a text, token by token, compared with the unmodified model."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf
from pathlib import Path

from moereplay.tracegen.live.quality import LARGEST_EXPONENT
from moereplay.tracegen.prompts import Prompts, read_texts
from moereplay.tracegen.quality.answers import Answers, Example, Measure, sha256_of
from moereplay.tracegen.quality.named import PERPLEXITY
from moereplay.tracegen.quality.session import Session
from moereplay.tracegen.quality.texts import TeacherForced
from moereplay.tracegen.record import room_of
from moereplay.tracegen.tokens import windows


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
        """Inputs besides the model that determine the answers."""
        return ["perplexity", self.texts.sha256, self.window, self.limit]

    def answers(self, session: Session) -> Answers:
        """Read every window. Raises RecordError for a text shorter than one."""
        loaded = session.subject.loaded
        work = windows(self.texts, loaded.tokenizer, room_of(loaded), self.window, self.limit)
        texts = [TeacherForced(ids.tolist(), prompt=1, scored=1) for ids in work.sequences]
        session.read(texts)
        examples = [each for number, text in enumerate(texts) for each in _examples(number, text)]
        return Answers(_measures(texts), examples)


def _examples(number: int, text: TeacherForced) -> list[Example]:
    tokens, of = len(text.ids) - 1, (str(number), sha256_of(str(list(text.ids))))
    values = {"nll": -text.logprob / tokens, "kl": text.compared.kl / tokens, "top1": _agreed(text) / tokens}
    return [Example(*of, name, value, tokens) for name, value in values.items()]


def _measures(texts: list[TeacherForced]) -> list[Measure]:
    tokens = sum(len(text.ids) - 1 for text in texts)
    nll = -sum(text.logprob for text in texts) / tokens
    kl, agreed = sum(text.compared.kl for text in texts), sum(map(_agreed, texts))
    return [
        Measure("nll", nll, False),
        Measure("perplexity", exp(nll) if nll < LARGEST_EXPONENT else inf, False),
        Measure("kl", kl / tokens, False),
        Measure("top1", agreed / tokens, True),
    ]


def _agreed(text: TeacherForced) -> int:
    """Count the agreeing tokens; all of them for the unmodified model."""
    return text.compared.agreed if text.compared.tokens else len(text.ids) - 1
