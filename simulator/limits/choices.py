"""Experts that a token may run instead of its router's, as arrays for `relaxation` and `strategy`.

`top-m`: as many experts as the router chose, from its M best, always including the J best. Ranks are the recorded
order, then descending choice score, ties by lowest id, as in the policies `max_rank` and `cumulative`. `mass`: at most
as many as the router chose, whose gate shares sum to at least so much of the sum of those that it chose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moereplay.policies.contract import PolicyError
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.rates import MILLION
from moereplay.traces import token_arrays
from moereplay.traces.growing import VALUES_AT_ONCE
from moereplay.traces.passes import schedule
from moereplay.traces.routers import to_units
from moereplay.traces.schema import Trace
from moereplay.traces.texts import whole

FIRST = 1e300  #: above every score, so that the router's choice comes first
#: Shares to subtract, in halves of the share of a rule's last place.
HALVES = (0, 1, 2)


@dataclass(frozen=True)
class Freedom:
    """Permitted distance of routing from the router's choice."""

    top_m: int = 0  #: 0 where mass decides
    top_j: int = 0
    mass: int = 0  #: millionths of the gate mass of the router's choice

    @property
    def text(self) -> str:
        """The freedom in words."""
        if self.mass:
            return f"any that keep {self.mass / MILLION:.4g} of the gate mass"
        return f"any of the best {self.top_m}" + (f", the best {self.top_j} always" if self.top_j else "")


class Choices(NamedTuple):
    """Permitted choices: n candidates of S steps, and C rules, one per token and layer, over p pairs.

    A candidate is an expert that a step may run, for any of its tokens. A rule needs `need` of the shares of its
    candidates, from at most `most` of them, in addition to forced ones.
    """

    step: np.ndarray  #: (n,) int64, rising
    unit: np.ndarray  #: (n,) int64, layer * E + expert
    forced: np.ndarray  #: (n,) int8: 1 if every admissible choice of some token runs it
    begins: np.ndarray  #: (S + 1,) int64: candidates of each step
    offsets: np.ndarray  #: (C + 1,) int64: pairs of each rule; rule = row of the schedule * L + layer
    candidate: np.ndarray  #: (p,) int64
    share: np.ndarray  #: (p,) int64: 1 each, or the gate share in UNITs
    need: np.ndarray  #: (C,) int64
    most: np.ndarray  #: (C,) int64


class Block(NamedTuple):
    """Rules of a block of rows, (rows, L, W): W places, -1 if empty."""

    expert: np.ndarray
    share: np.ndarray
    forced: np.ndarray  #: bool
    need: np.ndarray  #: (rows, L), in addition to forced ones
    most: np.ndarray  #: (rows, L)


def freedom(trace: Trace, top_m: str, top_j: int, mass: float | None) -> Freedom:
    """Parse `--top-m`, `--top-j` and `--mass`. Raises ConfigError, and PolicyError without router logits."""
    geometry = trace.geometry
    if top_m and mass is not None:
        raise ConfigError("--top-m and --mass are mutually exclusive")
    if "logits" not in trace.arrays:
        raise PolicyError(
            "--top-m and --mass require router logits, which this trace lacks; "
            "use a trace recorded with router logits, or leave --top-m and --mass out"
        )
    if mass is not None:
        if not 1 / MILLION <= mass <= 1 or top_j:
            if top_j:
                raise ConfigError("--mass cannot be combined with --top-j")
            raise ConfigError(f"invalid --mass {mass:g}: expected a share above 0, at most 1, such as 0.9")
        return Freedom(mass=round(mass * MILLION))
    times, digits = top_m.endswith("k"), whole(top_m.removesuffix("k"))
    if not digits:
        raise ConfigError(
            f"invalid --top-m {top_m!r}: expected a number of experts, or 2k for twice the k of the model"
        )
    most = min(digits * (geometry.k if times else 1), geometry.experts)
    if most < geometry.k or not 0 <= top_j <= geometry.k:
        wrong = f"--top-m {top_m}" if most < geometry.k else f"--top-j {top_j}"
        raise ConfigError(
            f"invalid {wrong}: the model runs {geometry.k} experts per token; "
            f"expected M of at least {geometry.k}, J of at most {geometry.k}"
        )
    return Freedom(most, top_j)


def choices(trace: Trace, passes: str, free: Freedom) -> Choices:
    """Return all permitted choices. Raises TraceError."""
    plan, geometry = schedule(trace, passes), trace.geometry
    pass_of = np.repeat(np.arange(len(plan)), plan.stop - plan.start)
    layers, experts, rows = geometry.layers, geometry.experts, int(plan.stop[-1])
    blocks, at_once = list[tuple[np.ndarray, ...]](), max(1, VALUES_AT_ONCE // (layers * experts))
    for first in range(0, rows, at_once):
        last = min(first + at_once, rows)
        made = _rules(trace, plan.tokens(first, last), free)
        key = (pass_of[first:last, None] * layers + np.arange(layers))[:, :, None] * experts + made.expert
        there = made.expert >= 0
        of_rules = made.need.ravel(), made.most.ravel(), (there & ~made.forced).sum(-1).ravel()
        blocks.append((key[there], made.share[there], made.forced[there], *of_rules))
    key, share, forced, need, most, count = (np.concatenate(each) for each in zip(*blocks, strict=True))
    found, candidate = np.unique(key, return_inverse=True)  # pairs of all rules, in their order, have few candidates
    step, expert = np.divmod(found, experts)
    is_forced = np.zeros(len(found), np.int8)
    is_forced[candidate[forced]] = 1
    begins = np.searchsorted(step, np.arange(len(plan) * layers + 1))
    offsets = np.concatenate([[0], np.cumsum(count)])
    columns = (step, step % layers * experts + expert, is_forced, begins, offsets)
    chosen = Choices(*columns, candidate[~forced], share[~forced], need, most)
    return Choices(*(np.ascontiguousarray(each, np.int8 if each.dtype == np.int8 else np.int64) for each in chosen))


def _rules(trace: Trace, tokens: slice | np.ndarray, free: Freedom) -> Block:
    ids = token_arrays.rows(trace, "chosen")[tokens].astype(np.int64)
    scores = token_arrays.choice(trace)[tokens].astype(np.float64)  # a copy
    for j in range(ids.shape[-1] - 1, -1, -1):
        t, layer = np.nonzero(ids[:, :, j] >= 0)
        scores[t, layer, ids[t, layer, j]] = FIRST / (1 + j)
    wanted = (ids >= 0).sum(-1)
    if not free.mass:
        return _best(scores, wanted, free)
    units = to_units(token_arrays.shares(trace)[tokens])
    own = (np.take_along_axis(units, np.maximum(ids, 0), -1) * (ids >= 0)).sum(-1)
    return _weighty(np.where(scores > -np.inf, units, 0), wanted, -(-own * free.mass // MILLION))


def _best(scores: np.ndarray, wanted: np.ndarray, free: Freedom) -> Block:
    """Return the first M of each rank order, or more if more are needed."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., : max(free.top_m, int(wanted.max(initial=0)))]
    rank, wanted = np.arange(order.shape[-1]), wanted[..., None]
    usable = np.take_along_axis(scores, order, -1) > -np.inf
    expert = np.where(usable & (rank < np.maximum(free.top_m, wanted)) & (wanted > 0), order, -1)
    forced = (rank < np.minimum(free.top_j, wanted)) & (expert >= 0)
    need = wanted[..., 0] - forced.sum(-1)
    return Block(expert, np.ones_like(expert), forced, need, need)


def _weighty(units: np.ndarray, wanted: np.ndarray, need: np.ndarray) -> Block:
    """Return experts of some admissible choice, and the forced ones, without which no choice reaches `need`."""
    order = np.argsort(-units, axis=-1, kind="stable")
    share = np.take_along_axis(units, order, -1)
    rank, many = np.arange(order.shape[-1]), wanted[..., None]
    best = (share * (rank < many)).sum(-1, keepdims=True)
    last = (share * (rank == many - 1)).sum(-1, keepdims=True)
    following = (share * (rank == many)).sum(-1, keepdims=True)
    inside = rank < many
    helps = inside | (best - last + share >= need[..., None])
    expert = np.where((share > 0) & helps & (need[..., None] > 0), order, -1)
    forced = inside & (expert >= 0) & (best - share + following < need[..., None])
    left = np.maximum(0, need - (share * forced).sum(-1))
    expert = np.where(forced | (left[..., None] > 0), expert, -1)
    return Block(expert, np.minimum(share, np.maximum(left[..., None], 1)), forced, left, wanted - forced.sum(-1))


def sharpened(rules: Choices) -> Choices:
    """Derive more rules that every admissible choice satisfies, to tighten a relaxation with many experts per token.

    If at most k candidates have shares of at least `need` together, then for any t their shares beyond t are at least
    `need` - k t. Rules of whole experts gain nothing by that.
    """
    if int(rules.share.max(initial=1)) == 1:
        return rules
    rule = np.repeat(np.arange(len(rules.need)), np.diff(rules.offsets))
    made = [_beyond(rules, rule, _last_share(rules) * halves // 2) for halves in HALVES]
    counts, candidate, share, need = (np.concatenate(each) for each in zip(*made, strict=True))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    most = np.tile(rules.most, len(HALVES))
    return rules._replace(offsets=offsets, candidate=candidate, share=share, need=need, most=most)


def _last_share(rules: Choices) -> np.ndarray:
    """Return each rule's share in its last position if the largest are chosen; 0 if a position is free, (C,)."""
    last = rules.offsets[:-1] + rules.most - 1
    full = (rules.most > 0) & (last < rules.offsets[1:])
    found = np.zeros(len(rules.need), np.int64)
    found[full] = rules.share[last[full]]  # pairs of a rule are in order of falling share
    return found


def _beyond(rules: Choices, rule: np.ndarray, less: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return each rule's candidates with a share beyond `less` (C,): count, which, excess, and need."""
    need = np.maximum(0, rules.need - rules.most * less)
    share = np.minimum(rules.share - less[rule], need[rule])
    left = share > 0
    return np.bincount(rule[left], minlength=len(need)), rules.candidate[left], share[left], need
