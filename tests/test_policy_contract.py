"""Every policy of the catalogue keeps the contract of `policies/contract.py`, in Python and as machine code.

One suite for all: a policy added to the catalogue is tested without a line here. Hooks meet the tables that real
replays give them, and random ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from importlib import import_module
from inspect import signature
from random import Random
from typing import Any, NamedTuple

import numba
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policies
from policies.contract import (
    CPU,
    DROP,
    NEVER,
    NONE,
    PAR_SLOTS,
    PER_TOKEN,
    Choice,
    Eviction,
    Miss,
    Number,
    Own,
    Parameter,
    Policy,
    Prefetch,
    Routing,
    slot,
)
from policies.counter_hash import counter_hash
from policies.grammar import Chosen, parse
from simulator.compiled.hooks import SIGNATURES, given_by
from simulator.foreknown import UNKNOWN
from simulator.reference.bound import Bound, Tables
from simulator.reference.victims import Victims
from simulator.setting import Shape
from tests.hook_twins import hook_of, twin
from tests.policy_runs import Outcome, Sizes, geometry_of, random_trace, replayed_by_reference

CATALOGUE = policies.catalogue()
KINDS = {"routing": Routing, "prefetch": Prefetch, "eviction": Eviction, "miss": Miss}
CAPABILITIES = {"weights", "logits", "lookahead", "future"}
QUESTIONS = {
    "own_scores",
    "needs",
    "depth",
    "side_slots",
    "side_inside",
    "uses_cpu",
    "priced",
    "bits",
    "rekey",
    "queue",
    "declines",
    "profile",
}  # asked once, of the parameters; no engine calls them in a run
SIZES = Sizes(layers=3, experts=6, k=2, tokens=9, prompt=4, requests=2, depth=8)
RANKED = tuple((layer, e) for layer in range(SIZES.layers) for e in reversed(range(SIZES.experts)))  # as --profile
CONTRACTS = ("atomic", "sequential")
IN_A_PASS = ("pass", "phase", "request", "tokens", "clock", "position")  #: what only the next pass changes


def label(policy: Policy) -> str:
    return f"{policy.kind}-{policy.name}"


every_policy = pytest.mark.parametrize("policy", CATALOGUE, ids=label)
with_key = pytest.mark.parametrize("policy", [p for p in CATALOGUE if getattr(p, "key", None)], ids=label)


def of_kind(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("policy", [p for p in CATALOGUE if p.kind == kind], ids=label)


def spellings(param: Parameter) -> list[Any]:
    """The default and the ends of what a parameter allows."""
    if isinstance(param, Choice):
        return list(param.options)
    whole = not isinstance(param, Number) or param.integer
    ends = [int(param.low), int(param.high)] if whole else [float(param.low), float(param.high)]
    return [param.default, *ends] if isinstance(param, Number) else [param.default, *[(end,) for end in ends]]


def variants(policy: Policy) -> Iterator[Chosen]:
    """The policy with each parameter in turn at each of its spellings, the others at their defaults."""
    defaults = {param.name: param.default for param in policy.params}
    yield Chosen(policy, defaults)
    for param in policy.params:
        yield from (Chosen(policy, defaults | {param.name: value}) for value in spellings(param))


def put_in_place(monkeypatch: pytest.MonkeyPatch, policy: Policy, **changed: Callable) -> None:
    module = import_module(f"policies.{policy.kind}.{policy.name}")
    monkeypatch.setattr(module, "POLICY", replace(policy, **changed))


def replay_with(chosen: Chosen, seed: int, **others: object) -> Outcome:
    """A short replay with prefill, two requests and a reset between them; room for eight experts of eighteen."""
    given = {"prefetch": "top_k", "reset": "request", "profile": RANKED} | others
    given[chosen.policy.kind] = chosen.text()
    return replayed_by_reference(random_trace(seed, SIZES), 8, **given)


# -- what a policy declares ---------------------------------------------------------------------------------------


@every_policy
def test_a_policy_is_called_as_its_file(policy: Policy):
    assert policies.load(policy.kind, policy.name) is policy
    assert re.fullmatch("[a-z][a-z0-9_]*", policy.name)
    assert isinstance(policy, KINDS[policy.kind])


@every_policy
def test_a_policy_says_what_it_does_and_where_it_is_from(policy: Policy):
    assert policy.summary.strip()
    assert policy.source.strip()
    assert "\n" not in policy.summary + policy.source


@every_policy
def test_defaults_parse_to_themselves(policy: Policy):
    defaults = {param.name: param.default for param in policy.params}
    assert parse(policy.kind, policy.name).params == defaults
    assert parse(policy.kind, Chosen(policy, defaults).text(full=True)).params == defaults


@every_policy
def test_every_spelling_of_a_parameter_survives_the_command_line(policy: Policy):
    for chosen in variants(policy):
        assert parse(policy.kind, chosen.text()).params == chosen.params


@every_policy
def test_parameters_fit_their_slots(policy: Policy):
    assert sum(param.width for param in policy.params) <= PAR_SLOTS
    for chosen in variants(policy):
        par = chosen.par()
        assert len(par) == PAR_SLOTS
        for param in policy.params:
            begin = slot(policy.params, param.name)
            assert par[begin : begin + param.width] == param.slots(chosen.params[param.name])


@every_policy
def test_needs_are_known_capabilities(policy: Policy):
    for chosen in variants(policy):
        assert chosen.needs <= CAPABILITIES


@every_policy
def test_hooks_take_the_documented_parameters(policy: Policy):
    for name, hook in given_by(policy):
        assert tuple(signature(hook).parameters) == SIGNATURES[name].names


@pytest.mark.parametrize("kind", KINDS.values())
def test_every_hook_of_the_contract_is_tested_here(kind: type[Policy]):
    asked = {field.name for field in fields(kind) if "Callable" in str(field.type)}
    assert asked - QUESTIONS <= set(SIGNATURES)


# -- hooks in replays: compiled = Python, tables unharmed -------------------------------------------------------------


@pytest.mark.parametrize("contract", CONTRACTS)
@every_policy
def test_compiled_hooks_agree_with_python_in_a_replay(policy: Policy, contract: str, monkeypatch: pytest.MonkeyPatch):
    plain = [replay_with(chosen, 1, contract=contract).events for chosen in variants(policy)]
    put_in_place(monkeypatch, policy, **{name: twin(name, hook) for name, hook in given_by(policy)})
    assert [replay_with(chosen, 1, contract=contract).events for chosen in variants(policy)] == plain


@of_kind("eviction")
def test_compiled_evictions_agree_with_python_per_layer(policy: Policy, monkeypatch: pytest.MonkeyPatch):
    put_in_place(monkeypatch, policy, **{name: twin(name, hook) for name, hook in given_by(policy)})
    for chosen in variants(policy):
        trace, given = random_trace(2, SIZES), {"prefetch": "top_k", "scope": "per_layer", "profile": RANKED}
        evicting = replayed_by_reference(trace, slots=3, eviction=chosen.text(), **given)
        assert evicting.totals["evictions"] > 0


@pytest.mark.parametrize("contract", CONTRACTS)
@with_key
def test_orders_that_an_engine_keeps_are_those_it_would_work_out_anew(
    policy: Eviction, contract: str, monkeypatch: pytest.MonkeyPatch
):
    """Keys change only where the contract says so: on a touch, at a gate of the layer, or as `rekey` declares."""
    given = {"contract": contract, "miss": "cascade", "reset": "never"}
    kept = [replay_with(chosen, 6, **given).events for chosen in variants(policy)]
    monkeypatch.setattr(Victims, "_rekey", Victims.clear)
    assert [replay_with(chosen, 6, **given).events for chosen in variants(policy)] == kept


@of_kind("routing")
def test_routing_gives_every_token_distinct_experts(policy: Policy):
    for chosen in variants(policy):
        for step in replay_with(chosen, 3).ran:
            for row in step:
                executed = [e for e in row if e != NONE]  # a routing policy may leave a slot empty
                assert len(row) == SIZES.k
                assert len(set(executed)) == len(executed) > 0
                assert set(executed) <= set(range(SIZES.experts))


@pytest.mark.parametrize("policy", [p for p in CATALOGUE if getattr(p, "suggest", None)], ids=label)
def test_prefetch_names_distinct_experts_of_later_layers(policy: Prefetch, monkeypatch: pytest.MonkeyPatch):
    counts, suggest = [], hook_of(policy, "suggest")

    def watched(now, step, experts, copies, own, out):
        count = suggest(now, step, experts, copies, own, out)
        named = out[:count]
        counts.append(count)
        assert len({y // now["precisions"] for y in named}) == count
        assert all(experts[y // now["precisions"]]["layer"] > now["layer"] for y in named)
        return count

    put_in_place(monkeypatch, policy, suggest=watched)
    for chosen in variants(policy):
        replay_with(chosen, 4, miss="cascade", reset="never")
    assert max(counts) > 0


@of_kind("miss")
def test_miss_policies_give_known_verdicts(policy: Miss, monkeypatch: pytest.MonkeyPatch):
    def watched(now, step, experts, copies, own, missing, free, verdict):
        verdict[:] = [None] * len(missing)
        policy.resolve(now, step, experts, copies, own, missing, free, verdict)
        known = {DROP, CPU, *range(now["precisions"])} | ({PER_TOKEN} if policy.substitute else set())
        assert set(verdict) <= known

    put_in_place(monkeypatch, policy, resolve=watched)
    for chosen in variants(policy):
        assert replay_with(chosen, 5).misses > 0


# -- promises that let engines ask less, and keys, over random tables --------------------------------------------------


class Drawn(NamedTuple):
    """What `key` is given before the copy."""

    now: dict[str, int]
    experts: list[dict[str, int]]
    copies: list[dict[str, int]]
    own: Own

    def key(self, policy: Eviction, chosen: Chosen, y: int) -> int:
        return hook_of(policy, "key")(self.now, self.experts, self.copies, self.own._replace(par=chosen.par()), y)


def random_tables(below: Callable[[int], int], policy: Policy) -> Drawn:
    """Three layers of four experts at two precisions; every field that varies in a run is drawn anew."""
    tables = Tables(Shape(geometry_of(Sizes(3, 4, 2)), ((5,) * 3, (3,) * 3)), (40,) * 3, UNKNOWN, seed=7)
    own = Bound(Chosen(policy, {param.name: param.default for param in policy.params}), tables, (40,) * 3).own
    tables.now.update({name: below(3) for name in (*IN_A_PASS, "layer", "step", "gated")})
    for row in tables.experts:
        row.update({name: below(4) for name in row if name != "layer"})
        row["next_use"] = NEVER if below(3) == 0 else row["next_use"]
    for row in tables.copies:
        row.update({name: below(2) for name in ("state", "protected", "entered", "prefetched")})
    for row in [*own.rows, *own.regs, *own.reals]:
        row[:] = [below(5) for _ in row]
    return Drawn(tables.now, tables.experts, tables.copies, own)


def moved_on(drawn: Drawn, later: Drawn, y: int, rekey: str) -> Drawn:
    """`later`, but for the copy y, its expert, and what the declared scope holds still."""
    later.experts[y // 2], later.copies[y] = drawn.experts[y // 2], drawn.copies[y]
    if drawn.own.rows:  # an expert is touched with all its copies, and the first one's row may be for all of them
        first = y - y % 2
        later.own.rows[first : first + 2] = drawn.own.rows[first : first + 2]
    if rekey in ("step", "layer"):  # what a policy writes at gates alone is as old as the step
        later = later._replace(own=later.own._replace(regs=drawn.own.regs, reals=drawn.own.reals))
    still = {"touch": (), "pass": IN_A_PASS}.get(rekey, tuple(drawn.now))
    later.now.update({name: drawn.now[name] for name in still})
    return later


@with_key
@settings(max_examples=20, deadline=None, derandomize=True)
@given(rng=st.randoms(use_true_random=True))
def test_a_queue_is_promised_only_where_the_key_is_that_stamp(policy: Eviction, rng: Random):
    drawn = random_tables(rng.randrange, policy)
    for chosen in variants(policy):
        stamp = policy.queue(chosen.params)
        for y in range(len(drawn.copies)):
            stamps = {"last_use": drawn.experts[y // 2]["last_use"], "entered": drawn.copies[y]["entered"]}
            assert drawn.key(policy, chosen, y) == stamps.get(stamp, drawn.key(policy, chosen, y))


@pytest.mark.parametrize("policy", [p for p in CATALOGUE if getattr(p, "admit", None)], ids=label)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(rng=st.randoms(use_true_random=True))
def test_who_never_declines_admits_everything(policy: Eviction, rng: Random):
    drawn = random_tables(rng.randrange, policy)
    for chosen in variants(policy):
        own, (y_in, y_out) = drawn.own._replace(par=chosen.par()), rng.sample(range(len(drawn.copies)), 2)
        answer = hook_of(policy, "admit")(drawn.now, drawn.experts, drawn.copies, own, y_in, rng.randrange(2), y_out)
        assert answer or policy.declines(chosen.params)


def test_who_fetches_all_decides_nothing_else():
    promised = [policy for policy in CATALOGUE if isinstance(policy, Miss) and policy.fetches_all]
    for policy in promised:
        verdict = [DROP] * 5
        policy.resolve({}, None, [], [], None, range(5), 0, verdict)
        assert verdict == [0] * 5
        assert policy.want is None
    assert promised


@with_key
@settings(max_examples=20, deadline=None, derandomize=True)
@given(rng=st.randoms(use_true_random=True))
def test_keys_are_the_same_integers_in_machine_code(policy: Eviction, rng: Random):
    drawn = random_tables(rng.randrange, policy)
    checked = replace(policy, key=twin("key", hook_of(policy, "key")))
    for chosen in variants(policy):
        for y in range(len(drawn.copies)):
            assert -(2**63) <= drawn.key(checked, chosen, y) < 2**63


@with_key
@settings(max_examples=60, deadline=None, derandomize=True)
@given(rng=st.randoms(use_true_random=True))
def test_an_untouched_copy_keeps_its_key_inside_the_declared_scope(policy: Eviction, rng: Random):
    """All else may change: other rows, registers, and `now` outside of the scope."""
    drawn, later = random_tables(rng.randrange, policy), random_tables(rng.randrange, policy)
    y = rng.randrange(len(drawn.copies))
    for chosen in variants(policy):
        moved = moved_on(drawn, later, y, policy.scope(chosen.params))
        assert moved.key(policy, chosen, y) == drawn.key(policy, chosen, y)


@with_key
@settings(max_examples=60, deadline=None, derandomize=True)
@given(rng=st.randoms(use_true_random=True))
def test_untouched_copies_of_a_layer_keep_their_order_in_a_pass_if_declared(policy: Eviction, rng: Random):
    """The execution point moves on. `needed` is 1 in the layer in progress alone, and its fall is a touch."""
    drawn = random_tables(rng.randrange, policy)
    first, second = rng.sample(range(8), 2)  # copies of layer 0
    for x in (first // 2, second // 2):
        drawn.experts[x]["needed"] = 0
    for chosen in variants(policy):
        if policy.scope(chosen.params) == "layer":
            orders = []
            for place in ({}, {name: rng.randrange(3) for name in ("layer", "step", "gated")}):
                drawn.now.update(place)
                keys = [drawn.key(policy, chosen, y) for y in (first, second)]
                orders.append((keys[0] > keys[1]) - (keys[0] < keys[1]))
            assert orders[0] == orders[1]


def test_random_draws_do_not_overflow_in_machine_code():
    """A seed may fill 63 bits; its product with the hash's multiplier would not fit."""
    machine = numba.njit(numba.int64(*(numba.int64,) * 4))(counter_hash)
    for seed in (0, 1, 2**31, 2**62 + 12345, 2**63 - 1):
        assert machine(seed, 2**40, 7, 2**20) == counter_hash(seed, 2**40, 7, 2**20)


# -- the suite itself notices ---------------------------------------------------------------------------------------


def evicts_by(key: Callable, rekey: str = "touch") -> Eviction:
    return Eviction(name="made_up", summary="for this test", source="here", key=key, rekey=rekey)


def key_of_a_float(now, experts, copies, own, y):
    return experts[0]["last_use"] / 2


def key_that_writes(now, experts, copies, own, y):
    copies[y]["entered"] += 1
    return copies[y]["entered"]


def key_of_the_layer(now, experts, copies, own, y):
    return now["layer"]


@pytest.mark.parametrize(("key", "complaint"), [(key_of_a_float, "returns 0.5"), (key_that_writes, "writes copies")])
def test_a_hook_that_breaks_the_contract_is_caught(key: Callable, complaint: str):
    drawn = random_tables(lambda below: 1, policies.load("eviction", "lru"))
    with pytest.raises(AssertionError, match=complaint):
        drawn.key(evicts_by(twin("key", key)), parse("eviction", "lru"), 0)


def test_a_wrong_rekey_scope_is_caught():
    drawn, later = (random_tables(lambda below, n=n: n, policies.load("eviction", "lru")) for n in (0, 1))
    policy, lru = evicts_by(key_of_the_layer), parse("eviction", "lru")
    assert moved_on(drawn, later, 0, "touch").key(policy, lru, 0) != drawn.key(policy, lru, 0)
    assert moved_on(drawn, later, 0, "step").key(policy, lru, 0) == drawn.key(policy, lru, 0)
