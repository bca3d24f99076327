"""Search the lossless policy sets of a trace on a machine for the fastest, and for the memory that it needs.

The search starts from a full cache (`space.py`) and goes by rounds, the most promising sets first: sets of engines and
static placements; every eviction alone; the best of them with every prefetch and miss policy; then every eviction with
the best two of those. A budget ends it early, with the best set so far. A long trace is searched on some of its
requests, and the best sets are replayed on all of them. `studies/pages/recommend.md` has its accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from moereplay.simulator.capacity import Memory
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.replay import plan
from moereplay.sweeps.recommend.runner import THOROUGH, Budget, Pace, Runner, Runners, Tried, fastest_first
from moereplay.sweeps.recommend.space import (
    ALL_FIT,
    EMPTY,
    LAYERS,
    LOSSY,
    STATIC,
    USED,
    Space,
    can_replay,
    engines_of,
    filling,
    is_lossless,
    known_sets,
    lossy_of,
    space_of,
    start_of,
    started,
)
from moereplay.traces.schema import Geometry, Trace
from moereplay.traces.selection import LEAST, sampled, shortened

SCREENED = 1_000_000  #: accesses of the requests on which a long trace is searched
LEADING = 4  #: sets with a predictor, and lossy ones, that are replayed on all requests
NEXT_PASS = "missed"  #: a prefetch for the next pass, which one for the next layer does not bound
COSTLY = "activation_matrix"  #: a prefetch whose replay takes as long as twenty others
WORTH = 0.01  #: smaller gains do not count
SMALLEST = 12  #: steps of the search for the smallest memory
START = "start"  #: key of a candidate: initial content of the cache
#: Evictions that lead most often; they are tried first.
FIRST = ("least_stale", "lru", "shielded_score", "lfu_decay", "arc")
#: Shares of the budget at which the parts of a search end; the rest is for recall, lossy sets and the target.
ROUNDS_END, FINALS_END, CURVE_END = 0.55, 0.7, 0.9

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """A trace, a memory size, and the user's requirements."""

    trace: Trace
    memory: Memory
    base: Settings  #: settings that are given: platform, passes, contract, ...
    target_tokens_per_s: float | None = None
    min_mass_kept: float = 0.99
    pace: Pace = THOROUGH
    least: int = LEAST  #: fewest requests of a part of the trace, if it has them

    def at(self, size: int) -> dict[str, Any]:
        """Return the base settings with a cache of that many bytes."""
        return {**self.base, "capacity": f"{size}B"}

    @property
    def all_fit(self) -> bool:
        """True if the cache holds every expert."""
        return self.memory.cache_bytes >= everything(self.trace.geometry)

    def space(self) -> Space:
        """Return the search space."""
        return ALL_FIT if self.all_fit else space_of(self.trace, self.at(self.memory.cache_bytes))


@dataclass(frozen=True)
class Answer:
    """Result of a search."""

    space: Space
    replayed: int
    screened_on: int | None  #: requests on which the space was searched, None for all
    best: Tried
    second: Tried | None
    without_prefetch: Tried | None
    fetching: Tried | None  #: the best set that fetches every miss
    from_empty: Tried | None  #: the best set with a cache that begins empty
    known: Tried | None  #: the best set that an engine is known to have
    curve: tuple[Tried, ...]  #: in less and in more memory, rising: the fastest of the leading sets
    recall_that_pays: float | None  #: of a predictor, where nothing is prefetched in the best set; None if none pays
    lossy: tuple[Tried, ...]  #: that keep the required mass, fastest first
    smallest: Tried | None  #: the best set in the least memory that reaches the target
    cut: bool = False  #: whether the budget ended the search


def judged(question: Question) -> Question:
    """Return the question restricted to the requests of the figures; unchanged if these are all requests."""
    most = question.pace.judged
    return question if most is None else replace(question, trace=shortened(question.trace, most, question.least))


def everything(geometry: Geometry) -> int:
    """Return the bytes of all experts."""
    return geometry.total_bytes


def most_placed(space: Space) -> int:
    """Return an upper bound on the sets of `placed_sets`."""
    return len(known_sets()) + 2 * len(space.miss) + len(space.scope)


def most_replays(question: Question) -> int:
    """Return an upper bound on the replays of a search."""
    space, pace = question.space(), question.pace
    last = len(LOSSY) + LEADING + (SMALLEST + 1 if question.target_tokens_per_s is not None else 0)
    if space is ALL_FIT:  # one set, on some requests and on all, and from an empty cache
        return 3 + len(pace.shares) + last
    alone = len(space.scope) * len(space.eviction)
    again = len(space.scope) * pace.caches if pace.caches else alone
    rounds = most_placed(space) + alone + 3 * again + pace.kept * len(space.prefetch) * len(space.miss)
    return rounds + 2 + 4 * pace.finalists + 3 * pace.leading * (len(pace.shares) + len(pace.recalls)) + last


def search(
    question: Question,
    workers: int = 1,
    advance: Callable[[int], None] = lambda replays: None,
    budget: Budget | None = None,
) -> Answer:
    """Search until the budget ends; the answer is deterministic unless a time or an interrupt ends it.

    Raises ConfigError or PolicyError if no policy can be replayed under the base settings, or if nothing decodes, and
    TraceError if experts of a layer differ in bytes.
    """
    question.trace.geometry.refuse_uneven("recommend")
    budget = budget or Budget()
    run = _runners(question, workers, advance, budget)
    base, space, pace = question.at(question.memory.cache_bytes), question.space(), question.pace
    plan(question.trace, configure(**base))  # raises if no policy can be replayed under the base settings
    budget.share = ROUNDS_END
    found = fastest_first(_rounds(run.few, base, space, pace))
    budget.share = FINALS_END
    ranking = fastest_first(run.whole.tried(_finalists(found, pace.finalists), least=1))
    best, others = ranking[0], _kinds(ranking)[0]
    budget.share = CURVE_END
    curve = tuple(_curve(run, question, ranking))
    budget.share = 1.0
    searched = best.config.prefetch == "none" and not question.all_fit
    return Answer(
        space=space,
        screened_on=None if run.few is run.whole else run.few.trace.requests,
        best=best,
        second=others[0] if others else None,
        without_prefetch=next((each for each in ranking if each.config.prefetch == "none"), None),
        fetching=next((each for each in ranking if each.config.miss == "fetch"), None),
        from_empty=_from_empty(run.whole, best),
        known=next((each for each in ranking if is_known(question.trace, each)), None),
        curve=curve,
        recall_that_pays=_recall(run, base, _again(ranking, space, pace), best, pace) if searched else None,
        lossy=tuple(_lossy(run, question, best)),
        smallest=_smallest(run.whole, question, best),
        replayed=budget.replays,
        cut=run.cut,
    )


def is_known(trace: Trace, tried: Tried) -> bool:
    """Return whether an engine is known to have the set."""
    return bool(engines_of(tried.config, start_of(trace, tried.config), tried.model))


def _from_empty(run: Runner, best: Tried) -> Tried | None:
    config = started(run.trace, best.config, EMPTY)
    tried = run.tried([config]) if config else []
    return tried[0] if tried else None


def _runners(question: Question, workers: int, advance: Callable[[int], None], budget: Budget) -> Runners:
    whole = Runner(question.trace, workers, advance, budget=budget)
    pace = question.pace
    few = (
        shortened(question.trace, pace.screened, question.least) if pace.screened else sampled(question.trace, SCREENED)
    )
    return Runners(whole if few is question.trace else Runner(few, workers, advance, budget=budget), whole)


def _rounds(run: Runner, base: Settings, space: Space, pace: Pace) -> list[Tried]:
    if space is ALL_FIT:
        return run.tried(_valid(run.trace, base, _caches(space)), least=1)
    caches = _caches(space)
    placements = [each for each in _placements(space) if not (pace.bounded and each["prefetch"].startswith(COSTLY))]
    placed = run.tried(_valid(run.trace, base, placements), least=1)
    alone = run.tried(_valid(run.trace, base, caches), least=0 if placed else 1)
    leaders = fastest_first(alone or placed)[: pace.kept]
    ahead = [{name: each.policies[name] for name in ("scope", "eviction")} for each in leaders]
    prefetches = [each for each in space.prefetch if not (pace.bounded and each.startswith(COSTLY))]
    if pace.bounded and not _may_gain(run, base, leaders):
        prefetches = ["none", *(each for each in prefetches if each.startswith(NEXT_PASS))]
    pairs = [{"prefetch": prefetch, "miss": miss} for prefetch, miss in product(prefetches, space.miss)]
    second = ({**cache, **pair} for cache, pair in product(ahead, pairs))
    tried = [*placed, *alone, *run.tried(_valid(run.trace, base, second))]
    ranking = fastest_first(tried)
    again = _again(ranking, space, pace)
    last = run.tried(_valid(run.trace, base, ({**pair, **cache} for pair in _leading(ranking) for cache in again)))
    return list({each.config: each for each in (*tried, *last)}.values())


def placed_sets(question: Question) -> list[ReplayConfig]:
    """Return the sets of engines and static placements, and plain caches of the last used experts."""
    base, space = question.at(question.memory.cache_bytes), question.space()
    caches = [each for each in _caches(space) if each["eviction"] == "lru"]
    return _valid(question.trace, base, [*({} if space is ALL_FIT else _placements(space)), *caches])


def _leading(ranking: Sequence[Tried]) -> list[dict[str, str]]:
    """Return the fastest set, and the fastest that prefetches in another way, which may suit another eviction."""
    moving = [each for each in ranking if each.config.eviction != STATIC] or ranking
    first = moving[0]
    others = (each for each in moving if each.config.prefetch not in ("none", first.config.prefetch))
    return [each.policies for each in (first, *islice(others, 1))]


def _may_gain(run: Runner, base: Settings, leaders: Sequence[Tried]) -> bool:
    """Return whether prefetching the next layer with perfect knowledge makes any leader faster: a bound."""
    perfect = run.tried(_valid(run.trace, base, ({**each.policies, "prefetch": _oracle(1.0)} for each in leaders)))
    without = max((each.tokens_per_s for each in leaders), default=0.0)
    return any(each.tokens_per_s > (1 + WORTH) * without for each in perfect)


def _again(ranking: Sequence[Tried], space: Space, pace: Pace) -> list[dict[str, str]]:
    """Return the evictions and scopes that later rounds try: the first ones of a ranking, or all."""
    if pace.caches is None:
        return _caches(space)
    found = ({name: getattr(each.config, name) for name in ("scope", "eviction")} for each in ranking)
    moving = [each for each in found if each["eviction"] != STATIC]
    return [dict(each) for each in dict.fromkeys(tuple(each.items()) for each in moving)][: pace.caches]


def _caches(space: Space) -> list[dict[str, str]]:
    evictions = sorted(space.eviction, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    return [{"scope": scope, "eviction": name} for name, scope in product(evictions, space.scope)]


def _placements(space: Space) -> list[dict[str, str]]:
    """Return lossless sets of engines, then static placements (whole layers, much used experts) per miss policy."""
    known = [each.change | {START: each.start} for each in known_sets()]
    lossless = [each for each in known if all(is_lossless(kind, each[kind]) for kind in ("prefetch", "miss"))]
    still = {"eviction": STATIC, "prefetch": "none", "scope": "global"}
    stays = [still | {"miss": miss, START: start} for start, miss in product((LAYERS, USED), space.miss)]
    allowed = [each for each in lossless if each["scope"] in space.scope]
    return [*allowed, *(stays if "global" in space.scope else ())]


def _kinds(ranking: Sequence[Tried]) -> Sequence[list[Tried]]:
    """Return the kinds of sets to compare the fastest with: another eviction, no prefetch, every miss fetched."""
    first = ranking[0].config
    return (
        [each for each in ranking if each.config.eviction != first.eviction],
        [each for each in ranking if each.config.prefetch == "none"],
        [each for each in ranking if each.config.miss == "fetch"],
    )


def _of_engines(ranking: Sequence[Tried]) -> list[Tried]:
    """Return the sets that an engine supports, with either kind of start."""
    return [each for each in ranking if any(engines_of(each.config, start, each.model) for start in (LAYERS, USED))]


def _finalists(ranking: Sequence[Tried], count: int) -> list[ReplayConfig]:
    """Return the fastest sets, and half as many of each kind for comparison."""
    kinds = (*_kinds(ranking), _of_engines(ranking)) if ranking else ()
    parts = (ranking[:count], *(kind[: max(1, count // 2)] for kind in kinds))
    return list(dict.fromkeys(each.config for part in parts for each in part))


def _each(base: Settings, change: Settings) -> ReplayConfig:
    return configure(**{name: value for name, value in {**base, **change}.items() if name != START})


def _valid(trace: Trace, base: Settings, changes: Iterable[Settings]) -> list[ReplayConfig]:
    """Return the configurations that can be replayed: a pool of one layer may be too small for buffers."""
    configs = (_started(trace, _each(base, change), change.get(START, USED)) for change in changes)
    return list(dict.fromkeys(config for config in configs if config is not None and can_replay(trace, config)))


def _started(trace: Trace, config: ReplayConfig, start: str) -> ReplayConfig | None:
    """Return the configuration with a full cache; a short trace gives no profile to fill it by."""
    return started(trace, config, filling(trace, config.schedule) if start == USED else start)


def _rebuilt(trace: Trace, tried: Tried) -> dict[str, str]:
    """Return the chosen settings and the start of the cache, to rebuild the set in another memory."""
    return tried.policies | {START: start_of(trace, tried.config)}


def _curve(run: Runners, question: Question, ranking: Sequence[Tried]) -> list[Tried]:
    """Return the fastest of the leading sets at every size; at the memory's own size, the best set."""
    best, pace = ranking[0], question.pace
    leading = [best.config] if pace.leading == 1 else _finalists(ranking, pace.leading)
    cache = min(question.memory.cache_bytes, everything(question.trace.geometry))
    sizes = {_size(question, best, share * cache) for share in pace.shares}
    at_best = run.whole.tried([best.config])
    return [
        each
        for size in sorted(sizes)
        for each in (at_best if size == question.memory.cache_bytes else run.fastest(resized(question, leading, size)))
    ]


def resized(question: Question, sets: Iterable[ReplayConfig], size: int) -> list[ReplayConfig]:
    """Return the sets with a cache of that many bytes, refilled."""
    made = [
        started(
            question.trace,
            config.model_copy(update={"capacity": f"{size}B", "warm": ()}),
            start_of(question.trace, config),
        )
        for config in sets
    ]
    return [config for config in made if config is not None]


def _size(question: Question, best: Tried, size: float) -> int:
    """Clamp a size to between one expert per pool and all experts."""
    geometry = question.trace.geometry
    pools = geometry.layers if best.config.scope == "per_layer" else 1
    return int(min(max(size, pools * max(geometry.expert_bytes)), everything(geometry)))


def _recall(run: Runners, base: Settings, caches: Sequence[Settings], best: Tried, pace: Pace) -> float | None:
    """Return the least recall, at equal precision, at which prefetching the next layer gains; None if none does."""
    with_perfect = ({**best.policies, **cache, "prefetch": _oracle(1.0)} for cache in caches)
    leading = fastest_first(run.few.tried(_valid(run.few.trace, base, with_perfect)))[: 1 if pace.bounded else LEADING]
    for recall in pace.recalls:
        sets = [each.config.model_copy(update={"prefetch": _oracle(recall)}) for each in leading]
        if any(each.tokens_per_s > (1 + WORTH) * best.tokens_per_s for each in run.fastest(sets)):
            return recall
    return None


def _oracle(recall: float) -> str:
    return f"oracle:recall={recall}:precision={recall}"


def _lossy(run: Runners, question: Question, best: Tried) -> list[Tried]:
    base = {**question.at(question.memory.cache_bytes), **best.policies}
    start = start_of(question.trace, best.config)
    made = (started(question.trace, config, start) for config in lossy_of(question.trace, base))
    promising = fastest_first(run.few.tried(config for config in made if config is not None))
    promising = [each for each in promising if _keeps(question, each)]
    tried = fastest_first(run.whole.tried(each.config for each in promising[:LEADING]))
    kept = [each for each in tried if _keeps(question, each)]
    return [each for each in kept if each.tokens_per_s > (1 + WORTH) * best.tokens_per_s]


def _keeps(question: Question, tried: Tried) -> bool:
    return (tried.mass_share_kept or 0) >= question.min_mass_kept


def _smallest(run: Runner, question: Question, best: Tried) -> Tried | None:
    """Bisect for the smallest memory that reaches the target; None without a target, or if none reaches it."""
    if question.target_tokens_per_s is None:
        return None
    low, high = _size(question, best, 0), _size(question, best, float("inf"))
    found = _at(run, question, best, high)
    if found is None or found.tokens_per_s < question.target_tokens_per_s:
        return None
    for _ in range(SMALLEST):
        if run.cut:
            break
        middle = (low + high) // 2
        tried = _at(run, question, best, middle)
        if tried is None or tried.tokens_per_s < question.target_tokens_per_s:
            low = middle
        else:
            high, found = middle, tried
    return found


def _at(run: Runner, question: Question, best: Tried, size: int) -> Tried | None:
    """Replay the set in a cache of the given bytes; None if it is too small."""
    tried = run.tried(_valid(run.trace, question.at(size), [_rebuilt(run.trace, best)]))
    return tried[0] if tried else None


def differing(first: Tried, second: Tried) -> Sequence[str]:
    """Return the names of the settings in which two sets differ."""
    return [kind for kind, name in first.policies.items() if second.policies[kind] != name]
