"""The fewest misses if routing may choose: below what every way of choosing misses, above what no way can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.policies.contract import PolicyError
from moereplay.simulator.bounds import RELAXED, Bound, bound_of, count, misses_of
from moereplay.simulator.config import configure
from moereplay.simulator.curves.stream import resets
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.limits.choices import Freedom, freedom
from moereplay.simulator.limits.limits import Bracket, fewest_misses
from moereplay.simulator.replay import replay
from moereplay.traces.passes import schedule
from moereplay.traces.routers import choice_scores, shares, to_units
from moereplay.traces.schema import Trace, memory_trace
from tests.kit.policy_runs import Sizes, random_trace
from tests.kit.search import searched

Expert = tuple[int, int]
State = frozenset[Expert]


def relaxed(trace: Trace, slots: int, scope: str = "global", **how: str) -> Bound:
    """Return the relaxed bound for a number of slots in each pool."""
    pools = trace.geometry.layers if scope == "per_layer" else 1
    settings: dict[str, Any] = {"passes": "token", "reset": "never", "contract": "atomic"} | how
    return Bound(RELAXED, scope=scope, slots=(slots,) * pools, warm=(), **settings)


def bracket(trace: Trace, bound: Bound, free: Freedom) -> Bracket:
    """`fewest_misses`, with what the recorded routing misses."""
    return fewest_misses(trace, bound, free, misses_of(count(trace, bound)))


# ---------------------------------------------------------------- every choice, written out


def admissible(trace: Trace, token: int, layer: int, free: Freedom) -> list[frozenset[int]]:
    """Every set of experts that the token may run, without those that contain another."""
    ids = [e for e in trace.arrays["chosen"][token, layer].tolist() if e >= 0]
    logits, geometry = trace.arrays["logits"][token, layer], trace.geometry
    if not free.mass:
        scores = choice_scores(geometry.router, logits)
        others = sorted(set(range(geometry.experts)) - set(ids), key=lambda e: (-scores[e], e))
        order = [*ids, *others][: max(free.top_m, len(ids))]
        kept = set(order[: min(free.top_j, len(ids))])
        return [frozenset(each) for each in combinations(order, len(ids)) if kept <= set(each)]
    units = to_units(shares(geometry.router, logits)).tolist()
    need = Fraction(free.mass, 1_000_000) * sum(units[e] for e in ids)
    every = range(geometry.experts)
    found = [frozenset(each) for n in range(len(ids) + 1) for each in combinations(every, n)]
    enough = [each for each in found if sum(units[e] for e in each) >= need]
    return [each for each in enough if not any(other < each for other in enough)]


def step_choices(trace: Trace, bound: Bound, free: Freedom) -> Iterator[tuple[int, bool, set[State]]]:
    """Of every step: its pool, whether the cache was cleared before its pass, and every demand that may be made."""
    plan, layers = schedule(trace, bound.passes), trace.geometry.layers
    for at, fresh in enumerate(resets(plan, bound.reset).tolist()):
        tokens = np.arange(trace.tokens)[plan.tokens(int(plan.start[at]), int(plan.stop[at]))].tolist()
        for layer in range(layers):
            sets = [admissible(trace, token, layer, free) for token in tokens]
            demands = {frozenset((layer, e) for each in one for e in each) for one in product(*sets)}
            yield layer if bound.scope == "per_layer" else 0, fresh and layer == 0, demands


def fewest(trace: Trace, bound: Bound, free: Freedom) -> int:
    """Over all choices and all ways to evict: the cheapest way to every state that the pools may be in."""
    best: dict[tuple[State, ...], int] = {tuple(frozenset() for _ in bound.slots): 0}
    for pool, fresh, demands in step_choices(trace, bound, free):
        if fresh:
            best = {tuple(frozenset() for _ in bound.slots): min(best.values())}
        after: dict[tuple[State, ...], int] = {}
        for state, misses in best.items():
            for demand in demands:
                for kept in subsets(state[pool] | demand, bound.slots[pool]):
                    held = (*state[:pool], kept, *state[pool + 1 :])
                    spent = misses + len(demand - state[pool])
                    after[held] = min(after.get(held, spent), spent)
        best = after
    return min(best.values())


def subsets(held: State, slots: int) -> Iterator[State]:
    """The largest that fit: holding less is never better."""
    yield from map(frozenset, combinations(sorted(held), min(slots, len(held))))


FREEDOMS = (Freedom(top_m=2), Freedom(top_m=3), Freedom(top_m=3, top_j=1), Freedom(mass=600_000), Freedom(mass=900_000))


@searched(60)
@given(st.integers(0, 2**32), st.sampled_from(FREEDOMS), st.data())
def test_the_fewest_misses_are_between_both_limits(seed: int, free: Freedom, data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 2))
    shape = Sizes(
        layers=layers,
        experts=5 if layers == 1 else 3,
        k=2 if layers == 1 else 1,
        tokens=data.draw(st.integers(2, 6)),
        prompt=data.draw(st.integers(0, 2)),
        requests=data.draw(st.integers(1, 2)) if layers == 1 else 1,
    )
    trace = random_trace(seed, shape)
    scope = data.draw(st.sampled_from(("global", "per_layer")))
    bound = relaxed(
        trace,
        data.draw(st.integers(1, 3)),
        scope,
        passes=data.draw(st.sampled_from(("token", "recorded", "batch:2"))),
        reset=data.draw(st.sampled_from(("never", "request", "3"))),
    )
    truth, found = fewest(trace, bound, free), bracket(trace, bound, free)
    assert found.at_least <= truth <= found.at_most
    assert truth - found.at_least <= 3  # a limit that says nothing would be a limit, too


@pytest.mark.slow
def test_most_limits_are_the_fewest_misses_themselves() -> None:
    met = reached = 0
    for seed in range(40):
        trace = random_trace(seed, Sizes(layers=1, experts=5, k=2, tokens=8))
        bound, free = relaxed(trace, 2), FREEDOMS[seed % len(FREEDOMS)]
        truth, found = fewest(trace, bound, free), bracket(trace, bound, free)
        met, reached = met + (truth == found.at_least), reached + (truth == found.at_most)
    assert met >= 30 and reached >= 25


@searched(60)
@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from(("global", "per_layer")))
def test_without_freedom_it_is_the_relaxed_bound(seed: int, slots: int, scope: str) -> None:
    trace = random_trace(seed, Sizes(layers=2, experts=6, k=2, tokens=12, prompt=2))
    bound = relaxed(trace, slots, scope, passes="recorded")
    counted = count(trace, bound)
    belady = (counted["accesses"] or 0) - (counted["belady_hits"] or 0)
    found = bracket(trace, bound, Freedom(top_m=2))
    assert found.at_most == belady and belady - 2 <= found.at_least <= belady


# ---------------------------------------------------------------- no policy that routes by the cache misses less

WITHIN = {
    "max_rank:m=3:top_j=0": Freedom(top_m=3),
    "max_rank:m=4": Freedom(top_m=4, top_j=1),
    "max_rank:m=4:top_j=0": Freedom(top_m=4),
    "cumulative:p=.9:top_j=0": Freedom(top_m=6),
    "cumulative:p=.5": Freedom(top_m=6, top_j=1),
    "bounded:regret=1:m=4": Freedom(top_m=4),
    "cache_prior:lam=.5": Freedom(top_m=6),
    "cache_prior:lam=3:top_j=0": Freedom(top_m=6),
    "reuse_distance:keep=2:phase=any": Freedom(top_m=6),
    "standard": Freedom(top_m=2),
}


@pytest.mark.long
@searched(60)
@given(st.integers(0, 2**32), st.sampled_from(sorted(WITHIN)), st.data())
def test_no_replay_without_prefetch_misses_less(seed: int, routing: str, data: st.DataObject) -> None:
    shape = Sizes(layers=2, experts=6, k=2, tokens=10, prompt=data.draw(st.integers(0, 3)), requests=2, size=1)
    trace = random_trace(seed, shape)
    how = {
        "scope": data.draw(st.sampled_from(("global", "per_layer"))),
        "passes": data.draw(st.sampled_from(("token", "recorded", "batch:2"))),
        "contract": data.draw(st.sampled_from(("atomic", "sequential"))),
        "reset": data.draw(st.sampled_from(("never", "request"))),
    }
    many = data.draw(st.integers(1, 6)) * (2 if how["scope"] == "per_layer" else 1)
    eviction = data.draw(st.sampled_from(("lru", "lfu", "least_stale", "random")))
    config = configure(capacity=f"{many}B", eviction=eviction, warm=[(0, 1)], **how)
    bound = bound_of(trace, config)
    assert bound is not None
    at_least = bracket(trace, replace(bound, admission=RELAXED), WITHIN[routing]).at_least
    result = replay(trace, config.model_copy(update={"routing": routing}), engine="reference")
    assert result.totals["misses"] >= at_least


@pytest.mark.long
def test_tokens_that_run_their_best_expert_alone_miss_no_less_than_what_keeps_as_much_mass() -> None:
    for seed in range(20):
        trace = random_trace(seed, Sizes(layers=2, experts=6, k=2, tokens=12, size=1))
        config = configure(capacity="3B", eviction="lfu")
        bound = bound_of(trace, config)
        assert bound is not None
        found = bracket(trace, replace(bound, admission=RELAXED), Freedom(mass=share_of_best(trace)))
        result = replay(trace, config.model_copy(update={"routing": "prune:keep=1"}), engine="reference")
        assert 0 < found.at_least <= result.totals["misses"]


def share_of_best(trace: Trace) -> int:
    """Return the smallest share of the gate mass that a chosen best expert has, in millionths."""
    ids = np.asarray(trace.arrays["chosen"]).astype(int)
    units = np.take_along_axis(to_units(shares(trace.geometry.router, trace.arrays["logits"])), ids, -1)
    return int((units[..., 0] * 1_000_000 // units.sum(-1)).min())


# ---------------------------------------------------------------- what is asked for


def test_the_longer_the_list_the_fewer_the_misses() -> None:
    trace = random_trace(3, Sizes(layers=2, experts=6, k=2, tokens=60, size=1))
    found = [bracket(trace, relaxed(trace, 4), Freedom(top_m=m)) for m in (2, 3, 4, 6)]
    assert [each.at_most for each in found] == sorted((each.at_most for each in found), reverse=True)
    assert all(each.at_least <= each.at_most for each in found)
    assert bracket(trace, relaxed(trace, 12), Freedom(top_m=6)) == Bracket(4, 4)  # two of each layer, for ever


def test_a_freedom_is_read_or_refused_by_its_option() -> None:
    trace = random_trace(1, Sizes(k=2, experts=6))
    assert freedom(trace, "2k", 1, None) == Freedom(4, 1)
    assert freedom(trace, "100", 0, None) == Freedom(6)
    assert freedom(trace, "", 0, 0.9) == Freedom(mass=900_000)
    for asked, said in (
        (("1", 0, None), "expected M of at least 2"),
        (("x", 0, None), "invalid --top-m 'x'"),
        (("2k", 3, None), "J of at most 2"),
        (("2k", 0, 0.5), "--top-m.*--mass"),
        (("", 0, 1.5), "--mass 1.5"),
        (("", 1, 0.5), "--top-j"),
        (("", 0, 1e-9), "--mass 1e-09"),
    ):
        with pytest.raises(ConfigError, match=said):
            freedom(trace, *asked)
    bare = memory_trace(trace.header, [replace(trace.request(0), logits=None)])
    with pytest.raises(PolicyError, match=r"--top-m.* require router logits, which this trace lacks"):
        freedom(bare, "2k", 0, None)
