"""Which policies, how much memory, how fast: a search over the lossless space of a trace on a machine.

The space is searched by rounds: every eviction alone, the best of them with every prefetch and every way with a miss,
then every eviction with the best of those. `docs/recommend.md` says how near that comes to trying everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.config import ReplayConfig, configure
from simulator.memory import Memory
from sweeps.runner import Runner, Tried, fastest_first
from sweeps.space import LOSSY, Space, lossy_of, space_of
from traces.schema import Trace

KEPT = 3  #: evictions of the first round that go on
SHARES = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)  #: of the cache, in the curve over memory
RECALLS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
WORTH = 0.01  #: a smaller gain is none
SMALLEST = 12  #: steps of the search for the smallest memory

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """What is asked."""

    trace: Trace
    memory: Memory
    base: Settings  #: settings that are given: platform, passes, contract, ...
    target_tokens_per_s: float | None = None
    min_mass_kept: float = 0.99

    def at(self, size: int) -> dict[str, Any]:
        """The given settings with a cache of that many bytes."""
        return {**self.base, "capacity": f"{size}B"}


@dataclass(frozen=True)
class Answer:
    """What was found."""

    space: Space
    replayed: int
    best: Tried
    second: Tried | None
    without_prefetch: Tried
    curve: tuple[Tried, ...]  #: the best set in less and in more memory, rising
    recall_that_pays: float | None  #: of a predictor, where nothing is prefetched in the best set; None if none pays
    lossy: tuple[Tried, ...]  #: that keep the asked mass, fastest first
    smallest: Tried | None  #: the best set in the least memory that reaches the target


def most_replays(question: Question) -> int:
    """How many replays a search takes, or a few less."""
    space = space_of(question.trace, question.at(question.memory.cache_bytes))
    rounds = 2 * len(space.eviction) + KEPT * len(space.prefetch) * len(space.miss)
    target = SMALLEST + 1 if question.target_tokens_per_s is not None else 0
    return rounds + len(SHARES) + len(RECALLS) + len(LOSSY) + target


def search(question: Question, workers: int = 1, advance: Callable[[], None] = lambda: None) -> Answer:
    """Raises ConfigError or PolicyError where the given settings cannot be replayed, or nothing decodes."""
    run = Runner(question.trace, workers, advance)
    base = question.at(question.memory.cache_bytes)
    space = space_of(question.trace, base)
    ranking = fastest_first(_rounds(run, base, space))
    best, others = ranking[0], [each for each in ranking if each.config.eviction != ranking[0].config.eviction]
    return Answer(
        space=space,
        best=best,
        second=others[0] if others else None,
        without_prefetch=next(each for each in ranking if each.config.prefetch == "none"),
        curve=tuple(_curve(run, question, best)),
        recall_that_pays=_recall(run, base, best) if best.config.prefetch == "none" else None,
        lossy=tuple(_lossy(run, question, best)),
        smallest=_smallest(run, question, best),
        replayed=len(run.known),
    )


def _rounds(run: Runner, base: Settings, space: Space) -> list[Tried]:
    alone = run.tried(_each(base, {"eviction": name}) for name in space.eviction)
    ahead = [each.config.eviction for each in fastest_first(alone)[:KEPT]]
    pairs = [{"prefetch": prefetch, "miss": miss} for prefetch in space.prefetch for miss in space.miss]
    tried = [*alone, *run.tried(_each(base, {"eviction": name, **pair}) for name in ahead for pair in pairs)]
    leading = _policies(fastest_first(tried)[0])
    last = run.tried(_each(base, {**leading, "eviction": name}) for name in space.eviction)
    return list({each.config: each for each in (*tried, *last)}.values())


def _each(base: Settings, change: Settings) -> ReplayConfig:
    return configure(**{**base, **change})


def _policies(tried: Tried) -> dict[str, str]:
    return {kind: getattr(tried.config, kind) for kind in ("eviction", "prefetch", "miss")}


def _curve(run: Runner, question: Question, best: Tried) -> list[Tried]:
    sizes = sorted({_size(question, share * question.memory.cache_bytes) for share in SHARES})
    return run.tried(_each(question.at(size), _policies(best)) for size in sizes)


def _size(question: Question, size: float) -> int:
    """Bytes between one expert of every layer's largest and all experts."""
    geometry = question.trace.geometry
    return int(min(max(size, *geometry.expert_bytes), geometry.experts * sum(geometry.expert_bytes)))


def _recall(run: Runner, base: Settings, best: Tried) -> float | None:
    """The least recall, at equal precision, at which prefetching the next layer's experts gains."""
    for recall in RECALLS:
        prefetch = f"oracle:recall={recall}:precision={recall}"
        (tried,) = run.tried([_each(base, {**_policies(best), "prefetch": prefetch})])
        if tried.tokens_per_s > (1 + WORTH) * best.tokens_per_s:
            return recall
    return None


def _lossy(run: Runner, question: Question, best: Tried) -> list[Tried]:
    base = {**question.at(question.memory.cache_bytes), **_policies(best)}
    tried = fastest_first(run.tried(lossy_of(question.trace, base)))
    kept = [each for each in tried if (each.mass_share_kept or 0) >= question.min_mass_kept]
    return [each for each in kept if each.tokens_per_s > (1 + WORTH) * best.tokens_per_s]


def _smallest(run: Runner, question: Question, best: Tried) -> Tried | None:
    """By halving between one expert and all of them; None without a target, or if all experts do not reach it."""
    if question.target_tokens_per_s is None:
        return None
    low, high = _size(question, 0), _size(question, float("inf"))
    found = _at(run, question, best, high)
    if found.tokens_per_s < question.target_tokens_per_s:
        return None
    for _ in range(SMALLEST):
        middle = (low + high) // 2
        tried = _at(run, question, best, middle)
        reached = tried.tokens_per_s >= question.target_tokens_per_s
        low, high, found = (low, middle, tried) if reached else (middle, high, found)
    return found


def _at(run: Runner, question: Question, best: Tried, size: int) -> Tried:
    (tried,) = run.tried([_each(question.at(size), _policies(best))])
    return tried


def differing(first: Tried, second: Tried) -> Sequence[str]:
    """The policies in which two differ."""
    return [kind for kind, name in _policies(first).items() if _policies(second)[kind] != name]
