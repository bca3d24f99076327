"""The bound on the hits of a result, and remarks on its settings.

The bound is the most hits of any eviction without prefetch, for the same demand and bytes.
It is `FORCED` where every miss is admitted, and `RELAXED` where a miss may stay out of the cache. `curves/stream.py`
counts both from the demand. Where neither is a bound, the hits are null. Where experts of a pool differ in bytes the
most hits are bracketed (`curves/unequal.py`): the bound is the upper end, and `feasible_hits` the lower one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from moereplay.policies.contract import Policy
from moereplay.policies.grammar import at_most, note, parse
from moereplay.policies.hooks import given_by
from moereplay.results.serving import shortened
from moereplay.simulator.capacity import Listed, padded
from moereplay.simulator.config import SEMANTICS_VERSION, PolicySet, ReplayConfig, parse_reset
from moereplay.simulator.interface import RunSpec
from moereplay.simulator.platforms import platform
from moereplay.simulator.replay import Plan, plan
from moereplay.simulator.times import homes_of
from moereplay.traces.drafts import OFF
from moereplay.traces.passes import schedule, slots_of
from moereplay.traces.schema import Geometry, Trace, canonical
from moereplay.traces.texts import counted, whole
from moereplay.traces.units import GB

FORCED, RELAXED = "forced", "relaxed"
#: Remarks on a bound that is not forced.
OTHER_DEMAND = "no belady where routing changes the demand"
OTHER_PRECISIONS = "no belady where a pool holds experts at several precisions"
OTHER_TIMES = "no belady where the order of passes depends on when requests arrive"
STAYS_OUT = "belady may keep a miss out of the cache where a policy may"

#: belady_hits, accesses, compulsory; feasible_hits, null where the bound is the most hits itself.
Counted = Mapping[str, int | None]


@dataclass(frozen=True)
class Bound:
    """Everything besides the trace that the count of a bound depends on."""

    admission: str  #: FORCED, RELAXED, or "" where only the compulsory misses are a bound
    passes: str
    reset: str
    scope: str
    contract: str
    slots: tuple[int, ...]  #: experts that fit each pool; where they differ in bytes, as if all had the fewest
    warm: tuple[tuple[int, int], ...]
    pool: int = 0  #: bytes, of one pool of experts that differ in bytes
    #: Their bytes, by layer, or of every expert where those of a layer differ; empty if those of each pool are equal
    sizes: tuple[int, ...] = ()
    resident: tuple[tuple[int, int], ...] = ()  #: experts outside the pools, which always hit
    parts: tuple[Bound, ...] = ()  #: of pools that are counted alone, the other experts outside each

    def identity(self, trace: Trace) -> str:
        """Return a hash of everything that the count depends on."""
        known = {name: value for name, value in asdict(self).items() if self.sizes or name not in ("pool", "sizes")}
        known |= {"resident": self.resident} if known.pop("resident") else {}
        known |= {"parts": [part.identity(trace) for part in self.parts]} if known.pop("parts") else {}
        document = [SEMANTICS_VERSION, trace.digest, "bound", known]
        return hashlib.sha256(canonical(document)).hexdigest()[:16]


class Judged(NamedTuple):
    """A configuration's bound and, unless the bound is forced, a remark and the setting that causes it."""

    bound: Bound | None
    remark: str = ""
    setting: str = ""


def judge(trace: Trace, config: ReplayConfig) -> Judged:
    """Return the bound of a configuration. Raises ConfigError or PolicyError if it cannot be replayed."""
    ready = plan(trace, config)
    eviction, miss = ready.chosen.eviction, ready.chosen.miss
    if config.arrive:
        return Judged(None, OTHER_TIMES, shortened(config.arrivals))
    if ready.chosen.changes_routing:
        return Judged(None, OTHER_DEMAND, config.routing)
    if ready.layout.precisions > 1:
        return Judged(_bound(ready, ""), OTHER_PRECISIONS, config.miss)
    if eviction.policy.admit is not None and eviction.policy.declines(eviction.params):
        return Judged(_bound(ready, RELAXED), STAYS_OUT, config.eviction)
    if not miss.policy.fetches_all:
        return Judged(_bound(ready, RELAXED), STAYS_OUT, config.miss)
    return Judged(_bound(ready, FORCED))


def _bound(ready: Plan, admission: str) -> Bound:
    spec, held = ready.spec(log=False), ready.layout.slots or ready.layout.geometry
    sizes = bytes_of(held) if ready.layout.slots or held.bytes_by_expert else ready.layout.tiers[0]
    apart = ready.config.scope == "per_link" or (ready.config.scope == "per_layer" and held.bytes_by_expert)
    if apart and admission:
        return _by_pool(ready, admission, spec, sizes)
    return replace(_beside(ready.config, _warm(spec), admission, spec.pools, sizes), resident=ready.resident)


def bytes_of(geometry: Geometry) -> tuple[int, ...]:
    """Return the bytes of an expert by layer, or of every expert where those of a layer differ."""
    return tuple(geometry.rows.bytes.tolist()) if geometry.bytes_by_expert else geometry.expert_bytes


def _warm(spec: RunSpec) -> Listed:
    """Return what the fast tier has at the start."""
    return tuple(divmod(x, spec.layout.geometry.experts) for x in spec.start[0].tolist())


def _by_pool(ready: Plan, admission: str, spec: RunSpec, sizes: tuple[int, ...]) -> Bound:
    """Return the bound of pools that share no expert, each counted alone."""
    experts, parts = ready.layout.geometry.experts, list[Bound]()
    each_of = len(spec.pool_of) // len(sizes)  # experts with one entry of `sizes`
    how = (admission, ready.config.schedule, ready.config.reset)
    for number, pool in enumerate(spec.pools):
        others = {divmod(x, experts) for x, home in enumerate(spec.pool_of) if home != number}
        each = sorted({sizes[x // each_of] for x, home in enumerate(spec.pool_of) if home == number})
        if not each:
            continue
        warm = tuple(pair for pair in _warm(spec) if pair not in others)
        part = Bound(*how, "global", ready.config.contract, (pool // each[0],), warm)
        part = replace(part, pool=pool, sizes=sizes) if len(each) > 1 else part
        parts.append(replace(part, resident=tuple(sorted(others | set(ready.resident)))))
    return Bound(*how, ready.config.scope, ready.config.contract, (), _warm(spec), parts=tuple(parts))


def _beside(
    config: ReplayConfig, warm: Listed, admission: str, pools: tuple[int, ...], sizes: tuple[int, ...]
) -> Bound:
    """Return the bound of what residents leave of the pools."""
    how = (admission, config.schedule, config.reset, config.scope, config.contract)
    if not admission:
        return Bound(*how, (), warm)
    if len(pools) == 1 and len(set(sizes)) > 1:
        return Bound(*how, (pools[0] // min(sizes),), warm, pools[0], sizes)
    slots = tuple(pool // size for pool, size in zip(pools, sizes, strict=False))
    return Bound(*how, slots, warm)


def bound_of(trace: Trace, config: ReplayConfig) -> Bound | None:
    """Return the bound of a configuration, None if it has none. Raises ConfigError or PolicyError."""
    return judge(trace, config).bound


def bound_remarks(trace: Trace, configs: Sequence[ReplayConfig]) -> list[str]:
    """Return the remarks on these configurations' `belady_hit_rate`, each once."""
    settings: dict[str, dict[str, None]] = {}
    for _, remark, setting in (judge(trace, config) for config in configs):
        if remark:
            settings.setdefault(remark, {})[setting] = None
    return [f"{remark}: {', '.join(names)}" for remark, names in settings.items()]


def count(trace: Trace, bound: Bound) -> Counted:
    """Count hits that no eviction exceeds (null if unknown), accesses, and misses that no cache avoids.

    If experts of a pool differ in bytes, `feasible_hits` are those of an eviction that knows the future, under the
    rules of the bound: the maximum lies between the two. It is null if `belady_hits` is the maximum.
    """
    if bound.parts:
        return _sum([count(trace, part) for part in bound.parts])
    from moereplay.simulator.curves import stream  # LLVM takes a moment to import
    from moereplay.simulator.curves.stream import Cut, demands_of, without
    from moereplay.traces.demand import demand_of

    geometry = trace.geometry
    cut = Cut(geometry.layers, geometry.experts, bound.scope == "per_layer", bound.contract == "atomic")
    first_use = demand_of(trace, bound.passes).first_use
    warm = [layer * geometry.experts + expert for layer, expert in bound.warm]
    slots = bound.slots or (cut.units,) * cut.pools
    every, forced = demands_of(trace, bound.passes, bound.reset), bound.admission == FORCED
    resident = [layer * geometry.experts + expert for layer, expert in bound.resident]
    demands, place = without(every, cut, resident) if resident else (every, None)
    uses = first_use if place is None else place[first_use.clip(max=len(place) - 1)]
    hits, accesses, compulsory = stream.count(demands, cut, slots, forced, [(x, int(uses[x])) for x in warm])
    always = len(every.expert) - len(demands.expert)
    feasible = None
    if bound.sizes:
        from moereplay.simulator.curves import unequal

        found = unequal.most_hits(demands, cut, bound.sizes, bound.pool, forced, warm)
        hits, feasible = min(hits, found.at_most), found.at_least + always
    known = {"accesses": accesses + always, "compulsory": compulsory, "feasible_hits": feasible}
    return {"belady_hits": hits + always if bound.admission else None} | known


def _sum(parts: Sequence[Counted]) -> Counted:
    """Return the counts of all pools: each part has every access, those of the other pools as hits."""
    accesses = parts[0]["accesses"] or 0
    hits, reached = ([part[name] for part in parts] for name in ("belady_hits", "feasible_hits"))
    others = (len(parts) - 1) * accesses
    feasible = sum(most or 0 if found is None else found for most, found in zip(hits, reached, strict=True)) - others
    return {
        "belady_hits": sum(most or 0 for most in hits) - others,
        "accesses": accesses,
        "compulsory": sum(part["compulsory"] or 0 for part in parts),
        "feasible_hits": feasible if any(each is not None for each in reached) else None,
    }


def misses_of(counted: Counted) -> int:
    """Return the misses of the bound."""
    return (counted["accesses"] or 0) - (counted["belady_hits"] or 0)


# -- Remarks on settings: without effect on this trace, or adapted to its model

NO_PROMPTS = "no request of this trace has a prompt"
NO_PREFETCH = "nothing is prefetched"


def remarks(trace: Trace, configs: Sequence[ReplayConfig], engine: str = "") -> list[str]:
    """Return remarks on these configurations' settings and bounds, one line each; `engine` is the engine that ran."""
    own = unchecked(configs) if engine == "compiled" else []
    about = [*adapted(trace, configs), *without_effect(trace, configs), *own, *bound_remarks(trace, configs)]
    return [*about, *peaks(trace, configs)]


def peaks(trace: Trace, configs: Sequence[ReplayConfig]) -> list[str]:
    """Return a line for each capacity on a platform that states its reserve and holds it; others have a warning."""
    lines = dict[str, None]()
    for config in configs:
        if platform(config.platform).reserve_bytes is None:
            continue
        of = plan(trace, config).peak
        if of and not of.will_page:
            held = f"{of.total / GB:.4g} of {of.memory_bytes / GB:.4g} GB"
            lines[f"peak memory of {config.platform} at {config.capacity}: {held}: {of.in_words}"] = None
    return list(lines)


def unchecked(configs: Sequence[ReplayConfig]) -> list[str]:
    """Return a line that names the users' policies, which machine code runs without the reference's checks."""
    names = dict.fromkeys(name for config in configs for name in config.policy_set().own)
    if not names:
        return []
    return [
        f"{', '.join(names)}: checked over the first tokens only; --engine reference checks every call, "
        "see docs/policies.md"
    ]


def adapted(trace: Trace, configs: Sequence[ReplayConfig]) -> list[str]:
    """Return a line for each miss policy whose default bits are more than the trace stores."""
    stored, lines = trace.geometry.expert_bits, dict[str, None]()
    for text in dict.fromkeys(config.miss for config in configs):
        asked = parse("miss", text)
        if line := note(asked, at_most(asked, stored), stored):
            lines[line] = None
    return list(lines)


def without_effect(trace: Trace, configs: Sequence[ReplayConfig]) -> list[str]:
    """Return a line for each setting's value that has no effect in any of these configurations on this trace.

    A value that has an effect in one of them is left out.
    """
    found: dict[tuple[str, object], list[str]] = {}
    for config in configs:
        for name, reason in _reasons(trace, config):
            found.setdefault((name, getattr(config, name)), []).append(reason)
    return [
        f"{name} {value} has no effect: {'; '.join(dict.fromkeys(reasons))}"
        for (name, value), reasons in found.items()
        if len(reasons) == sum(getattr(config, name) == value for config in configs)
    ]


def _reasons(trace: Trace, config: ReplayConfig) -> Iterator[tuple[str, str]]:
    """Yield each setting that changes nothing in a configuration, and the reason."""
    chosen = config.policy_set()
    checks: dict[str, Callable[[], str]] = {
        "passes": lambda: _passes(trace, config.passes, config.arrive),
        "draft": lambda: _draft(trace, config),
        "reset": lambda: _reset(trace, config),
        "scope": lambda: _one_pool(trace, config),
        "slots": lambda: _slots(trace, config),
        "prefetch": lambda: _one_layer(trace) if chosen.prefetch.policy.suggest else "",
        "prefetch_at": lambda: _prefetch_at(config, chosen),
        "prefetch_admission": lambda: _admission(config, chosen),
        "lookahead": lambda: _lookahead(config, chosen),
        "seed": lambda: _seed(config, chosen),
    }
    yield from ((name, reason) for name, check in checks.items() if (reason := check()))


def _one_layer(trace: Trace) -> str:
    return "the model has one MoE layer" if trace.geometry.layers == 1 else ""


def _one_pool(trace: Trace, config: ReplayConfig) -> str:
    """Return why there is one pool although the scope divides the cache, or an empty string."""
    if config.scope == "per_link":
        return "the platform has one link" if len(platform(config.platform).links) == 1 else ""
    return _one_layer(trace) if config.scope == "per_layer" else ""


def _slots(trace: Trace, config: ReplayConfig) -> str:
    """Return why padded slots take what exact ones do, or an empty string."""
    if config.slots == "exact":
        return ""
    homes = homes_of(platform(config.platform), trace.geometry) if config.scope == "per_link" else ()
    alike = padded(trace.geometry, config.scope, homes) == trace.geometry
    return "the experts of a pool have equal bytes" if alike else ""


def _passes(trace: Trace, passes: str, arrive: bool) -> str:
    """Return why a schedule has the passes of `recorded`, or an empty string."""
    longest = int(np.max(trace.prompt_lengths, initial=0))
    if slots := slots_of(passes):
        if arrive or 0 < slots.chunk < longest:
            return ""
        if trace.requests == 1:
            return "the trace has one request"
        return "one request at a time is what `recorded` replays" if slots.many == 1 else ""
    name, _, number = passes.partition(":")
    size = whole(number) or 1
    if name in ("recorded", "token") or longest > size:
        return ""  # one token per pass is what `token` means, even if the trace has it anyway
    tokens = counted(longest, "token")
    return f"no prompt of this trace has more than {tokens}" if longest else NO_PROMPTS


def _draft(trace: Trace, config: ReplayConfig) -> str:
    """Return why no pass has a draft, or an empty string."""
    if config.draft == OFF:
        return ""
    rows = schedule(trace, config.schedule).rows
    return "" if rows is not None and rows.draft.any() else "no request decodes two tokens in a row"


def _reset(trace: Trace, config: ReplayConfig) -> str:
    """Return why no reset happens after the start, or an empty string."""
    every = parse_reset(config.reset)
    if not every:
        return ""
    if every < 0 and trace.requests == 1:
        return "the trace has one request"
    if config.arrive:
        return ""  # it depends on times
    plan = schedule(trace, config.schedule)
    if every > 0:
        last = int(plan.start[-1])
        return f"the last pass begins after {last:,} tokens" if last < every else ""
    return "" if plan.apart().any() else "every pass shares a request with the pass before"


def _prefetch_at(config: ReplayConfig, chosen: PolicySet) -> str:
    idle = config.prefetch_at == "after_demand" and chosen.prefetch.policy.suggest is None
    return NO_PREFETCH if idle else ""


def _admission(config: ReplayConfig, chosen: PolicySet) -> str:
    if config.prefetch_admission == "evict":
        return ""
    if chosen.prefetch.policy.suggest is None:
        return NO_PREFETCH
    aside = chosen.prefetch.policy.side_slots(chosen.prefetch.params)
    return "prefetches go to side buffers and never evict" if aside else ""


def _lookahead(config: ReplayConfig, chosen: PolicySet) -> str:
    """Return why a control of the look-ahead changes nothing, or an empty string."""
    prefetch = chosen.prefetch
    if config.lookahead == "recorded" or prefetch.policy.depth(prefetch.params):
        return ""
    return f"prefetch {prefetch.policy.name} reads no look-ahead"


def _seed(config: ReplayConfig, chosen: PolicySet) -> str:
    """Return why a seed changes nothing, or an empty string."""
    shuffles = config.lookahead != "recorded" and not _lookahead(config, chosen)
    drawn = config.arrivals.startswith("poisson") or config.draft != OFF
    draws = any(_draws(each.policy) for each in chosen.all)
    return "" if not config.seed or shuffles or drawn or draws else "no policy here draws"


def _draws(policy: Policy) -> bool:
    """Return True if hooks read the seed; a user policy may read it in ways that are not seen here."""
    return bool(policy.version) or any(_names_seed(hook) for _, hook in given_by(policy))


@cache
def _names_seed(function: Any) -> bool:
    """Return True if a function, or one that it calls by a global name, reads `now["seed"]`."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    called = (function.__globals__.get(name) for name in code.co_names)
    return "seed" in code.co_consts or any(_names_seed(each) for each in called if hasattr(each, "__code__"))
