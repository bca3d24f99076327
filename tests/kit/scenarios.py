"""Random small scenarios for the laws: demand, sizes, pools, times and every policy, drawn by Hypothesis."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from hypothesis import strategies as st

from moereplay.policies.contract import UNIT
from moereplay.policies.grammar import parse
from moereplay.simulator.platform import Link, LowerTier
from moereplay.traces.schema import Geometry
from tests.kit.cases import Cell, ListSource, Outcome, Prompted, Token, at_rate, machine, replay_lists, sizes

EVICTIONS = ("lru", "fifo", "lfu", "lfu:count=history", "random", "score", "arc")
EVICTIONS += ("farthest_layer", "farthest_layer:distance=absolute", "belady")
EVICTIONS += ("least_stale", "least_stale:order=a", "least_stale:order=b:prefetch_evicts_current=false")
EVICTIONS += ("sieve", "clock:bits=2", "slru", "slru:segments=3:fill=lowest", "s3fifo:small=.3", "lru_k", "lfu_decay")
EVICTIONS += (
    "lfru",
    "class_lru:half_life=2",
    "least_high_precision",
    "hobbit",
    "score:over=window",
    "shielded_score:n=1",
)
EVICTIONS += ("mrs", "activation_ratio", "lru:touch_on_predict=true", "belady:window=2")
DECLINING = ("belady:bypass=true", "static", "pinned:share=.6")
EVICTIONS += DECLINING
PREFETCHES = ("none", "top_k", "top_k:factor=1.5:depth=2", "score:percentile=50", "score:pool=running")
PREFETCHES += ("adaptive_depth:p=2", "adaptive_depth:p=2:precision=scored", "confident:alpha=.1", "activation_matrix")
PREFETCHES += ("activation_matrix:kept=1:enqueue=all", "previous_token:depth=2", "coactivation", "frequent:depth=2")
PREFETCHES += ("oracle", "oracle:recall=.5:precision=.5:horizon=2")
SIDE_BUFFER = "side_buffer:buffers=2:fetch=2"
MISSES = (
    "fetch",
    "fetch:bits=4",
    "drop:keep=1",
    "substitute:tolerance=.5",
    "split",
    "cascade",
    "cascade:when=pressure",
    "lowest_bit",
    "hobbit:bits=8/4:t1=.3:t2=.6",
    "drop_cascade:keep=1",
    "drop_cascade:when=pressure:keep=0",
    "drop_below:of=share",
    "substitute_band:alpha=.9:phase=any",
    "substitute_band:alpha=.9:rest=balance:ratio=1",
    "cpu",
    "fiddler:ratio=2:goal=max:decode=cost",
)
ROUTINGS = ("standard", "cache_prior", "max_rank:m=4:top_j=1", "cumulative:p=.8:top_j=0", "prune:keep=1", "swap:rank=1")
ROUTINGS += ("reuse_distance:keep=1:phase=any",)
CONTRACTS = ("atomic", "sequential")
LARGEST = 7  #: bytes of an expert
EVERYTHING = 3 * 6 * LARGEST  #: bytes of the experts of the largest model
SHARES = (0.01, 0.3, 1.0, 2.0)  #: a link with the smallest beside another has no expert


class Scenario(NamedTuple):
    """Everything that a replay needs; replaying it twice must give the same."""

    source: ListSource
    pools: tuple[int, ...]
    times: dict[str, Any]
    settings: dict[str, Any]

    def replay(self) -> Outcome:
        """Replay with the event log."""
        return replay_lists(self.source, self.pools, machine(**self.times), **self.settings)


@st.composite
def scenarios(draw: st.DrawFn, **fixed: Any) -> Scenario:
    """Any scenario; `fixed` settings hold in all of them."""
    settings = draw(_settings()) | fixed
    geometry = draw(_geometries())
    return Scenario(draw(_sources(geometry, settings.pop("passes"))), draw(_pools(geometry)), draw(_times()), settings)


def _settings() -> st.SearchStrategy[dict[str, Any]]:
    free = st.fixed_dictionaries(
        {
            "eviction": st.sampled_from(EVICTIONS),
            "prefetch": st.sampled_from((*PREFETCHES, SIDE_BUFFER)),
            "miss": st.sampled_from(MISSES),
            "routing": st.sampled_from(ROUTINGS),
            "contract": st.sampled_from(CONTRACTS),
            "passes": st.sampled_from(("recorded", "token", "chunk:2", "decode:2")),
            "reset": st.sampled_from(("never", "request", "3")),
            "prefetch_at": st.sampled_from(("gate", "after_demand")),
            "prefetch_admission": st.sampled_from(("evict", "free_only")),
        }
    )
    return free.map(_allowed)


def _allowed(settings: dict[str, Any]) -> dict[str, Any]:
    """Exclude policies that read the future if routing changes it."""
    needs = parse("eviction", settings["eviction"]).needs | parse("prefetch", settings["prefetch"]).needs
    return settings | {"routing": "standard"} if "future" in needs else settings


@st.composite
def _geometries(draw: st.DrawFn) -> Geometry:
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    k = draw(st.integers(1, min(3, experts)))
    each = draw(st.lists(st.integers(1, LARGEST), min_size=layers, max_size=layers))
    return sizes(layers, experts, k, each, kv_bytes=draw(st.integers(0, 3)))


@st.composite
def _pools(draw: st.DrawFn, geometry: Geometry) -> tuple[int, ...]:
    """From one expert to about half of them, or all, global or per layer."""
    if geometry.layers > 1 and draw(st.booleans()):
        return tuple(size * draw(st.integers(1, geometry.experts)) for size in geometry.expert_bytes)
    more = st.one_of(st.integers(0, 3 * sum(geometry.expert_bytes)), st.just(EVERYTHING))
    return (max(geometry.expert_bytes) + draw(more),)


@st.composite
def _sources(draw: st.DrawFn, geometry: Geometry, passes: str) -> ListSource:
    requests = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=3))
    dice = random.Random(draw(st.integers(0, 2**32)))
    return ListSource(geometry, [_request(dice, geometry, *lengths) for lengths in requests if any(lengths)], passes)


def _request(dice: random.Random, geometry: Geometry, prompt: int, decoded: int) -> Prompted:
    rows: list[Token] = [[_cell(dice, geometry) for _ in range(geometry.layers)] for _ in range(prompt + decoded)]
    return Prompted(rows, prompt)


def _cell(dice: random.Random, geometry: Geometry) -> Cell:
    """One cell in eight is not routed; scores are coarse, so that they tie."""
    experts, k = geometry.experts, geometry.k
    ids = dice.sample(range(experts), k) if dice.random() > 0.125 else [-1] * k
    weights = sorted((dice.randrange(1, 5) * UNIT // 8 for _ in range(k)), reverse=True)
    look = [[dice.randrange(8) * UNIT // 8 for _ in range(experts)] for _ in range(2)]
    logits = [dice.randrange(-4, 5) / 2 for _ in range(experts)]
    return Cell(ids, weights if ids[0] >= 0 else [0] * k, look, logits)


def _times() -> st.SearchStrategy[dict[str, Any]]:
    few = st.integers(0, 7)
    return st.fixed_dictionaries(
        {
            "bytes_per_ns": st.sampled_from((0.5, 1.0, 3.0, float("inf"))),
            "latency_ns": few,
            "depth": st.integers(1, 3),
            "cpu_ns": few,
            "left": st.sampled_from((1.0, 0.5, 0.3)),
            "dense_ns": few,
            "expert_ns": few,
            "expert_ns_per_token": few,
            "pass_ns": few,
            "share": st.sampled_from(SHARES),
            "more": st.one_of(st.just(()), st.lists(links(), min_size=1, max_size=2)),
            "prices": st.one_of(st.just({}), _prices()),
            "tiers": st.one_of(st.just(()), st.lists(lower_tiers(), min_size=1, max_size=2)),
        }
    )


def _prices() -> st.SearchStrategy[dict[str, Any]]:
    """Prices that are more than numbers in a table, one or several."""
    return st.fixed_dictionaries({}, optional=_price())


def all_prices() -> st.SearchStrategy[dict[str, Any]]:
    """All of them at once; overlap and what replaces times as they come."""
    each = _price()
    return st.fixed_dictionaries(each, optional={name: each.pop(name) for name in ("overlap", "roofline")})


def _price() -> dict[str, st.SearchStrategy[Any]]:
    """By table; a byte of loading is half a nanosecond or one."""
    few, shares = st.integers(1, 7), st.sampled_from((0.3, 0.5, 0.9))
    link = {"start_ns": few, "first_piece": shares, "reads": st.integers(1, 2)}
    link["start_ns_per_mib"] = st.sampled_from((0.3 * (1 << 20), 1 << 20, 2.5 * (1 << 20)))
    loading = {"gate_ns": few, "ns_per_expert": few, "ns_per_mib": st.sampled_from((1 << 19, 1 << 20))}
    loading["prefetch"] = st.booleans()
    charged = st.dictionaries(st.sampled_from(("lru", "hobbit", "top_k", "fetch", "standard")), few, max_size=3)
    decisions = {"ns_per_prediction": few, "ns_per_victim": few, "by_policy": charged}
    return {
        "overlap": st.just("none"),
        "link": st.fixed_dictionaries({}, optional=link),
        "compute": st.fixed_dictionaries({"kv_bytes_per_s": st.sampled_from((0.5e9, 1e9, 3e9))}),
        "roofline": st.fixed_dictionaries(
            {name: st.sampled_from((1e9, 3e9)) for name in ("flops", "memory_bytes_per_s")}
        ),
        "contention": st.fixed_dictionaries({"compute": shares}),
        "loading": st.fixed_dictionaries({}, optional=loading).map(_with_a_price),
        "decisions": st.fixed_dictionaries({}, optional=decisions),
    }


def _with_a_price(loading: dict[str, Any]) -> dict[str, Any]:
    """Loading without a price of an expert loads no prefetch, and may not say that it does."""
    free = not {"ns_per_expert", "ns_per_mib"} & loading.keys()
    return loading | {"prefetch": False} if free else loading


@st.composite
def read_by_matrix(draw: st.DrawFn, times: dict[str, Any]) -> dict[str, Any]:
    """Times of a scenario on links that read matrix by matrix, without first pieces, reads and lower tiers."""
    prices = {table: dict(figures) if table != "overlap" else figures for table, figures in times["prices"].items()}
    others = {name: figure for name, figure in prices.get("link", {}).items() if name not in ("first_piece", "reads")}
    curves = st.sampled_from(((), ((2, 1.5e9), (5, 0.5e9)), ((1, 0.7e9), (3, 2e9), (9, 3.5e9))))
    lanes = st.sampled_from((None, 0.4e9, 1e9))
    if draw(st.booleans()):
        others["start_ns_per_mib"] = 1 << 20
    prices["link"] = others | {"by_matrix": True, "by_size": draw(curves), "lane_bytes_per_s": draw(lanes)}
    more = [
        link.model_copy(
            update={"by_matrix": True, "first_piece": 1.0, "by_size": draw(curves), "lane_bytes_per_s": draw(lanes)}
        )
        for link in times["more"]
    ]
    return times | {"prices": prices, "more": more, "tiers": ()}


def links() -> st.SearchStrategy[Link]:
    """A link after the first."""
    return st.builds(
        lambda rate, **more: at_rate(Link(bytes_per_s=1, **more), rate),
        rate=st.sampled_from((0.5e9, 1e9, 3e9, float("inf"))),
        latency_ns=st.integers(0, 7),
        depth=st.integers(1, 3),
        start_ns=st.sampled_from((0, 0, 3)),
        start_ns_per_mib=st.sampled_from((0, 0, 1 << 20)),
        first_piece=st.sampled_from((1.0, 1.0, 0.5)),
        share=st.sampled_from(SHARES),
    )


def lower_tiers() -> st.SearchStrategy[LowerTier]:
    """A tier of the largest expert or more, perhaps of all."""
    return st.builds(
        lambda rate, **more: at_rate(LowerTier(bytes_per_s=1, **more), rate),
        name=st.just("lower"),
        capacity=st.one_of(st.integers(LARGEST, 5 * LARGEST), st.just(EVERYTHING)).map("{}B".format),
        rate=st.sampled_from((0.5e9, 1e9, 3e9, float("inf"))),
        latency_ns=st.integers(0, 7),
        depth=st.integers(1, 3),
        start_ns=st.sampled_from((0, 0, 3)),
        start_ns_per_mib=st.sampled_from((0, 0, 1 << 19)),
    )
