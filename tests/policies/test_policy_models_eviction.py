"""Replays against slow models of more evictions: every access, with unequal sizes, prefetches and precisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.policies.eviction.random import DRAWS
from moereplay.policies.hooks import KINDS
from moereplay.simulator.config import configure
from moereplay.simulator.dry_run import end_states
from moereplay.simulator.replay import plan
from moereplay.traces.routers import scores as router_scores
from moereplay.traces.routers import to_units
from moereplay.traces.schema import Trace
from tests.kit.policy_catalogue import by_policy
from tests.kit.policy_models import Arc, DemandStep, best, one_token_steps, play
from tests.kit.policy_models_eviction import (
    Clock,
    Lirs,
    Pool,
    S3Fifo,
    Sieve,
    Slru,
    TinyLfu,
    facts_of,
    play_ahead,
)
from tests.kit.policy_ranks_eviction import (
    Foresight,
    LetsIn,
    Ranked,
    Shielded,
    activation,
    aged,
    decayed,
    frequency_per_age,
    is_current,
    kth_use,
    multidimensional,
    recent_score,
    staleness,
    windowed_mass,
)
from tests.kit.policy_runs import Nanoseconds, Sizes, random_trace, replayed, replayed_by_compiled
from tests.kit.search import searched

AT_ONCE = Nanoseconds(bandwidth=float("inf"))
Maker = Callable[..., Pool]


def ranked(rank: Callable[..., Any], *arguments: Any, lets_in: LetsIn | None = None, **options: Any) -> Maker:
    """A model whose residents are ordered by a number."""
    return partial(Ranked, rank=lambda m, x: rank(m, x, *arguments, **options), lets_in=lets_in)


def static(m: Ranked, x: int, leaving: int) -> bool:
    return m.place(x) < m.place(leaving)


def pinned(share: float, rest: Callable[[Ranked, int], Any]) -> Maker:
    """Pinned ones last, and for no expert; a Ranked's own ties are by timestamp."""

    def rank(m: Ranked, x: int) -> tuple[bool, float]:
        return (True, -m.place(x)) if m.is_pinned(x, share) else (False, rest(m, x))

    return partial(Ranked, rank=rank, lets_in=lambda m, x, leaving: not m.is_pinned(leaving, share))


def timestamp(m: Ranked, x: int) -> int:
    return m.by_timestamp.index(x)


def arrival(m: Ranked, x: int) -> int:
    return list(m.residents).index(x)


def uses_in_residence(m: Ranked, x: int) -> int:
    """A prefetch counts as one, and the use that proves it right is the same one."""
    return max(1, len(m.uses_here(x)))


def pays(half_life: int, margin: float, price: float) -> LetsIn:
    """Return the experts that a payback admits."""
    return lambda m, x, leaving: decayed(m, x, half_life) >= margin * (decayed(m, leaving, half_life) + price)


def guards_current(m: Ranked, x: int, leaving: int) -> bool:
    """A copy that arrives for another layer than the current one was prefetched."""
    return m.layer(x) == m.now.layer or not is_current(m, leaving)


MODELS: dict[str, Maker] = {
    "lru": ranked(timestamp),
    "mru": ranked(lambda m, x: -timestamp(m, x)),
    "fifo": ranked(arrival),
    "sieve": Sieve,
    "lfu": ranked(uses_in_residence),
    "lfu:count=history": ranked(lambda m, x: len(m.uses_of(x))),
    "farthest_layer": ranked(lambda m, x: -m.ahead(x)),
    "farthest_layer:distance=absolute": ranked(lambda m, x: -abs(m.layer(x) - m.now.layer)),
    "least_stale": ranked(staleness, "c"),
    "least_stale:order=a": ranked(staleness, "a"),
    "least_stale:order=b": ranked(staleness, "b"),
    "least_stale:order=d": ranked(staleness, "d"),
    "least_stale:current=fifo": ranked(staleness, "c", fifo=True),
    "least_stale:prefetch_evicts_current=false": ranked(staleness, "c", lets_in=guards_current),
    "score": ranked(windowed_mass, 10**9),
    "lru:touch_on_predict=true": ranked(lambda m, x: m.touched.index(x)),
    "clock": Clock,
    "clock:bits=2:touch_on_predict=true": partial(Clock, bits=2, touch=True),
    "slru": Slru,
    "slru:segments=3:protected=.7:touch_on_predict=true": partial(Slru, segments=3, protected=0.7, touch=True),
    "slru:segments=4:protected=.75:fill=lowest": partial(Slru, segments=4, protected=0.75, lowest=True),
    "slru:misses=by_id": partial(Slru, by_id=True),
    "slru:protected=0:misses=by_id": partial(Slru, protected=0, by_id=True),
    "s3fifo": S3Fifo,
    "s3fifo:small=.4:ghost=.5:threshold=1": partial(S3Fifo, small=0.4, ghost=0.5, threshold=1),
    "s3fifo:small=.3:fill=main": partial(S3Fifo, small=0.3, fill_main=True),
    "lirs": Lirs,
    "lirs:hir=.4": partial(Lirs, hir=0.4),
    "lirs:hir=1": partial(Lirs, hir=1),
    "tinylfu": TinyLfu,
    "tinylfu:window=.4:protected=.5:sample=2": partial(TinyLfu, window=0.4, protected=0.5, sample=2),
    "tinylfu:window=0:sample=3": partial(TinyLfu, window=0, sample=3),
    "lru_k": ranked(kth_use, 2),
    "lru_k:k=1:history=resident": ranked(kth_use, 1, "resident"),
    "lru_k:k=3:among=fifo": ranked(kth_use, 3, "kept", "fifo"),
    "lru_k:k=2:history=resident:among=fifo": ranked(kth_use, 2, "resident", "fifo"),
    "lfu_decay:half_life=1": ranked(decayed, 1),
    "lfu_decay:half_life=5": ranked(decayed, 5),
    "payback:half_life=5:margin=0": ranked(decayed, 5),
    "payback:half_life=5:price=0.3": ranked(decayed, 5, lets_in=pays(5, 1, 0.3)),
    "payback:half_life=2:margin=1.4:price=0": ranked(decayed, 2, lets_in=pays(2, 1.4, 0)),
    "lfru": ranked(frequency_per_age),
    "class_lru:half_life=3": ranked(aged, 3),
    "class_lru:touch_on_predict=true": ranked(aged, 128, touch=True),
    "least_high_precision": ranked(lambda m, x: len(m.in_request(x))),
    "least_high_precision:span=history": ranked(lambda m, x: len(m.uses_of(x))),
    "hobbit": ranked(multidimensional, (0.25, 0.25, 0.25, 0.25)),
    "hobbit:w_lru=.5:w_lfu=0:w_fld=1:mask=false": ranked(multidimensional, (0.5, 0, 0.25, 1), mask=False),
    "score:over=window:window=1": ranked(windowed_mass, 1),
    "score:over=window:window=5": ranked(windowed_mass, 5),
    "shielded_score:n=0": partial(Shielded, n=0),
    "shielded_score:n=4": partial(Shielded, n=4),
    "mrs": ranked(recent_score, "3/4", 2),
    "mrs:a=.5:p=1": ranked(recent_score, "1/2", 1),
    "activation_ratio": ranked(activation),
    "activation_ratio:frequency=false:mask=false": ranked(activation, frequency=False, mask=False),
    "static": partial(Ranked, rank=lambda m, x: -m.place(x), lets_in=static),
    "pinned": pinned(0.5, timestamp),
    "pinned:share=.7:rest=lfu": pinned(0.7, uses_in_residence),
    "pinned:share=.3:rest=fifo": pinned(0.3, arrival),
}


class Case(NamedTuple):
    """A trace of one-token passes whose layers' experts may differ in size, and pools for it."""

    trace: Trace
    slots: int
    scope: str

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes of every expert."""
        geometry = self.trace.geometry
        return {x: geometry.expert_bytes[x // geometry.experts] for x in range(geometry.layers * geometry.experts)}

    def pools(self, make: Maker) -> list[Pool]:
        """One pool with all experts, or one per layer with its own; all of the same capacity."""
        geometry, facts = self.trace.geometry, facts_of(self.trace)
        capacity, layers = self.slots * geometry.expert_bytes[0], range(geometry.layers)
        if self.scope == "global":
            return [make(capacity, self.sizes, facts)]
        own = [{x: size for x, size in self.sizes.items() if x // geometry.experts == layer} for layer in layers]
        return [make(capacity, sizes, facts) for sizes in own]

    def replay(self, eviction: str, contract: str, prefetch: str = "none", times: Nanoseconds = AT_ONCE) -> list[bool]:
        """Hit or miss of every access."""
        given = {"eviction": eviction, "contract": contract, "scope": self.scope, "prefetch": prefetch}
        outcome = replayed(self.trace, self.slots, times, passes="token", **given)
        return [access.hit for access in outcome.accesses]

    @property
    def with_more_room(self) -> Case:
        """For one more expert, whichever it is."""
        each = self.trace.geometry.expert_bytes
        return self._replace(slots=self.slots - (-max(each) // each[0]))


@st.composite
def cases(draw: st.DrawFn, tokens: tuple[int, int] = (9, 3)) -> Case:
    """A step's demand always fits."""
    layers, experts, k = draw(st.sampled_from([3, 2, 1])), draw(st.sampled_from([6, 4])), draw(st.integers(1, 3))
    sizes = Sizes(layers, experts, k, draw(st.sampled_from(tokens)), requests=draw(st.integers(1, 2)), depth=1)
    trace = random_trace(draw(st.integers(0, 2**32)), sizes)
    unequal = draw(st.lists(st.integers(3, 7), min_size=layers, max_size=layers) | st.just([5] * layers))
    geometry = trace.geometry.model_copy(update={"expert_bytes": tuple(unequal)})
    trace = replace(trace, header=trace.header.model_copy(update={"geometry": geometry}))
    least = -(-k * max(unequal) // unequal[0])
    return Case(trace, least + draw(st.integers(0, 4)), draw(st.sampled_from(["global", "per_layer"])))


def top_k_of(trace: Trace) -> Callable[[DemandStep], list[int]]:
    """Return the suggestions of `top_k`: the k best of the next layer by look-ahead score."""
    geometry = trace.geometry
    scores = to_units(router_scores(geometry.router, trace.read("lookahead/1"))).tolist()

    def names(step: DemandStep) -> list[int]:
        if step.layer + 1 == step.layers:
            return []
        return [(step.layer + 1) * step.experts + e for e in best(scores[step.step_pass][step.layer], geometry.k)]

    return names


times = st.builds(Nanoseconds, *[st.integers(1, 7)] * 4, st.just(1.0))


@by_policy(MODELS)
@searched(12)
@given(case=cases(), prefetch=st.booleans(), times=times)
def test_evictions_agree_with_their_models(texts: tuple[str, ...], case: Case, prefetch: bool, times: Nanoseconds):
    """Under both contracts. The link takes no time for prefetches, so that each is there before the next gate."""
    names, steps = top_k_of(case.trace) if prefetch else lambda step: [], one_token_steps(case.trace)
    ahead = case.with_more_room if prefetch else case
    for text in texts:
        expected = play_ahead(steps, ahead.pools(MODELS[text]), names)
        assert ahead.replay(text, "atomic", "top_k" if prefetch else "none") == expected, text
        assert case.replay(text, "sequential", times=times) == play(steps, case.pools(MODELS[text]), "sequential"), text


@searched(12)
@given(case=cases(), window=st.integers(0, 6), bypass=st.booleans())
def test_belady_sees_as_far_as_its_window(bypass: bool, case: Case, window: int):
    """Without one it sees everything."""
    steps = one_token_steps(case.trace)
    spans = [range(case.trace.geometry.layers)] if case.scope == "global" else [[n] for n in range(steps[0].layers)]
    streams = [[(step.step_pass, x) for step in steps if step.layer in span for x in step.demand] for span in spans]
    facts, capacity = facts_of(case.trace), case.slots * case.trace.geometry.expert_bytes[0]
    name = f"belady:window={window}:bypass={str(bypass).lower()}"
    for contract in ("atomic", "sequential"):
        pools = [Foresight(capacity, case.sizes, facts, stream=s, window=window, bypass=bypass) for s in streams]
        assert case.replay(name, contract) == play(steps, pools, contract), contract


@pytest.mark.long
@searched(300)
@given(case=cases(tokens=(60, 20)), slots=st.integers(1, 9))
def test_arc_hits_and_misses_as_its_pseudo_code(case: Case, slots: int):
    """Experts of one byte: the target is then the same float, counted in bytes or in slots."""
    trace = case.trace
    geometry = trace.geometry.model_copy(update={"expert_bytes": (1,) * trace.geometry.layers})
    case = case._replace(
        trace=replace(trace, header=trace.header.model_copy(update={"geometry": geometry})), slots=slots
    )
    steps, pools = one_token_steps(trace), [Arc(slots) for _ in range(1 if case.scope == "global" else geometry.layers)]
    assert case.replay("arc", "sequential") == play(steps, pools, "sequential")


def test_random_evictions_are_uniform_and_follow_the_seed():
    """Four of five experts stay and take turns, so each of the residents should be evicted a quarter of the time."""
    trace = random_trace(1, Sizes(layers=1, experts=5, k=1, tokens=4000))
    log = [replayed_by_compiled(trace, 4, eviction="random", seed=seed).events for seed in (0, 0, 1)]
    assert log[0] == log[1] != log[2]
    evicted, ages, here = Counter(), Counter(), list[int]()
    for event in log[0]:
        if event.kind == "evict":
            evicted[event.expert] += 1
            ages[here.index(event.expert)] += 1
            here.remove(event.expert)
        elif event.kind == "transfer":
            here.append(event.expert)
    # five experts are alike, and so are the four residents in the order of their arrival: each takes a fifth or a
    # quarter of about 800 evictions, three deviations either way
    for counts, many in ((evicted, 5), (ages, 4)):
        share = counts.total() / many
        assert sorted(counts) == list(range(many))
        assert all(abs(count - share) < 3 * (share * (1 - 1 / many)) ** 0.5 for count in counts.values())


def test_a_random_eviction_takes_as_many_draws_in_a_large_pool_as_in_a_small_one():
    """A step pins up to four residents: of 20 one in five is drawn again at most, of 200 one in fifty."""
    trace, draws = random_trace(1, Sizes(layers=1, experts=256, k=4, tokens=400, size=1)), dict[int, float]()
    for slots in (20, 200):
        ready = plan(trace, configure(capacity=f"{slots}B", eviction="random", passes="token"))
        ended = end_states(trace, ready.spec(log=False))[0]
        _, registers, _ = ended.memories[KINDS.index("eviction")]
        draws[slots] = registers[0][DRAWS] / ended.ran.counters.totals(ended.ran.end_ns)["evictions"]
    assert 1 < draws[200] < 1.05 < draws[20] < 1.3, draws
