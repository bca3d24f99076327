"""Whole replays under `top_k`, `score` and `side_buffer` against slow models: every access, transfer and eviction.

Both engines replay (`replayed` compares them), and their event log must be the model's, entry by entry: how each access
was classified, what left, what was dropped, cancelled or promoted, and, where the model has a clock, when. So must the
counters be.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.traces.schema import Trace
from tests.kit.policy_catalogue import by_policy
from tests.kit.policy_models import above_percentile, above_running, best, cascade_tier
from tests.kit.policy_models_replay import Cache, Entry, Namer, Rules, Step, Unhurried, steps_of
from tests.kit.policy_models_timed import Pace, Ticking
from tests.kit.policy_runs import SIZE, VERDICTS, Nanoseconds, Outcome, Sizes, random_trace, replayed
from tests.kit.search import searched

DEPTH = 2

# -- the definitions ----------------------------------------------------------------------------------------------


def top_k(factor: str, depth: int, source: str, k: int) -> Namer:
    """SpecMD §3: the ceil(f * k) best of the next gate's scores; from this layer's own for `current_gate`."""
    count = math.ceil(Fraction(factor) * k)
    return Namer(lambda token: best(token, count), depth, source == "current_gate")


def score(percentile: int, depth: int, k: int) -> Namer:
    """SpecMD §3: every expert above the percentile of the token's own scores, so about as many for every token."""
    return Namer(lambda token: above_percentile(token, percentile), depth)


def score_running(percentile: int, depth: int, k: int) -> Namer:
    """The other reading of it: above the percentile of all scores seen, whatever layer they were for."""
    history: list[int] = []
    return Namer(lambda token: above_running(history, token, percentile), depth)


def likeliest(count: int, k: int) -> Namer:
    """Eliseev & Mazur §3.3: the one or two most likely experts of the next layer."""
    return Namer(lambda token: best(token, count))


class Model(NamedTuple):
    """A policy's definition."""

    namer: Callable[..., Namer]  #: of k
    buffers: int = 0


MODELS: dict[str, Model] = {}
for factor, depth, source in (
    ("0.5", 1, "next_gate"),
    ("1", 1, "next_gate"),
    ("1", 1, "current_gate"),
    ("1.3", 2, "next_gate"),
    ("9", 1, "next_gate"),
    ("9", 2, "current_gate"),
):
    MODELS[f"top_k:factor={factor}:depth={depth}:source={source}"] = Model(partial(top_k, factor, depth, source))
for pool, namer in (("token", score), ("running", score_running)):
    for percentile, depth in ((80, 1), (40, 2)):
        MODELS[f"score:percentile={percentile}:pool={pool}:depth={depth}"] = Model(partial(namer, percentile, depth))
for buffers, fetch in ((1, 1), (1, 2), (2, 2), (2, 9), (4, 2)):
    MODELS[f"side_buffer:buffers={buffers}:fetch={fetch}"] = Model(partial(likeliest, fetch), buffers)

#: Miss policy -> precisions of copies, and which of them will do for each of so many demanded experts.
MISSES: dict[str, tuple[tuple[int, ...], Callable[[int], list[int]]]] = {
    "fetch": ((8,), lambda demanded: [0] * demanded),
    "lowest_bit:bits=8/4": ((8, 4), lambda demanded: [1] * demanded),
    "cascade:bits=8/4:below=0.5": (
        (8, 4),
        lambda demanded: [cascade_tier(n, demanded, ["0.5"]) for n in range(demanded)],
    ),
}

SCOPES, CONTRACTS, MOMENTS = ("global", "per_layer"), ("atomic", "sequential"), ("gate", "after_demand")

# -- scenarios -------------------------------------------------------------------------------------------------------


class Scenario(NamedTuple):
    """A small trace, and what it is replayed under."""

    seed: int
    sizes: Sizes
    slots: int  #: experts of a pool
    miss: str
    scope: str
    contract: str
    at: str
    admission: str

    @property
    def trace(self) -> Trace:
        return random_trace(self.seed, self.sizes)

    @property
    def bytes(self) -> list[int]:
        """Bytes of a copy by precision."""
        return [self.trace.geometry.bytes_at(bits)[0] for bits in MISSES[self.miss][0]]

    def steps(self, model: Model) -> list[Step]:
        return steps_of(self.trace, self.sizes.prompt, model.namer(k=self.sizes.k), MISSES[self.miss][1])

    def rules(self, model: Model) -> Rules:
        return Rules(
            self.slots * SIZE,
            self.bytes,
            per_layer=self.scope == "per_layer",
            buffers=model.buffers,
            sequential=self.contract == "sequential",
            after_demand=self.at == "after_demand",
            free_only=self.admission == "free_only",
        )

    def replayed(self, prefetch: str, times: Nanoseconds) -> Outcome:
        """By both engines."""
        return replayed(
            self.trace,
            self.slots,
            times,
            prefetch=prefetch,
            eviction="lru",
            miss=self.miss,
            scope=self.scope,
            contract=self.contract,
            prefetch_at=self.at,
            prefetch_admission=self.admission,
        )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Two to four layers, one or two requests; pools from one expert, less than a step's demand, to all of them."""
    layers, experts, tokens = draw(st.integers(2, 4)), draw(st.integers(2, 6)), draw(st.integers(1, 6))
    prompt, k, requests = draw(st.integers(0, min(3, tokens))), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    scope = draw(st.sampled_from(SCOPES))
    return Scenario(
        draw(st.integers(0, 2**32)),
        Sizes(layers, experts, k, tokens, prompt, requests, DEPTH),
        draw(st.integers(1, experts if scope == "per_layer" else layers * experts)),
        draw(st.sampled_from(list(MISSES))),
        scope,
        draw(st.sampled_from(CONTRACTS)),
        draw(st.sampled_from(MOMENTS)),
        draw(st.sampled_from(["evict", "evict", "free_only"])),
    )


KINDS = (*VERDICTS, "transfer", "evict", "promote", "drop", "cancel")
COUNTED = (*VERDICTS, "misses", "predicted", "predicted_demanded", "prefetch_issued", "prefetch_started",
           "prefetch_cancelled", "prefetch_dropped", "prefetch_hits", "prefetch_used", "evictions", "insertions",
           "bytes_wasted", "bytes_unused_at_end")  # fmt: skip


def log_of(outcome: Outcome) -> list[Entry]:
    """The engines' event log without compute."""
    events = [event for event in outcome.events if event.kind in KINDS]
    return [(e.t0, e.kind, e.step_pass, e.layer, e.expert, e.precision) for e in events]


def without_times(log: list[Entry]) -> list[Entry]:
    return [(0, *entry[1:]) for entry in log]


def counted(outcome: Outcome) -> dict[str, int]:
    return {name: outcome.totals[name] for name in COUNTED}


def counted_by(cache: Cache) -> dict[str, int]:
    totals = cache.counts + Counter(bytes_unused_at_end=sum(map(cache.size, cache.unused)))
    return {name: totals[name] for name in COUNTED}


def ticked(scenario: Scenario, model: Model, times: Nanoseconds) -> tuple[Cache, int]:
    """The counters of the model with a clock, and its end; a byte takes a nanosecond."""
    pace = Pace(times.dense, times.expert, [times.latency + size for size in scenario.bytes])
    replay = Ticking(scenario.rules(model), pace)
    end = replay.play(scenario.steps(model))
    return replay.cache, end


# -- the tests ----------------------------------------------------------------------------------------------------


@by_policy(MODELS)
@searched(12)
@given(scenario=scenarios())
def test_with_time_for_every_transfer_a_replay_is_its_model_without_a_clock(texts: tuple[str, ...], scenario: Scenario):
    """A layer's compute outlasts every transfer that can be queued, so nothing is late and nothing overtaken."""
    for text in texts:
        outcome = scenario.replayed(text, Nanoseconds(dense=1_000_000, expert=1_000_000))
        model = Unhurried(scenario.rules(MODELS[text]))
        model.play(scenario.steps(MODELS[text]))
        assert without_times(log_of(outcome)) == model.cache.log, text
        assert counted(outcome) == counted_by(model.cache), text
        assert outcome.totals["late"] == outcome.totals["prefetch_cancelled"] == 0, text


#: A dense part is shorter than most transfers (3 or 5 bytes at a byte per nanosecond): prefetches come late.
paces = st.builds(Nanoseconds, st.integers(1, 14), st.integers(1, 7), st.integers(0, 4), st.just(1), st.just(1.0))


@by_policy(MODELS)
@searched(12)
@given(scenario=scenarios(), times=paces)
def test_over_a_slow_link_a_replay_is_its_model_to_the_nanosecond(
    texts: tuple[str, ...], scenario: Scenario, times: Nanoseconds
):
    """Late ones, cancelled ones, a demand that waits for a prefetch on the link: all at the moments of the model."""
    for text in texts:
        outcome = scenario.replayed(text, times)
        cache, end = ticked(scenario, MODELS[text], times)
        assert log_of(outcome) == cache.log, text
        assert counted(outcome) == counted_by(cache), text
        assert outcome.totals["time_ns"] == end, text


@pytest.mark.slow
def test_the_small_scenarios_have_everything_that_can_happen():
    """Otherwise the models would agree for want of anything to disagree about; a pool of one expert is among them."""
    seen, sizes = Counter[str](), Sizes(layers=3, experts=4, k=2, tokens=5, prompt=2, requests=2, depth=DEPTH)
    settings_ = product(MODELS.values(), MISSES, SCOPES, CONTRACTS, MOMENTS)
    for n, (model, miss, scope, contract, at) in enumerate(settings_):
        scenario = Scenario(n, sizes, 1 + n % 5, miss, scope, contract, at, "evict")
        cache, _ = ticked(scenario, model, Nanoseconds(dense=4 + n % 7, expert=3, latency=2))
        seen += cache.counts + Counter(bytes_unused_at_end=len(cache.unused))
    assert [name for name in (*COUNTED, "promote", "transfer") if not seen[name]] == []
