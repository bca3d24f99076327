"""Whether to draft, how many, and what drafts and streams that decode together do to the cache and to the speed.

`--draft N|auto[:accept=A1/A2/...|NAME][:rejected=other|own][:head=layer|none]` and `--concurrency N`. `auto` tries each
length up to that of the list of chances, or MOST where one chance stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import Machine
from moereplay.sweeps.recommend.engines import Engine, engine
from moereplay.sweeps.recommend.hits import PLAIN, Decoding
from moereplay.sweeps.recommend.quick import WORTH, Estimate, Range, candidates, estimates, leader, likely
from moereplay.sweeps.recommend.token_time import Load
from moereplay.traces.drafts import EXPECTED, HEADS, OFF, RECORDED, Drafts, parse_drafts
from moereplay.traces.schema import TraceError, shown

AUTO = "auto"
MOST = 5  #: drafts that `auto` tries with one chance for all
MOST_STREAMS, MOST_DRAFTS = 64, 16
HEAD = {"layer": True, "none": False}
#: Heads by the beginning of the names of the models that were measured with them.
HEADS_OF = {"qwen3.6": "qwen3.6-mtp", "qwen3.8": "qwen3.8-mtp", "deepseek-v4": "deepseek-v4-nextn"}


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
        """Return whether the number of drafts is to be found."""
        return self.least < self.most or not self.most

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of drafts to compare: none, and those that are asked for."""
        return (0, *range(max(1, self.least), self.most + 1))

    @property
    def decodings(self) -> tuple[Decoding, ...]:
        """One stream without drafts, to compare with, and all numbers of drafts."""
        return (PLAIN._replace(head=self.head), *(self.at(many) for many in self.lengths))


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
    heads = [each.removeprefix("head=") for each in others if each.startswith("head=")]
    if len(heads) > 1 or any(each not in HEAD for each in heads):
        raise ConfigError(f"invalid --draft {shown(draft)!r}: expected head=layer or head=none, once")
    others = [each for each in others if not each.startswith("head=")]
    given = [each.removeprefix("accept=") for each in others if each.startswith("accept=")]
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
    most = (
        (len(chances) if len(chances) > 1 or _name(given, known) in HEADS else MOST) if first == AUTO else drafts.many
    )
    return Asked(
        streams,
        1 if first == AUTO else drafts.many,
        most,
        drafts,
        head,
        _in_words(given, known),
        concurrency is not None,
    )


def _name(given: Sequence[str], known: str) -> str:
    return given[0] if given else known


def _in_words(given: Sequence[str], known: str) -> str:
    if given:
        return f"as measured of {given[0]}" if given[0] in HEADS else "as given"
    return f"as measured of {known} (accept=)" if known else "assumed (accept=)"


# -- one load for each number of drafts


class Step(NamedTuple):
    """The best setting with some drafts."""

    load: Load
    estimate: Estimate

    @property
    def drafts(self) -> int:
        """Drafts of a stream and pass."""
        return self.load.decoding.drafts.many

    @property
    def union(self) -> float:
        """Distinct experts of a layer of a pass, at the median routing."""
        work = self.load.hits[self.at].work
        return work.union if work else self.load.geometry.k

    @property
    def at(self) -> int:
        """The routing of the median speed."""
        return self.estimate.speeds.index(self.estimate.tokens_per_s.middle)

    @property
    def misses(self) -> float:
        """Experts that fast memory lacks, of all layers of a pass."""
        return self.load.geometry.layers * self.union * (1 - self.estimate.hit.middle)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of experts that fast memory lacks, for each token that is kept."""
        size = sum(self.load.geometry.expert_bytes) / self.load.geometry.layers
        return self.misses * size / self.load.decoding.tokens

    @property
    def pass_ns(self) -> float:
        """Nanoseconds of a pass."""
        return self.estimate.parts.total * self.load.decoding.tokens

    @property
    def per_stream(self) -> float:
        """Tokens/s of a stream."""
        return self.estimate.tokens_per_s.middle / self.load.decoding.streams

    def gain(self, over: Step) -> Range:
        """Return the gain in tokens/s over another step, routing by routing."""
        gains = [mine / its - 1 for mine, its in zip(self.estimate.speeds, over.estimate.speeds, strict=True)]
        ordered = sorted(gains)
        middle = self.estimate.tokens_per_s.middle / over.estimate.tokens_per_s.middle - 1
        return Range(ordered[0], middle, ordered[-1])


class OfEngine(NamedTuple):
    """What drafts do on one engine: without any, with the best number, and whether it is known to draft."""

    engine: Engine
    none: Step
    best: Step | None  #: None if it is not known to draft, or no number of drafts fits


@dataclass(frozen=True)
class Drafted:
    """The answer about drafts and streams."""

    asked: Asked
    best: int  #: drafts that the answer has
    steps: tuple[Step, ...]  #: of the answer's engine, by drafts
    alone: Step | None  #: one stream without drafts, of the same engine; None where that is the first step
    by_engine: tuple[OfEngine, ...]
    stated: bool  #: whether the platform states what a draft takes

    @property
    def load(self) -> Load:
        """The load of the answer."""
        return next((step.load for step in self.steps if step.drafts == self.best), self.none.load)

    @property
    def none(self) -> Step:
        """The step without drafts."""
        return self.steps[0]

    @property
    def tried(self) -> Step | None:
        """The fastest step with drafts, or None."""
        return max(self.steps[1:], key=lambda step: step.estimate.tokens_per_s.middle, default=None)


def drafted(loads: Sequence[Load], of: Asked, machine: Machine, only: str = "") -> Drafted | None:
    """Compare numbers of drafts; `loads` are those of `of.decodings`. None if nothing fits without drafts."""
    alone, *others = loads
    found = {each.decoding: _by_engine(each, machine, only) for each in loads}
    leading = {each.decoding.drafts.many: _step(each, [*chain(*found[each.decoding].values())]) for each in others}
    none = leading[0]
    if none is None:
        return None
    number = _choice({many: step for many, step in leading.items() if step}) if of.is_open else of.most
    name = (leading[number] or none).estimate.setting.engine
    steps = [_step(each, found[each.decoding].get(name, [])) for each in others]
    return Drafted(
        asked=of,
        best=number,
        steps=tuple(step for step in steps if step),
        alone=_step(alone, found[alone.decoding].get(name, [])) if of.streams > 1 else None,
        by_engine=tuple(_engines(others, found)),
        stated=machine.platform.draft.ns_per_token > 0,
    )


Found = dict[str, list[Estimate]]


def _by_engine(load: Load, machine: Machine, only: str) -> Found:
    """Return the settings that fit, by the name of their engine."""
    by_name: Found = {}
    for each in estimates(load, machine, candidates(load, only)):
        by_name.setdefault(each.setting.engine, []).append(each)
    return by_name


def _step(load: Load, found: Sequence[Estimate]) -> Step | None:
    return Step(load, leader(found)) if found else None


def _choice(steps: dict[int, Step]) -> int:
    """Return the number of drafts of the fastest step; the fewest among nearly equal ones."""
    speeds = {many: likely(step.estimate) for many, step in steps.items()}
    return next(many for many, speed in speeds.items() if speed * (1 + WORTH) >= max(speeds.values()))


def _engines(loads: Sequence[Load], found: dict[Decoding, Found]) -> list[OfEngine]:
    """Return the engines by their speed without drafts, with the best number of drafts of each."""
    by_name = []
    for name, able in found[loads[0].decoding].items():
        steps = [step for each in loads[1:] if (step := _step(each, found[each.decoding].get(name, [])))]
        top = max(steps, key=lambda step: step.estimate.tokens_per_s.middle, default=None)
        by_name.append(OfEngine(engine(name), Step(loads[0], leader(able)), top))
    return sorted(by_name, key=lambda each: -each.none.estimate.tokens_per_s.middle)
