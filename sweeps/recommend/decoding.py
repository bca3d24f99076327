"""How requests decode: streams together and drafts, as `--concurrency N` and `--draft` ask for them.

`--draft N|auto[:accept=A1/A2/...|NAME][:rejected=other|own][:head=layer|none]`. `auto` tries each length up to that of
the list of chances, or MOST where one chance stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moereplay.simulator.errors import ConfigError
from moereplay.traces.drafts import EXPECTED, HEADS, OFF, RECORDED, Drafts, parse_drafts
from moereplay.traces.schema import TraceError, shown

AUTO = "auto"
MOST = 5  #: drafts that `auto` tries with one chance for all
MOST_STREAMS, MOST_DRAFTS = 64, 16
HEAD = {"layer": True, "none": False}
#: Heads by the beginning of the names of the models that were measured with them.
HEADS_OF = {"qwen3.6": "qwen3.6-mtp", "qwen3.8": "qwen3.8-mtp", "deepseek-v4": "deepseek-v4-nextn"}


class Decoding(NamedTuple):
    """The rows of a decode pass: each of the streams has its known token and as many drafts."""

    streams: int = 1
    drafts: Drafts = Drafts(0)
    head: bool = True  #: drafts come from a further layer of the model; else they cost nothing (n-grams, look-up)

    @property
    def rows(self) -> int:
        """Rows of a full pass."""
        return self.streams * (1 + self.drafts.many)

    @property
    def drafts_by_layer(self) -> bool:
        """Whether a further layer of the model drafts."""
        return self.head and self.drafts.many > 0

    @property
    def passes(self) -> str:
        """The schedule of a replay, without its drafts."""
        return "token" if self.streams == 1 else f"batch:{self.streams}"


PLAIN = Decoding()


class Asked(NamedTuple):
    """Streams and drafts as the user wants them."""

    streams: int = 1
    least: int = 0  #: drafts
    most: int = 0
    drafts: Drafts = PLAIN.drafts  #: chances, and the routing of wrong drafts
    head: bool = True
    accept: str = ""  #: where the chances come from, in words
    concurrent: bool = False  #: whether the number of streams was given

    def at(self, many: int) -> Decoding:
        """Return how requests decode with so many drafts."""
        return Decoding(self.streams, self.drafts._replace(many=many), self.head)

    @property
    def is_open(self) -> bool:
        """Whether the number of drafts is to be found."""
        return self.least < self.most or not self.most

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of drafts to compare: none, and those that are asked for."""
        return (0, *range(max(1, self.least), self.most + 1))


def asked(concurrency: int | None, draft: str, model: str) -> Asked | None:
    """Return what the options ask for, None for one stream without drafts. Raises ConfigError."""
    streams = 1 if concurrency is None else concurrency
    if not 1 <= streams <= MOST_STREAMS:
        raise ConfigError(f"invalid --concurrency {streams}: expected a number of streams from 1 to {MOST_STREAMS}")
    if concurrency is None and draft == OFF:
        return None
    first, *others = draft.split(":")
    if first == RECORDED:
        raise ConfigError(f"invalid --draft {shown(draft)!r}: a recommendation has no record of drafts; pass N or auto")
    heads = [part.removeprefix("head=") for part in others if part.startswith("head=")]
    if len(heads) > 1 or any(head not in HEAD for head in heads):
        raise ConfigError(f"invalid --draft {shown(draft)!r}: expected head=layer or head=none, once")
    others = [part for part in others if not part.startswith("head=")]
    given = [part.removeprefix("accept=") for part in others if part.startswith("accept=")]
    known = next((name for begins, name in HEADS_OF.items() if model.lower().startswith(begins)), "")
    if not given and known:
        others.append(f"accept={known}")
    try:
        drafts = parse_drafts(":".join([str(MOST) if first == AUTO else first, *others]))
    except TraceError:
        raise ConfigError(f"invalid --draft {shown(draft)!r}: {EXPECTED}; auto in place of N tries several") from None
    if drafts.many > MOST_DRAFTS:
        raise ConfigError(f"invalid --draft {shown(draft)!r}: expected at most {MOST_DRAFTS} drafts")
    chances, head = drafts.accept, not heads or HEAD[heads[0]]
    name = given[0] if given else known
    most = (len(chances) if len(chances) > 1 or name in HEADS else MOST) if first == AUTO else drafts.many
    least = 1 if first == AUTO else drafts.many
    return Asked(streams, least, most, drafts, head, _in_words(given, known), concurrency is not None)


def _in_words(given: Sequence[str], known: str) -> str:
    if given:
        return f"as measured of {given[0]}" if given[0] in HEADS else "as given"
    return f"as measured of {known} (accept=)" if known else "assumed (accept=)"
