"""Every pair of policies of two kinds runs, or is refused by name, and moves no byte and no access that is not counted.

Counts are kept a second time from the event log: where every copy is, and how full every pool. `ENGINES` are all
that there are; those beside the reference engine must also agree with it in every counter and event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from typing import get_args

import pytest

from moereplay import policies
from moereplay.policies.contract import PolicyError
from moereplay.results.result import Event, Result
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.replay import ENGINES, Plan, plan, replay
from moereplay.traces.schema import Trace
from tests.kit.policy_runs import Sizes, random_trace

#: Where defaults would do nothing in so small a scenario.
SPELLED = {
    ("routing", "max_rank"): "max_rank:m=4:top_j=1",
    ("routing", "cumulative"): "cumulative:top_j=0",
    ("routing", "cache_prior"): "cache_prior:lam=.5:top_j=1",
    ("routing", "reuse_distance"): "reuse_distance:keep=1:phase=any",
    ("routing", "bounded"): "bounded:regret=1",
    ("routing", "piggyback"): "piggyback:keep=1:phase=any",
    ("routing", "prune"): "prune:keep=1",
    ("prefetch", "adaptive_depth"): "adaptive_depth:p=2",
    ("prefetch", "confident"): "confident:alpha=.1",
    ("prefetch", "side_buffer"): "side_buffer:buffers=2:fetch=2",
    ("eviction", "belady"): "belady:bypass=true",
    ("miss", "drop"): "drop:keep=1",
    ("miss", "drop_cascade"): "drop_cascade:keep=1",
    ("miss", "substitute"): "substitute:tolerance=.5",
    ("miss", "substitute_band"): "substitute_band:alpha=.9:phase=any",
    ("miss", "fiddler"): "fiddler:ratio=2:goal=max:decode=cost",
}
#: Two channels, a link that compute now and then waits for, and a CPU that slows it down.
PLATFORM = """
name = "small"
link = {bytes_per_s = 1e9, latency_ns = 2, depth = 2}
compute = {kind = "measured", dense_ns = 3, expert_ns = 2}
cpu = {kind = "measured", expert_ns = 5}
contention = {cpu = 0.5, link = 0.5}
"""
READS_THE_FUTURE = {"belady", "static", "pinned", "oracle"}
KIND_PAIRS = list(combinations(policies.NAMES, 2))
#: Every scope but the default, in which all pairs run.
OTHER_SCOPES = sorted({*get_args(ReplayConfig.model_fields["scope"].annotation)} - {ReplayConfig().scope})
STRIDE = 5  #: one pair in so many runs in the other scopes
REASONS = ("compulsory", "collisions", "capacity")
ACCESSES = ("hits", "late", *REASONS)
SIDE = -1  #: where speculative copies are, beside all pools
Copy = tuple[int, int, int]  #: layer, expert, precision


@cache
def small_trace() -> Trace:
    """Two requests of two prompt and two decoded tokens."""
    return random_trace(5, Sizes(layers=3, experts=5, k=2, tokens=4, prompt=2, requests=2, depth=2, size=8))


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("platform") / "small.toml"
    path.write_text(PLATFORM)
    return str(path)


def spelled(kind: str, name: str) -> str:
    return SPELLED.get((kind, name), name)


def pairs(one: str, other: str) -> Iterator[dict[str, str]]:
    for first, second in product(policies.NAMES[one], policies.NAMES[other]):
        yield {one: spelled(one, first), other: spelled(other, second)}


def few_pairs(one: str, other: str) -> Iterator[dict[str, str]]:
    """The pairs on diagonals, so that each policy of either kind meets every STRIDE-th of the other."""
    columns = len(policies.NAMES[other])
    for n, given in enumerate(pairs(one, other)):
        if sum(divmod(n, columns)) % STRIDE == 0:
            yield given


def is_refused(given: dict[str, str]) -> str:
    """Return the kind that reads a future changed by the routing policy, if any."""
    if given.get("routing", "standard") == "standard":
        return ""
    names = [text.split(":")[0] for text in given.values()]
    return next((name for name in names if name in READS_THE_FUTURE), "")


class Recount:
    """Where every copy is, by the event log alone."""

    def __init__(self, pools: Sequence[int], tiers: Sequence[Sequence[int]], side_slots: int) -> None:
        self._pools, self._tiers, self._slots = pools, tiers, side_slots
        self.where: dict[Copy, int] = {}  # pool, or SIDE
        self.ends: dict[Copy, int] = {}  # when its transfer ends
        self.staged: dict[Copy, int] = {}  # the same of what will never be resident
        self.bytes_in = self.bytes_out = 0
        self.seen = Counter[str]()

    def enter(self, event: Event) -> None:
        """One event, in the order of the log."""
        copy = (event.layer, event.expert, event.precision)
        self.seen[event.kind] += 1
        if event.kind == "transfer":
            self._start(copy, event)
        elif event.kind == "promote":
            assert self.where[copy] == SIDE and self.ends[copy] <= event.t0
            self._put(copy, self._pool(copy))
        elif event.kind == "evict":
            assert self.ends.pop(copy) <= event.t0  # nothing in flight leaves
            del self.where[copy]
            self.bytes_out += self._size(copy)
        elif event.kind == "expert" and copy in self.staged:
            assert self.staged.pop(copy) <= event.t0
            self.bytes_out += self._size(copy)
        elif event.kind == "hits":
            assert self.ends[copy] <= event.t0
        elif event.kind == "late":
            assert self.ends[copy] > event.t0
        elif event.kind in REASONS:
            assert copy not in self.ends

    def _start(self, copy: Copy, event: Event) -> None:
        assert copy not in self.ends and copy not in self.staged
        self.bytes_in += self._size(copy)
        if event.cause == "streamed":
            assert not self.staged  # there is one bypass buffer
            self.staged[copy] = event.t1
            return
        self.ends[copy] = event.t1
        self._put(copy, SIDE if event.cause == "prefetch" and self._slots else self._pool(copy))

    def _put(self, copy: Copy, pool: int) -> None:
        """A pool, or the copies beside all pools, must have the room."""
        self.where[copy] = pool
        there = [each for each, where in self.where.items() if where == pool]
        assert len(there) <= self._slots if pool == SIDE else sum(map(self._size, there)) <= self._pools[pool]

    def _pool(self, copy: Copy) -> int:
        return copy[0] if len(self._pools) > 1 else 0

    def _size(self, copy: Copy) -> int:
        return self._tiers[copy[2]][copy[0]]

    @property
    def held(self) -> int:
        """Bytes of what is resident, in flight or staged."""
        return sum(map(self._size, [*self.where, *self.staged]))


def recount_of(ready: Plan) -> Recount:
    prefetch = ready.chosen.prefetch
    return Recount(ready.capacity.pools, ready.layout.tiers, prefetch.policy.side_slots(prefetch.params))


def check_recount(recount: Recount, totals: Mapping[str, int]) -> None:
    """Accesses and bytes of the log are those of the counters."""
    assert totals["accesses"] == sum(recount.seen[kind] for kind in ACCESSES)
    assert totals["misses"] == sum(recount.seen[kind] for kind in REASONS)
    assert recount.bytes_in == totals["bytes_demand"] + totals["bytes_prefetch"]
    assert recount.bytes_in == recount.bytes_out + recount.held
    landed = sum(end <= totals["time_ns"] for end in recount.ends.values())
    assert totals["insertions"] == totals["evictions"] + landed


def assert_conserves(result: Result, ready: Plan) -> Counter[str]:
    """Accesses and bytes add up, event by event and in the counters; returns the kinds of event seen."""
    recount, totals = recount_of(ready), result.totals
    for event in result.events:
        recount.enter(event)
    assert totals["accesses"] == totals["hits"] + totals["late"] + totals["misses"]
    check_recount(recount, totals)
    assert totals["mass"] == totals["mass_kept"] + totals["mass_substituted"] + totals["mass_dropped"]
    return recount.seen


def configuration(machine: str, contract: str, given: dict[str, str], scope: str = "global") -> ReplayConfig:
    return configure(capacity="40%", platform=machine, contract=contract, scope=scope, **given)


@pytest.mark.long
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.longest)], ids=["one contract", "the other"])
@pytest.mark.parametrize("kinds", KIND_PAIRS, ids=" ".join)
def test_every_pair_conserves_or_is_refused_by_name(kinds: tuple[str, str], turn: int, machine: str) -> None:
    """Six experts' worth of bytes for fifteen experts; a prompt of two tokens demands up to four at once.

    Contracts take turns from pair to pair.
    """
    for n, given in enumerate(pairs(*kinds)):
        contract = ("atomic", "sequential")[(n + turn) % 2]
        config, refused = configuration(machine, contract, given), is_refused(given)
        if refused:
            changing = given["routing"].split(":")[0]
            assert_refused(config, f"{refused} reads the future, which routing {changing} changes")
            continue
        results = [replay(small_trace(), config, log=True, engine=engine) for engine in ENGINES]
        assert all(result == results[0] for result in results), given
        assert_conserves(results[0], plan(small_trace(), config))


def assert_refused(config: ReplayConfig, message: str) -> None:
    for engine in ENGINES:
        with pytest.raises(PolicyError, match=message):
            replay(small_trace(), config, engine=engine)


@pytest.mark.long
@pytest.mark.parametrize("scope", OTHER_SCOPES)
@pytest.mark.parametrize("kinds", KIND_PAIRS, ids=" ".join)
def test_pairs_conserve_in_every_other_scope_and_engines_agree(
    kinds: tuple[str, str], scope: str, machine: str
) -> None:
    """Two experts' worth of bytes for the five of a layer, half of what a prompt may demand; contracts take turns."""
    for n, given in enumerate(few_pairs(*kinds)):
        config = configuration(machine, ("atomic", "sequential")[n % 2], given, scope)
        if is_refused(given):
            continue  # whatever the scope; checked above
        results = [replay(small_trace(), config, log=True, engine=engine) for engine in ENGINES]
        assert all(result == results[0] for result in results), given
        ready = plan(small_trace(), config)
        assert (
            len(ready.capacity.pools)
            == {"per_layer": ready.layout.geometry.layers, "per_link": len(ready.machine.links)}[scope]
        )
        assert_conserves(results[0], ready)


def test_the_few_pairs_leave_no_policy_out() -> None:
    """Every policy meets the three other kinds, and none is only ever refused."""
    ran = set[str]()
    for kinds in KIND_PAIRS:
        few = list(few_pairs(*kinds))
        for kind in kinds:
            assert {given[kind] for given in few} == {spelled(kind, name) for name in policies.NAMES[kind]}
        ran |= {f"{kind} {name}" for given in few if not is_refused(given) for kind, name in given.items()}
    assert ran == {f"{kind} {spelled(kind, name)}" for kind, names in policies.NAMES.items() for name in names}


def test_there_are_as_many_pairs_as_there_should_be() -> None:
    """The refused are the future's readers under each routing that changes it, and nothing else."""
    every = [given for kinds in KIND_PAIRS for given in pairs(*kinds)]
    sizes = {kind: len(names) for kind, names in policies.NAMES.items()}
    assert len(every) == sum(sizes[one] * sizes[other] for one, other in KIND_PAIRS)
    assert sum(bool(is_refused(given)) for given in every) == len(READS_THE_FUTURE) * (sizes["routing"] - 1)


@pytest.mark.slow
def test_the_small_scenario_has_everything_that_can_happen(machine: str) -> None:
    """Otherwise its counters would agree for want of events."""
    seen = Counter[str]()
    for given in (*pairs("prefetch", "miss"), {"eviction": "belady:bypass=true"}):
        for contract in ("atomic", "sequential"):
            config = configuration(machine, contract, given)
            result = replay(small_trace(), config, log=True)
            seen += assert_conserves(result, plan(small_trace(), config))
            seen += Counter(event.cause for event in result.events if event.kind == "transfer")
    kinds = (*ACCESSES, "evict", "promote", "cpu", "drop", "cancel", "demand", "prefetch", "streamed")
    assert [kind for kind in kinds if not seen[kind]] == []


def test_the_recount_refuses_a_pool_that_overflows(machine: str) -> None:
    """The checks above would notice: without its evictions a log fills the pool beyond its capacity."""
    config = configuration(machine, "atomic", {})
    result, recount = replay(small_trace(), config, log=True), recount_of(plan(small_trace(), config))
    with pytest.raises(AssertionError):
        for event in result.events:
            if event.kind != "evict":
                recount.enter(event)
