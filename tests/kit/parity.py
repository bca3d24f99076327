"""Compare both engines in random scenarios over all settings of a replay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from hypothesis import strategies as st

from moereplay import policies
from moereplay.policies.grammar import Chosen, parse
from moereplay.simulator.capacity import at_homes, room
from moereplay.simulator.config import FUTURE
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.times import homes_of
from moereplay.simulator.wires import LowerTier
from moereplay.traces.passes import Slots
from moereplay.traces.schema import Router
from tests.kit.cases import ListSource, Outcome, machine, replay_lists
from tests.kit.scenarios import (
    CONTRACTS,
    EVICTIONS,
    LARGEST,
    MISSES,
    PREFETCHES,
    SIDE_BUFFER,
    Scenario,
    all_prices,
    links,
    lower_tiers,
    read_by_matrix,
    scenarios,
)
from tests.kit.schedules import Guess, mixed


def with_all(kind: str, *texts: str) -> tuple[str, ...]:
    """The texts, and every policy of the catalogue at its defaults: a new one is searched from its first day."""
    return tuple(dict.fromkeys((*texts, *policies.NAMES[kind])))


EVERY_EVICTION = with_all("eviction", *EVICTIONS, "belady:bypass=ties", "least_stale:current=fifo")
EVERY_PREFETCH = with_all(
    "prefetch",
    *PREFETCHES,
    SIDE_BUFFER,
    "side_buffer:buffers=1:fetch=3",
    "top_k:factor=2:source=current_gate",
    "top_k:factor=.5:depth=2:source=current_gate",
    "score:percentile=30:pool=running:depth=2",
)


def is_silent(chosen: Chosen) -> bool:
    """Return True if it has no event hook."""
    return all(getattr(chosen.policy, f"on_{event}") is None for event in ("gate", "use", "insert", "evict", "predict"))


def is_plain_eviction(text: str) -> bool:
    """Return True if it selects victims only by key and never rejects."""
    chosen = parse("eviction", text)
    declines = chosen.policy.admit is not None and chosen.policy.declines(chosen.params)
    return is_silent(chosen) and chosen.policy.key is not None and not declines


def is_plain_prefetch(text: str) -> bool:
    """Return True if it has only `suggest`, and prefetches into the cache."""
    chosen = parse("prefetch", text)
    return is_silent(chosen) and not chosen.policy.side_slots(chosen.params)


EVERY_MISS = with_all(
    "miss",
    *MISSES,
    "drop:keep=0",
    "split:q=0",
    "cascade:bits=8/4:below=0.5",
    "cascade:bits=8/4/2/1:below=.8/.5/.2",
    "substitute:tolerance=.1",
)
EVERY_ROUTING = with_all(
    "routing",
    "standard",
    "cache_prior",
    "cache_prior:lam=1:top_j=0",
    "cache_prior:lam=0",
    *(f"cache_prior:delta={delta}" for delta in ("token_range", "ema_range", "running_mean:top_j=1")),
    "max_rank:m=3:top_j=0",
    "max_rank:m=5:top_j=0:levels=2",
    "cumulative:p=.5:top_j=0",
    "reuse_distance:keep=1:phase=any",
    "reuse_distance:predict=interval:keep=1:phase=any",
    "bounded:regret=.3:m=9",
    "bounded:regret=2:of=score",
    "keep:share=.3",
    "keep:share=.8:tokens=2",
    "piggyback:keep=1:phase=any",
    "piggyback:keep=1:also=resident:phase=any",
    "prune:keep=1",
    "swap:rank=1",
    "swap:by=next",
)
PLAIN_EVICTION = tuple(filter(is_plain_eviction, EVERY_EVICTION))
PLAIN_PREFETCH = tuple(filter(is_plain_prefetch, EVERY_PREFETCH))
PLAIN_ROUTING = tuple(text for text in EVERY_ROUTING if is_silent(parse("routing", text)))
ROUTERS = (
    Router(),
    Router(renormalise=True, scale=1.5),
    Router(family="topk_softmax"),
    Router(family="sparsemixer", jitter=0.01),
    Router(family="sparsemixer", jitter=0.3),
    Router(family="softmax_groups", groups=2, groups_kept=1, scale=16.0),
    Router(family="sigmoid_groups", renormalise=True, scale=2.5),
)


class Seen(NamedTuple):
    """Everything that a replay returns."""

    outcome: Outcome
    executed: list[list[list[int]]]


def seen(scenario: Scenario, engine: str) -> Seen:
    """One engine's replay of a scenario."""
    outcome = replay_lists(
        scenario.source, scenario.pools, machine(**scenario.times), engine=engine, **scenario.settings
    )
    return Seen(outcome, [list(map(list, step)) for step in scenario.source.executed])


@st.composite
def anything(draw: st.DrawFn, **fixed: Any) -> Scenario:
    """Any scenario under any option; `fixed` settings hold in all of them."""
    scenario = draw(scenarios())
    chosen = {
        "eviction": draw(st.sampled_from(EVERY_EVICTION)),
        "prefetch": draw(st.sampled_from(EVERY_PREFETCH)),
        "miss": draw(st.sampled_from(EVERY_MISS)),
        "routing": draw(st.sampled_from(EVERY_ROUTING)),
        "contract": draw(st.sampled_from(CONTRACTS)),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "warm": draw(_warm(scenario)),
    }
    scenario.settings.update(chosen | fixed)
    if scenario.settings["eviction"].startswith("belady"):
        scenario.settings["routing"] = "standard"
    scenario.source.geometry = scenario.source.geometry.model_copy(update={"router": draw(st.sampled_from(ROUTERS))})
    return scenario


@st.composite
def priced(draw: st.DrawFn, **fixed: Any) -> Scenario:
    """Any scenario on a machine that has all prices at once."""
    scenario = draw(anything(**fixed))
    scenario.times.update(prices=draw(all_prices()), left=draw(st.sampled_from((0.5, 0.3))))
    return scenario


@st.composite
def by_matrix(draw: st.DrawFn, **fixed: Any) -> Scenario:
    """Any scenario on links that read matrix by matrix, with some of the other prices."""
    scenario = draw(anything(**fixed))
    scenario.times.update(draw(read_by_matrix(scenario.times)))
    matrices = draw(st.sampled_from(((), (1,), (2, 1), (1, 3, 2))))
    scenario.source.geometry = scenario.source.geometry.model_copy(update={"matrices": matrices})
    return scenario


@st.composite
def uneven(draw: st.DrawFn, **fixed: Any) -> Scenario:
    """Any scenario whose experts differ in bytes within their layers, in exact or in padded slots."""
    scenario = draw(st.one_of(hybrid(**fixed, warm=()), priced(**fixed, warm=()), by_matrix(**fixed, warm=())))
    if parse("miss", scenario.settings["miss"]).policy.bits(parse("miss", scenario.settings["miss"]).params):
        scenario.settings["miss"] = "fetch"
    shape = scenario.source.geometry
    each = st.lists(st.integers(1, LARGEST), min_size=shape.experts, max_size=shape.experts)
    geometry = shape.sized(draw(each) for _ in range(shape.layers))
    scope = draw(st.sampled_from(("global", "per_layer", "per_link")))
    scenario.source.geometry = geometry
    scenario.settings.update(scope=scope, slots=draw(st.sampled_from(("exact", "padded"))), resident=())
    scenario = scenario._replace(pools=(0,) * (geometry.layers if scope == "per_layer" else 1))
    of_pools: list[list[int]] = [[] for _ in range(1 + max(_pool_of(scenario)))]
    for pool, size in zip(_pool_of(scenario), taken(scenario), strict=True):
        of_pools[pool].append(size)
    pools = tuple(max(sizes, default=0) + draw(st.integers(0, sum(sizes) // 2)) for sizes in of_pools)
    scenario = scenario._replace(pools=pools)
    scenario.settings["warm"] = draw(_warm(scenario))
    scenario.settings["resident"] = draw(_resident(scenario))
    return scenario


def taken(scenario: Scenario) -> list[int]:
    """The bytes that every expert takes of its pool: its own, or those of the pool's largest."""
    each, pool_of = scenario.source.geometry.rows.bytes.tolist(), _pool_of(scenario)
    if scenario.settings.get("slots") != "padded":
        return each
    return [max(size for size, of in zip(each, pool_of, strict=True) if of == pool) for pool in pool_of]


FEW = st.sampled_from((0, 0, 1, 5))  #: nanoseconds
MISSED = ("missed", "missed", "missed:top=1", "missed:of=any:after=2", "missed:of=dropped", "missed:per_step=1")
ON_CPU = ("cpu", "cpu:below=2", "split:q=.5", "fiddler:ratio=2:goal=max:decode=cost")


@st.composite
def hybrid(draw: st.DrawFn, **fixed: Any) -> Scenario:
    """Any scenario on a machine whose CPU reads a lower tier, with experts for good and misses for the next pass."""
    scenario = draw(anything(**fixed))
    chosen = {"prefetch": draw(st.sampled_from(MISSED)), "miss": draw(st.sampled_from(ON_CPU))}
    scenario.settings.update({name: text for name, text in chosen.items() if name not in fixed and draw(st.booleans())})
    tiers = draw(st.lists(lower_tiers(), min_size=1, max_size=3))
    tiers = [
        tier.model_copy(update={"name": f"T{n}", "eviction": draw(st.sampled_from(("lru", "lru", "fifo")))})
        for n, tier in enumerate(tiers)
    ]
    cpu = {"tier": draw(st.sampled_from(tiers)).name, "sync_ns": draw(st.sampled_from((0, 0, 3)))}
    scenario.times.update(tiers=tiers, cpu=cpu)
    scenario.settings["resident"] = draw(_resident(scenario))
    if "warm" not in fixed:
        scenario.settings["warm"] += draw(_warm_below(scenario, tiers[0]))
    return scenario


@st.composite
def by_link(draw: st.DrawFn, **fixed: Any) -> Scenario:
    """Any scenario on several links, each with a pool, homes being by layers or by shares."""
    scenario = draw(st.one_of(anything(**fixed, warm=()), hybrid(**fixed, warm=())))
    geometry, times = scenario.source.geometry, scenario.times
    more = times["more"] or draw(st.lists(links(), min_size=1, max_size=2))
    if geometry.layers > 1 and draw(st.booleans()):
        owner = [row if row <= len(more) else draw(st.integers(0, len(more))) for row in range(geometry.layers)]
        more = more[: max(owner)]  # a link has at least one layer
        dealt = draw(st.permutations([min(row, len(more)) for row in owner]))
        named = [",".join(str(at) for at, row in enumerate(dealt) if row == link) for link in range(len(more) + 1)]
        more = [
            link.model_copy(update={"share": None, "layers": each}) for link, each in zip(more, named[1:], strict=True)
        ]
        times |= {"share": None, "layers": named[0]}
    scenario.times.update(times, more=more)
    scenario.settings.update(scope="per_link", resident=())
    sizes = at_homes(homes_of(machine(**scenario.times), geometry), geometry.rows.bytes.tolist())
    pools = tuple(max(each, default=0) + draw(st.integers(0, sum(each) // 2)) for each in sizes)
    scenario = scenario._replace(pools=pools)
    scenario.settings["warm"] = draw(_warm(scenario))
    scenario.settings["resident"] = draw(_resident(scenario))
    return scenario


def _pool_of(scenario: Scenario) -> tuple[int, ...]:
    """The pool of every expert."""
    geometry, several = scenario.source.geometry, len(scenario.pools) > 1
    if scenario.settings.get("scope") == "per_link":
        return homes_of(machine(**scenario.times), geometry)
    return tuple(x // geometry.experts if several else 0 for x in range(geometry.layers * geometry.experts))


@st.composite
def _resident(draw: st.DrawFn, scenario: Scenario) -> tuple[tuple[int, int], ...]:
    """Some experts that leave room for another one, and for those that are warm."""
    geometry, warm, chosen = scenario.source.geometry, scenario.settings["warm"], list[tuple[int, int]]()
    pool_of, each = _pool_of(scenario), (taken(scenario), geometry.experts)
    for pair in draw(st.lists(st.sampled_from([divmod(x, geometry.experts) for x in range(len(pool_of))]), max_size=4)):
        if pair in (*warm, *chosen):
            continue
        try:
            left = room(scenario.pools, pool_of, *each, (*chosen, pair), fetches=True)
            room(left, pool_of, *each, warm, fetches=False)
        except ConfigError:
            continue
        chosen.append(pair)
    return tuple(chosen)


@st.composite
def drafted(draw: st.DrawFn, **fixed: Any) -> Scenario:
    """Any scenario on a machine with lower tiers, or with all prices, whose decode passes verify drafts."""
    scenario = draw(st.one_of(hybrid(**fixed), priced(**fixed)))
    guess, requests = draw(guesses(scenario)), scenario.source.requests
    passes = draw(st.sampled_from(("recorded", "token", "decode:1", "batch:2", "batch:3")))
    if not draw(st.booleans()):
        return scenario._replace(source=ListSource(scenario.source.geometry, requests, passes, guess))
    record = draw(records([(request.prompt, len(request.tokens)) for request in requests]))
    guess = guess._replace(record=record, rejected=draw(st.sampled_from(("recorded", "recorded", "own", "other"))))
    tokens = [token for request in requests for token in request.tokens]
    wrong = sum(each for each in record if each > 0) - sum(each < 0 for each in record)
    rejected = [draw(st.sampled_from(tokens)) for _ in range(wrong)]
    return scenario._replace(source=ListSource(scenario.source.geometry, requests, passes, guess, rejected=rejected))


@st.composite
def records(draw: st.DrawFn, lengths: Sequence[tuple[int, int]]) -> list[int]:
    """A record of drafts, some of which go on after the end of their request."""
    record: list[int] = []
    for prompt, tokens in lengths:
        record += [0] * prompt
        left = tokens - prompt
        while left:
            right = draw(st.integers(0, min(2, left - 1)))
            record += [right + draw(st.integers(0, 2)), *[-1] * right]
            left -= 1 + right
    return record


@st.composite
def guesses(draw: st.DrawFn, scenario: Scenario) -> Guess:
    """Some drafts, which take some nanoseconds on the scenario's machine."""
    scenario.times["prices"] = dict(scenario.times.get("prices", {})) | {"draft": {"ns_per_token": draw(FEW)}}
    return Guess(
        many=draw(st.integers(1, 4)),
        accept=draw(st.lists(st.sampled_from((0.0, 0.3, 0.7, 1.0)), min_size=1, max_size=3)),
        rejected=draw(st.sampled_from(("other", "own"))),
        seed=scenario.settings["seed"],
    )


@st.composite
def batched(draw: st.DrawFn, **fixed: Any) -> Scenario:
    """Return the same source with random passes: several requests, both phases, any order, omitted tokens."""
    scenario = draw(anything(**fixed))
    requests = scenario.source.requests
    lengths = [(request.prompt, len(request.tokens)) for request in requests]
    rows = mixed(random.Random(draw(st.integers(0, 2**32))), lengths)
    passes = draw(st.sampled_from(("batch:2", "batch:3", rows, rows)))
    return scenario._replace(source=ListSource(scenario.source.geometry, requests, passes))


@st.composite
def arriving(draw: st.DrawFn, **fixed: Any) -> Scenario:
    """Return a scenario of any machine whose requests arrive within a few nanoseconds of each other, or long after."""
    scenario = draw(st.one_of(anything(**fixed), hybrid(**fixed), priced(**fixed)))
    for kind, otherwise in (("eviction", "lru"), ("prefetch", "top_k"), ("routing", "standard")):
        if FUTURE in parse(kind, scenario.settings[kind]).needs:
            scenario.settings[kind] = otherwise
    source, slots = scenario.source, Slots(draw(st.integers(1, 3)), draw(st.sampled_from((0, 1, 2))))
    gaps = [draw(st.sampled_from((0, 1, 2, 5, 20, 60))) for _ in source.requests]
    chunk = f":chunk={slots.chunk}" if slots.chunk else ""
    scenario.settings.update(passes=f"batch:{slots.many}{chunk}", arrivals_ns=tuple(accumulate(gaps)))
    guess = draw(st.one_of(st.none(), guesses(scenario)))
    return scenario._replace(source=ListSource(source.geometry, source.requests, slots.alone, guess, arrive=True))


@st.composite
def _warm_below(draw: st.DrawFn, scenario: Scenario, tier: LowerTier) -> tuple[tuple[int, int], ...]:
    """Some more warm experts, that the first lower tier would hold alone."""
    geometry, listed = scenario.source.geometry, (*scenario.settings["warm"], *scenario.settings["resident"])
    every = [(layer, expert) for layer in range(geometry.layers) for expert in range(geometry.experts)]
    more, room = list[tuple[int, int]](), int(tier.capacity.removesuffix("B"))
    for pair in draw(st.lists(st.sampled_from(every), unique=True, max_size=6)):
        if pair not in listed and geometry.expert_bytes[pair[0]] <= room:
            room -= geometry.expert_bytes[pair[0]]
            more.append(pair)
    return tuple(more)


@st.composite
def _warm(draw: st.DrawFn, scenario: Scenario) -> tuple[tuple[int, int], ...]:
    """Some experts that fit at the stored precision; precisions below that fit all the more."""
    geometry, room, warm = scenario.source.geometry, list(scenario.pools), []
    every = [(layer, expert) for layer in range(geometry.layers) for expert in range(geometry.experts)]
    pool_of, each = _pool_of(scenario), taken(scenario)
    for layer, expert in draw(st.lists(st.sampled_from(every), unique=True, max_size=4)):
        pool = pool_of[layer * geometry.experts + expert]
        size = each[layer * geometry.experts + expert]
        if size <= room[pool]:
            room[pool] -= size
            warm.append((layer, expert))
    return tuple(warm)
