"""Prefetch policies against slow models of their definitions: what they name, gate by gate, in real replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay import policies
from moereplay.policies.contract import ABSENT, QUEUED
from moereplay.traces.demand import union_of
from moereplay.traces.routers import scores, to_units
from moereplay.traces.schema import Trace
from tests.kit.every import every
from tests.kit.policy_catalogue import by_policy, hook_of
from tests.kit.policy_models_prefetch import (
    ActivationMatrix,
    AdaptiveDepth,
    Coactivation,
    Confident,
    Demanded,
    Frequent,
    Gate,
    Maker,
    Missed,
    Name,
    PreviousToken,
)
from tests.kit.policy_runs import Outcome, Sizes, random_trace, replayed, replayed_by_compiled, replayed_by_reference
from tests.kit.search import searched

SIZES = Sizes(layers=4, experts=6, k=2, tokens=7, prompt=3, requests=3, depth=3)
SLOTS = 9  # of 24; a prompt of three demands up to six
seeds = st.integers(0, 2**32)
MODELS: dict[str, Maker] = {f"previous_token:depth={depth}": partial(PreviousToken, depth) for depth in (1, 3)}
MODELS |= {f"coactivation:factor={factor}": partial(Coactivation, factor) for factor in ("0.5", "1", "2")}
for factor, depth in product(("1", "1.5"), (1, 3)):
    MODELS[f"frequent:factor={factor}:depth={depth}"] = partial(Frequent, factor, depth)
MODELS |= {f"adaptive_depth:p={p}": partial(AdaptiveDepth, p) for p in (1, 2, 3)}
for t1, t2 in (("0", "0.5"), ("0.5", "0.75"), ("0.25", "1")):
    MODELS[f"adaptive_depth:p=3:precision=scored:t1={t1}:t2={t2}"] = partial(AdaptiveDepth, 3, t1, t2)
MODELS |= {f"confident:alpha={alpha}": partial(Confident, alpha) for alpha in ("0", "0.5", "3")}
MODELS |= {"confident:alpha=0.25:after_miss=false": partial(Confident, "0.25", always=True)}
MODELS |= {f"oracle:horizon={horizon}": partial(Demanded, horizon) for horizon in (1, 2, 3)}
for kept, enqueue in product((1, 2), ("seen", "all")):
    text = f"activation_matrix:kept={kept}:enqueue={enqueue}"
    MODELS[text] = partial(ActivationMatrix, kept, enqueue == "all", SIZES.experts)


class Watched:
    """The suggestions of a policy at every gate of a replay, and the residents at that time."""

    def __init__(self, text: str) -> None:
        self.named: list[list[Name]] = []
        self.coming: list[dict[tuple[int, int], int]] = []
        self.here: list[dict[tuple[int, int], int]] = []
        self.arrived: list[list[tuple[int, int]]] = [[]]  #: before each call, and after the last
        self._policy = policies.load("prefetch", text.split(":")[0])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The policy, watched."""
        module = import_module(f"moereplay.policies.prefetch.{self._policy.name}")
        with pytest.MonkeyPatch.context() as patch:
            watched = {"suggest": self._suggest, "on_gate": self._on_gate, "on_insert": self._on_insert}
            patch.setattr(module, "POLICY", replace(self._policy, **watched))
            yield

    def _on_insert(self, now, experts, copies, own, y, prefetched) -> None:
        self.arrived[-1].append(divmod(y // now["precisions"], now["experts"]))
        if self._policy.on_insert:
            self._policy.on_insert(now, experts, copies, own, y, prefetched)

    def _on_gate(self, now, step, experts, copies, own) -> None:
        self.here.append(best_copies(now, copies, {ABSENT, QUEUED}))
        if self._policy.on_gate:
            self._policy.on_gate(now, step, experts, copies, own)

    def _suggest(self, now, step, experts, copies, own, out) -> int:
        self.coming.append(best_copies(now, copies, {ABSENT}))
        self.arrived.append([])
        count = hook_of(self._policy, "suggest")(now, step, experts, copies, own, out)
        copies_named = [divmod(y, now["precisions"]) for y in out[:count]]
        self.named.append([(x // now["experts"], x % now["experts"], tier) for x, tier in copies_named])
        return count


def best_copies(now, copies, but: set[int]) -> dict[tuple[int, int], int]:
    """(layer, expert) -> the most precise copy in any other state."""
    found: dict[tuple[int, int], int] = {}
    for y, copy in enumerate(copies):
        x, tier = divmod(y, now["precisions"])
        if copy["state"] not in but:
            found.setdefault(divmod(x, now["experts"]), tier)
    return found


def gates(trace: Trace, watched: Watched, precisions: int) -> Iterator[Gate]:
    """Every gate of the recorded passes, as the models see them."""
    spans = [span for request in range(trace.requests) for span in passes_of(trace, request)]
    number = 0
    for step_pass, (request, start, stop) in enumerate(spans):
        demands = [demand(trace, layer, start, stop) for layer in range(SIZES.layers)]
        for layer in range(SIZES.layers):
            yield Gate(
                step_pass,
                request,
                layer,
                SIZES.layers,
                trace.read("chosen", start, stop)[:, layer].tolist(),
                [look(trace, layer, distance, start, stop) for distance in (1, 2, 3)],
                watched.coming[number],
                watched.here[number],
                dict(enumerate(demands)),
                SIZES.k,
                precisions,
            )
            number += 1


def passes_of(trace: Trace, request: int) -> list[tuple[int, int, int]]:
    """(request, first token, last + 1): the prompt at once, then token by token."""
    first, last = (int(offset) for offset in trace.request_offsets[request : request + 2])
    begun = first + SIZES.prompt
    return [(request, first, begun), *((request, t, t + 1) for t in range(begun, last))]


def demand(trace: Trace, layer: int, start: int, stop: int) -> list[int]:
    ids, weights = (trace.read(name, start, stop)[:, layer] for name in ("chosen", "weights"))
    return list(union_of(ids.tolist(), to_units(weights).tolist()).expert)


def look(trace: Trace, layer: int, distance: int, start: int, stop: int) -> list[list[int]]:
    logits = trace.read(f"lookahead/{distance}", start, stop)[:, layer]
    return to_units(scores(trace.geometry.router, logits)).tolist()


def watch(trace: Trace, text: str, **given: str) -> tuple[Watched, Outcome]:
    watched = Watched(text)
    with watched.in_place():
        return watched, replayed_by_reference(trace, SLOTS, prefetch=text, **given)


@by_policy(MODELS)
@searched(8)
@given(seed=seeds, at=st.sampled_from(["gate", "after_demand"]), contract=st.sampled_from(["atomic", "sequential"]))
def test_prefetch_names_what_its_model_names(texts: tuple[str, ...], seed: int, at: str, contract: str):
    """Nine slots of twenty-four; what is resident, queued or in flight is read off at the moment of the call."""
    trace = random_trace(seed, SIZES)
    for text in texts:
        watched, _ = watch(trace, text, prefetch_at=at, contract=contract)
        model = MODELS[text]()
        assert watched.named == [model.names(gate) for gate in gates(trace, watched, 1)], text


@every("text", [text for text in MODELS if text.startswith("adaptive_depth")])
@searched(8)
@given(seed=seeds, miss=st.sampled_from(["lowest_bit:bits=8/4", "hobbit:bits=8/2", "cascade:bits=8/4/2"]))
def test_adaptive_depth_counts_copies_that_are_precise_enough(text: str, seed: int, miss: str):
    """Low copies fill the cache, and do not satisfy what is named at a higher precision."""
    trace = random_trace(seed, SIZES)
    watched, _ = watch(trace, text, miss=miss)
    model, precisions = MODELS[text](), 3 if "cascade" in miss else 2
    assert watched.named == [model.names(gate) for gate in gates(trace, watched, precisions)]


# -- misses of this pass for the next

OF_MISSES: dict[str, Maker] = {"missed": Missed, "missed:top=1": partial(Missed, top=1)}
OF_MISSES |= {f"missed:of={of}:after=2": partial(Missed, of, after=2) for of in ("cpu", "dropped", "any")}
OF_MISSES |= {f"missed:of=any:per_step={many}": partial(Missed, "any", per_step=many) for many in (1, 2)}
OF_MISSES |= {"missed:of=any:top=3:after=2:per_step=1": partial(Missed, "any", top=3, after=2, per_step=1)}
OF_MISSES |= {"missed:of=dropped:top=2": partial(Missed, "dropped", top=2)}
MISSING = ("cpu", "split", "drop:keep=1", "drop:keep=0", "substitute:tolerance=.5", "cpu:below=3")


def unfetched(outcome: Outcome, miss: str) -> dict[tuple[int, int], dict[int, str]]:
    """(pass, layer) -> experts that were missed and did not cross a link for it, by the event log."""
    fetched = {
        (event.step_pass, event.layer, event.expert)
        for event in outcome.events
        if event.kind == "transfer" and event.cause in ("demand", "streamed")
    }
    on_cpu = {(event.step_pass, event.layer, event.expert) for event in outcome.events if event.kind == "cpu"}
    found: dict[tuple[int, int], dict[int, str]] = {}
    for event in outcome.events:
        at = (event.step_pass, event.layer, event.expert)
        if event.kind in ("compulsory", "collisions", "capacity") and at not in fetched:
            left = "substituted" if miss.startswith("substitute") else "dropped"
            found.setdefault(at[:2], {})[event.expert] = "cpu" if at in on_cpu else left
    return found


@pytest.mark.slow
@every("seed, miss, contract", [(n, *each) for n, each in enumerate(product(MISSING, ("atomic", "sequential")))])
def test_missed_names_what_its_model_names(seed: int, miss: str, contract: str) -> None:
    """The model reads the event log; compiled, a replay is the same. Under each contract both moments take turns."""
    trace, named = random_trace(seed, SIZES), 0
    how = {"miss": miss, "prefetch_at": ("gate", "after_demand")[seed // 2 % 2], "contract": contract}
    for text, make in OF_MISSES.items():
        watched, outcome = watch(trace, text, **how)
        left, model = unfetched(outcome, miss), make()
        for gate, arrived, names in zip(gates(trace, watched, 1), watched.arrived, watched.named, strict=False):
            here = left.get((gate.step_pass, gate.layer), {})
            assert model.names(gate._replace(unfetched=here, arrived=arrived)) == names, (text, gate.step_pass)
            named += len(names)
        assert replayed_by_compiled(trace, SLOTS, prefetch=text, **how) == outcome
    assert named > 0 or (miss, contract) == ("split", "sequential")  # which sees one miss at a time, and fetches it


# -- an oracle with faults ------------------------------------------------------------------------------------------


@searched(8)
@given(seed=seeds, recall=st.sampled_from([0.25, 0.5, 0.75]), precision=st.sampled_from([0.25, 0.7, 1.0]))
def test_a_faulty_oracle_names_right_ones_in_demand_order_then_wrong_ones(seed: int, recall: float, precision: float):
    """Seen again from the layer before, a layer's prediction is the same; wrong ones are as many as precision asks."""
    trace = random_trace(seed, SIZES)
    watched, _ = watch(trace, f"oracle:recall={recall}:precision={precision}:horizon=2")
    before: list[Name] = []
    for gate, names in zip(gates(trace, watched, 1), watched.named, strict=True):
        next_layer, farther = ([name for name in names if name[0] == gate.layer + d] for d in (1, 2))
        assert next_layer == before or gate.layer == 0
        before = farther
        right = [e for _, e, _ in next_layer if e in gate.later.get(gate.layer + 1, ())]
        assert right == [e for e in gate.later.get(gate.layer + 1, ()) if e in right]
        assert [e for _, e, _ in next_layer][: len(right)] == right
        exact = len(right) * (1 - precision) / precision
        left = SIZES.experts - len(gate.later.get(gate.layer + 1, ()))
        assert min(int(exact), left) <= len(next_layer) - len(right) <= int(exact) + 1


def test_an_oracles_recall_and_precision_are_the_ones_asked_for():
    """6000 demanded experts; three deviations of a fair draw are under 2 %."""
    trace = random_trace(3, Sizes(layers=4, experts=6, k=2, tokens=1000))
    totals = replayed_by_compiled(trace, 24, prefetch="oracle:recall=0.6:precision=0.8").totals
    demanded = 1000 * 3 * 2
    assert totals["predicted_demanded"] == pytest.approx(0.6 * demanded, rel=0.04)
    assert totals["predicted_demanded"] == pytest.approx(0.8 * totals["predicted"], rel=0.04)


def test_an_oracle_draws_anew_for_another_seed():
    trace = random_trace(3, SIZES)
    named = [replayed(trace, SLOTS, prefetch="oracle:recall=0.5", seed=seed).events for seed in (0, 0, 1)]
    assert named[0] == named[1] != named[2]
