"""Every policy of the catalogue keeps the contract of `policies/contract.py`.

One suite for all: a policy added to the catalogue is tested without a line here. Hooks meet the tables that real
replays give them; `test_policy_promises` gives them random ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import import_module
from inspect import signature
from itertools import chain
from typing import Any

import pytest

from moereplay import policies
from moereplay.policies.contract import (
    CPU,
    DROP,
    NONE,
    PAR_SLOTS,
    PER_TOKEN,
    Eviction,
    Miss,
    Policy,
    PolicyError,
    Prefetch,
    Routing,
    slot,
)
from moereplay.policies.grammar import Chosen, parse
from moereplay.policies.hooks import HOOKS, given_by
from moereplay.simulator.reference.hooks import Victims
from tests.kit.policy_catalogue import CATALOGUE, every_policy, hook_of, label, variants, with_key
from tests.kit.policy_runs import Outcome, Sizes, random_trace, replayed_by_reference

KINDS = {"routing": Routing, "prefetch": Prefetch, "eviction": Eviction, "miss": Miss}
CAPABILITIES = {"weights", "logits", "lookahead", "future"}
QUESTIONS = {
    "own_scores",
    "needs",
    "depth",
    "reach",
    "side_slots",
    "side_inside",
    "uses_cpu",
    "never_fetches",
    "priced",
    "bits",
    "key_scope",
    "queue",
    "declines",
    "profile",
}  # asked once, of the parameters; no engine calls them in a run
SIZES = Sizes(layers=3, experts=6, k=2, tokens=9, prompt=4, requests=2, depth=8)
RANKED = tuple((layer, e) for layer in range(SIZES.layers) for e in reversed(range(SIZES.experts)))  # as --profile
CONTRACTS = ("atomic", "sequential")


def put_in_place(monkeypatch: pytest.MonkeyPatch, policy: Policy, **changed: Any) -> None:
    module = import_module(f"moereplay.policies.{policy.kind}.{policy.name}")
    monkeypatch.setattr(module, "POLICY", replace(policy, **changed))


def replay_with(chosen: Chosen, seed: int, **others: object) -> Outcome:
    """A short replay with prefill, two requests and a reset between them; room for eight experts of eighteen."""
    given = {"prefetch": "top_k", "reset": "request", "profile": RANKED} | others
    given[chosen.policy.kind] = chosen.text()
    return replayed_by_reference(random_trace(seed, SIZES), 8, **given)


# -- what a policy declares ---------------------------------------------------------------------------------------


@every_policy
def test_what_a_policy_declares_is_whole_and_survives_the_command_line(policy: Policy):
    assert policies.load(policy.kind, policy.name) is policy
    assert re.fullmatch("[a-z][a-z0-9_]*", policy.name)
    assert isinstance(policy, KINDS[policy.kind])
    assert policy.summary.strip() and policy.source.strip() and "\n" not in policy.summary + policy.source
    assert policy.reads is not None
    for name, hook in given_by(policy):
        assert tuple(signature(hook).parameters) == HOOKS[name].arguments, f"parameters of hook {name}"
    defaults = {param.name: param.default for param in policy.params}
    assert parse(policy.kind, policy.name).params == defaults
    assert parse(policy.kind, Chosen(policy, defaults).text(full=True)).params == defaults
    assert sum(param.width for param in policy.params) <= PAR_SLOTS
    for chosen in variants(policy):
        assert parse(policy.kind, chosen.text()).params == chosen.params
        assert chosen.needs <= CAPABILITIES
        par = chosen.par()
        assert len(par) == PAR_SLOTS
        for param in policy.params:
            begin = slot(policy.params, param.name)
            assert par[begin : begin + param.width] == param.slots(chosen.params[param.name])


def test_every_hook_of_the_contract_is_tested_here():
    asked = {field.name for kind in KINDS.values() for field in fields(kind) if "Callable" in str(field.type)}
    assert asked - QUESTIONS <= set(HOOKS)


# -- hooks in replays -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every_policy
def test_hooks_keep_the_contract_in_a_replay(policy: Policy, monkeypatch: pytest.MonkeyPatch):
    """Checked against its declarations, as a user's own policy is, it decides the same; `test_parity` compiles it."""
    every = list(variants(policy))
    given = [*((chosen, "atomic") for chosen in every), (every[0], "sequential")]

    def decided(**changed: Any) -> list[Outcome]:
        put_in_place(monkeypatch, policy, **changed)
        return [replay_with(chosen, 1, contract=contract) for chosen, contract in given]

    plain = decided()
    misses = list[int]()
    watched = {"resolve": watched_resolve(policy, misses)} if isinstance(policy, Miss) else {}
    checked = decided(version="0" * 12, **watched)
    assert [ran.events for ran in checked] == [ran.events for ran in plain], "under the checks of a user's own policy"
    assert not watched or max(misses) > 0
    for (chosen, _), ran in zip(given, plain, strict=True):
        if isinstance(policy, Routing):
            check_distinct(ran)
        if isinstance(policy, Miss):
            assert ran.totals["bytes_demand"] == 0 or not policy.never_fetches(chosen.params)


def check_distinct(ran: Outcome) -> None:
    """Every token runs distinct experts; a routing policy may leave a slot empty."""
    for row in chain(*ran.ran):
        executed = [e for e in row if e != NONE]
        assert len(row) == SIZES.k
        assert len(set(executed)) == len(executed) > 0
        assert set(executed) <= set(range(SIZES.experts))


def watched_resolve(policy: Miss, misses: list[int]) -> Callable:
    """A miss policy gives known verdicts."""

    def watched(now, step, experts, copies, own, missing, free, verdict):
        answers = [None] * len(missing)
        policy.resolve(now, step, experts, copies, own, missing, free, answers)
        misses.append(len(missing))
        assert set(answers) <= {DROP, CPU, *range(now["precisions"])} | ({PER_TOKEN} if policy.substitute else set())
        verdict[:] = answers

    return watched


@pytest.mark.parametrize("policy", [p for p in CATALOGUE if getattr(p, "suggest", None)], ids=label)
def test_prefetch_names_distinct_experts_of_layers_to_come(policy: Prefetch, monkeypatch: pytest.MonkeyPatch):
    counts, suggest = [], hook_of(policy, "suggest")

    def watched(now, step, experts, copies, own, out):
        count = suggest(now, step, experts, copies, own, out)
        named = out[:count]
        counts.append(count)
        assert len({y // now["precisions"] for y in named}) == count
        layers = [experts[y // now["precisions"]]["layer"] for y in named]
        assert all(layer == now["layer"] if policy.next_pass else layer > now["layer"] for layer in layers)
        return count

    put_in_place(monkeypatch, policy, suggest=watched)
    for chosen in variants(policy):
        replay_with(chosen, 4, miss="drop:keep=1" if policy.next_pass else "cascade", reset="never")
    assert max(counts) > 0


@pytest.mark.parametrize("policy", [p for p in CATALOGUE if p.reads], ids=label)
def test_a_policy_declares_nothing_that_it_does_not_read(policy: Policy, monkeypatch: pytest.MonkeyPatch):
    """Data kept up to date for no policy costs time."""
    for name in policy.reads or ():
        with monkeypatch.context() as patched, pytest.raises(PolicyError, match=f"undeclared read of '{name}'"):
            put_in_place(patched, policy, version="0" * 12, reads=(policy.reads or frozenset()) - {name})
            for chosen in variants(policy):
                replay_with(chosen, 1)


@pytest.mark.slow
@with_key
def test_orders_that_an_engine_keeps_are_those_it_would_work_out_anew(
    policy: Eviction, monkeypatch: pytest.MonkeyPatch
):
    """Keys change only where the contract says so: on a touch, at a gate of the layer, or as `key_scope` declares."""
    for contract in CONTRACTS:
        given = {"contract": contract, "miss": "cascade", "reset": "never"}
        kept = [replay_with(chosen, 6, **given).events for chosen in variants(policy)]
        with monkeypatch.context() as patched:
            patched.setattr(Victims, "_drop_stale_keys", Victims.clear)
            assert [replay_with(chosen, 6, **given).events for chosen in variants(policy)] == kept, contract
