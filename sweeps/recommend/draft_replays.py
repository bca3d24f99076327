"""Drafts and streams by replays: choose the number of drafts on a few sets, then compare numbers on the best sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platforms import platform
from moereplay.simulator.times import times_of
from moereplay.sweeps.recommend.decoding import Asked
from moereplay.sweeps.recommend.load import head_bytes
from moereplay.sweeps.recommend.runner import Budget, Runner, Tried, fastest_first
from moereplay.sweeps.recommend.search import (
    WORTH,
    Answer,
    Question,
    most_placed,
    most_replays,
    placed_sets,
    resized,
    search,
)
from moereplay.sweeps.recommend.settings import draft_ns
from moereplay.traces.drafts import OFF
from moereplay.traces.geometry import as_known
from moereplay.traces.schema import Trace
from moereplay.traces.selection import shortened
from moereplay.traces.texts import counted

SCREENED = 60_000  #: accesses on which numbers of drafts are first compared
LEADING = 5  #: sets that are replayed with every number, at most
NO_MEMORY = "{} streams with {} drafts leave no room for an expert: pass more memory, a shorter --context"


class Step(NamedTuple):
    """The fastest set with some drafts."""

    drafts: int
    tokens_per_pass: float  #: of a request
    tokens_per_s: float  #: of a request in decoding
    throughput_tokens_per_s: float  #: of all requests together, with their prompts
    hit_rate: float
    bytes_moved_per_token: float
    cpu_executed_per_token: float
    cache_bytes: int
    set: dict[str, str]


class Decoded(NamedTuple):
    """Numbers of drafts compared."""

    concurrency: int
    drafts: int  #: that are chosen
    accept_source: str
    steps: tuple[Step, ...]  #: by number of drafts
    alone: Step | None  #: one stream without drafts, where there are several
    gain: float | None  #: of the fastest step with drafts over that without
    pays: bool | None


def with_drafts(question: Question, of: Asked, many: int) -> Question:
    """Return the question with so many drafts: KV caches of all streams, and the memory and time of a head."""
    decoding = of.at(many)
    geometry = as_known(question.trace.geometry, question.trace.header.provenance.model)
    head = head_bytes(geometry, decoding)
    memory = question.memory._replace(kv_bytes=of.streams * question.memory.kv_bytes, head_bytes=head)
    if memory.cache_bytes < max(geometry.expert_bytes):
        raise ConfigError(NO_MEMORY.format(of.streams, many))
    base = {**question.base, "draft": decoding.drafts.text}
    named = str(base["platform"])
    if head and not platform(named).draft.ns_per_token:
        times = times_of(
            platform(named).without_tiers(), question.trace.geometry, (question.trace.geometry.expert_bytes,)
        )
        base["platform"] = f"{named}:draft.ns_per_token={draft_ns(question.trace.geometry, times, 1, 0)}"
    return replace(question, memory=memory, base=base)


def asked_of(of: Asked, trace: Trace, has_passes: bool) -> dict[str, str]:
    """Return the settings that streams stand for. Raises ConfigError, also if the trace has too few requests."""
    if of.streams == 1 and not of.concurrent:
        return {"draft": OFF}
    if has_passes:
        raise ConfigError("--concurrency N cannot be combined with --passes: it sets --passes batch:N")
    if trace.requests < of.streams:
        raise ConfigError(f"invalid --concurrency {of.streams}: the trace has {counted(trace.requests, 'request')}")
    return {"draft": OFF, "passes": f"batch:{of.streams}"}


def search_with_drafts(
    question: Question, of: Asked, workers: int, advance: Callable[[int], None], budget: Budget
) -> tuple[Question, Answer, Decoded]:
    """Choose a number of drafts, search with it, and compare numbers; `question` has none."""
    runner = partial(Runner, workers=workers, advance=advance, budget=budget)
    number = _first_choice(question, of, runner) if of.is_open else of.most
    chosen = with_drafts(question, of, number)
    answer = search(chosen, workers, advance, budget)
    steps, alone = _by_drafts(question, of, answer, runner)
    fastest = max((step.tokens_per_s for step in steps[1:]), default=None)
    gain = None if fastest is None else fastest / steps[0].tokens_per_s - 1
    found = Decoded(of.streams, number, of.accept, steps, alone, gain, None if gain is None else gain > WORTH)
    return chosen, replace(answer, replayed=budget.replays), found


def most_with_drafts(question: Question, of: Asked) -> int:
    """Return an upper bound on the replays of a search with drafts."""
    first = most_placed(question.space()) if of.is_open else 0
    return most_replays(question) + len(of.lengths) * (first + LEADING) + LEADING


def _first_choice(question: Question, of: Asked, runner: Callable[[Trace], Runner]) -> int:
    """Return the number of drafts with which sets of engines and a plain cache are fastest on a part of the trace."""
    part = replace(question, trace=shortened(question.trace, SCREENED, question.least))
    speeds = {}
    for many in of.lengths:
        tried = runner(part.trace).tried(placed_sets(with_drafts(part, of, many)), least=1)
        speeds[many] = max((each.tokens_per_s for each in tried), default=0.0)
    return next(many for many, speed in speeds.items() if speed * (1 + WORTH) >= max(speeds.values()))


def _by_drafts(
    question: Question, of: Asked, answer: Answer, runner: Callable[[Trace], Runner]
) -> tuple[tuple[Step, ...], Step | None]:
    """Return the fastest of the leading sets with each number of drafts, and with one stream without any."""
    leading = (answer.best, answer.second, answer.known, answer.without_prefetch, answer.fetching)
    sets = list(dict.fromkeys(each.config for each in leading if each))
    steps = (_step(with_drafts(question, of, many), sets, many, runner) for many in of.lengths)
    found = tuple(step for step in steps if step)
    if of.streams == 1:
        return found, None
    alone = with_drafts(replace(question, base={**question.base, "passes": "batch:1"}), of._replace(streams=1), 0)
    return found, _step(alone, sets, 0, runner)


def _step(
    question: Question, sets: Sequence[ReplayConfig], many: int, runner: Callable[[Trace], Runner]
) -> Step | None:
    """Return the fastest of the sets under the settings of the question."""
    given = ("draft", "passes", "platform")
    of = configure(**question.at(question.memory.cache_bytes))
    changed = [each.model_copy(update={name: getattr(of, name) for name in given}) for each in sets]
    tried = runner(question.trace).tried(resized(question, changed, question.memory.cache_bytes), least=1)
    return _step_of(many, fastest_first(tried)[0]) if tried else None


def _step_of(drafts: int, tried: Tried) -> Step:
    rows, totals = tried.result.per_request, tried.result.totals
    tokens, passes = (sum(row[name] for row in rows) for name in ("decode_tokens", "decode_passes"))
    return Step(
        drafts=drafts,
        tokens_per_pass=tokens / passes,
        tokens_per_s=tried.tokens_per_s,
        throughput_tokens_per_s=tokens / totals["time_ns"] * 1e9,
        hit_rate=tried.hit_rate,
        bytes_moved_per_token=(totals["bytes_demand"] + totals["bytes_prefetch"]) / tokens,
        cpu_executed_per_token=totals["cpu_executed"] / tokens,
        cache_bytes=tried.cache_bytes,
        set=tried.policies,
    )
