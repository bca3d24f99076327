"""Promises of policies that save hook calls, and their keys, on random tables."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import numba
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay import policies
from moereplay.policies.blocks import counter_hash
from moereplay.policies.contract import DROP, NEVER, Eviction, Miss, Own, Policy
from moereplay.policies.grammar import Chosen, parse
from moereplay.simulator.interface import NO_ORACLE, CopyLayout
from moereplay.simulator.reference.hooks import BoundPolicy
from moereplay.simulator.reference.state import Tables
from tests.kit.policy_catalogue import CATALOGUE, hook_of, label, variants, with_key
from tests.kit.policy_runs import Sizes, geometry_of
from tests.kit.search import searched

IN_A_PASS = ("pass", "phase", "request", "tokens", "clock", "position")  #: what only the next pass changes


class Drawn(NamedTuple):
    """Arguments of `key` before the copy."""

    now: dict[str, int]
    experts: list[dict[str, int]]
    copies: list[dict[str, int]]
    own: Own

    def key(self, policy: Eviction, chosen: Chosen, y: int) -> int:
        return hook_of(policy, "key")(self.now, self.experts, self.copies, self.own._replace(par=chosen.par()), y)


def random_tables(below: Callable[[int], int], policy: Policy) -> Drawn:
    """Three layers of four experts at two precisions; every field that varies in a run is drawn anew."""
    layout = CopyLayout(geometry_of(Sizes(3, 4, 2)), ((5,) * 3, (3,) * 3))
    tables = Tables(layout, [x // 4 for x in range(12)], NO_ORACLE, seed=7)
    own = BoundPolicy(Chosen(policy, {param.name: param.default for param in policy.params}), tables, (40,) * 3).own
    tables.now.update({name: below(3) for name in (*IN_A_PASS, "layer", "step", "gated")})
    for row in tables.experts:
        row.update({name: below(4) for name in row if name != "layer"})
        row["next_use"] = NEVER if below(3) == 0 else row["next_use"]
    for row in tables.copies:
        row.update({name: below(2) for name in ("state", "protected", "entered", "prefetched")})
    for row in [*own.rows, *own.regs, *own.reals]:
        row[:] = [below(5) for _ in row]
    return Drawn(tables.now, tables.experts, tables.copies, own)


def moved_on(drawn: Drawn, later: Drawn, y: int, key_scope: str) -> Drawn:
    """`later`, but for the copy y, its expert, and what the declared scope holds still."""
    later.experts[y // 2], later.copies[y] = drawn.experts[y // 2], drawn.copies[y]
    if drawn.own.rows:  # an expert is touched with all its copies, and the first one's row may be for all of them
        first = y - y % 2
        later.own.rows[first : first + 2] = drawn.own.rows[first : first + 2]
    if key_scope in ("step", "layer"):  # what a policy writes at gates alone is as old as the step
        later = later._replace(own=later.own._replace(regs=drawn.own.regs, reals=drawn.own.reals))
    still = {"touch": (), "pass": IN_A_PASS}.get(key_scope, tuple(drawn.now))
    later.now.update({name: drawn.now[name] for name in still})
    return later


@with_key
@searched(60)
@given(rng=st.randoms(use_true_random=True))
def test_a_key_is_what_its_policy_declares(policy: Eviction, rng: Random):
    drawn, later = random_tables(rng.randrange, policy), random_tables(rng.randrange, policy)
    for chosen in variants(policy):
        check_queue(drawn, policy, chosen)
        y = rng.randrange(len(drawn.copies))
        assert -(2**63) <= drawn.key(policy, chosen, y) < 2**63
        # All else may change: other rows, registers, and `now` outside of the scope.
        moved = moved_on(drawn, later, y, policy.scope(chosen.params))
        assert moved.key(policy, chosen, y) == drawn.key(policy, chosen, y), "an untouched copy keeps its key in scope"
    for chosen in variants(policy):
        if policy.scope(chosen.params) == "layer":
            check_one_layer(drawn, policy, chosen, rng)


def check_queue(drawn: Drawn, policy: Eviction, chosen: Chosen) -> None:
    """A queue is promised only where the key is that timestamp."""
    queue = policy.queue(chosen.params)
    for y in range(len(drawn.copies)) if queue else ():
        promised = {"last_use": drawn.experts[y // 2]["last_use"], "entered": drawn.copies[y]["entered"]}
        assert drawn.key(policy, chosen, y) == promised[queue], f"queue {queue}"


def check_one_layer(drawn: Drawn, policy: Eviction, chosen: Chosen, rng: Random) -> None:
    """Keys of untouched copies of a layer move by as much in a pass.

    The execution point moves on. `needed` is 1 in the layer in progress alone, and its fall is a touch.
    """
    first, second = rng.sample(range(8), 2)  # copies of layer 0
    for x in (first // 2, second // 2):
        drawn.experts[x]["needed"] = 0
    apart = []
    for place in ({}, {name: rng.randrange(3) for name in ("layer", "step", "gated")}):
        drawn.now.update(place)
        keys = [drawn.key(policy, chosen, y) for y in (first, second)]
        apart.append(keys[0] - keys[1])
    assert apart[0] == apart[1], "keys of a layer move by as much"


@pytest.mark.parametrize("policy", [p for p in CATALOGUE if getattr(p, "admit", None)], ids=label)
@searched(60)
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


def test_random_draws_do_not_overflow_in_machine_code():
    """A seed may fill 63 bits; its product with the hash's multiplier would not fit."""
    machine = numba.njit(numba.int64(*(numba.int64,) * 4))(counter_hash)
    for seed in (0, 1, 2**31, 2**62 + 12345, 2**63 - 1):
        assert machine(seed, 2**40, 7, 2**20) == counter_hash(seed, 2**40, 7, 2**20)


# -- the suite itself notices ---------------------------------------------------------------------------------------


def evicts_by(key: Callable, key_scope: str = "touch") -> Eviction:
    return Eviction(name="made_up", summary="for this test", source="here", key=key, key_scope=key_scope)


def key_of_the_layer(now, experts, copies, own, y):
    return now["layer"]


def test_a_wrong_key_scope_is_caught():
    drawn, later = (random_tables(lambda below, n=n: n, policies.load("eviction", "lru")) for n in (0, 1))
    policy, lru = evicts_by(key_of_the_layer), parse("eviction", "lru")
    assert moved_on(drawn, later, 0, "touch").key(policy, lru, 0) != drawn.key(policy, lru, 0)
    assert moved_on(drawn, later, 0, "step").key(policy, lru, 0) == drawn.key(policy, lru, 0)
