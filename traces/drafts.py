"""Draft tokens: the rows of a request's passes when a pass verifies guesses beside the token that is known.

`N[:accept=A1/A2/...][:rejected=other|own]`, or `recorded[:rejected=recorded|other|own]` for those that a trace has a
record of. Which drafts are accepted depends on the token's index and the seed alone, or on the record, not on time. So
the shares of a request (its prompt, then the known token with its drafts) are known in advance, and
schedules decide only which pass a share falls in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Literal, NamedTuple, get_args

import numpy as np

from moereplay.traces.schema import Trace, TraceError
from moereplay.traces.texts import meant, whole
from moereplay.traces.units import DECODE, PREFILL
from moereplay.traces.values import Verified

KNOWN, ACCEPTED, REJECTED = range(3)  #: kinds of rows: a token of the trace, a guess that was right, a wrong one
Routed = Literal["other", "own", "recorded"]
ROUTED: dict[str, Routed] = {name: name for name in get_args(Routed)}
RECORDED = "recorded"
OFF = "0"
EXPECTED = (
    "expected recorded[:rejected=recorded|other|own], or "
    "N[:accept=A1/A2/...][:rejected=other|own], each A from 0 to 1, or accept=NAME of a known head"
)
NUMBER = r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"
LIKELY = (0.7,)


#: Of heads that were measured: in which share of the passes the first, second, ... draft was accepted. The sources are
#: in docs/semantics.md.
HEADS = {
    "qwen3.8-mtp": (0.931, 0.793, 0.655),
    "qwen3.6-mtp": (0.86, 0.74),
    "gemma-4-dense": (0.77, 0.55, 0.40, 0.29),
    "converted-mtp": (0.70, 0.45, 0.33, 0.21),
    "deepseek-v4-nextn": (0.90,),
}


def given_the_last(shares: Sequence[float]) -> tuple[float, ...]:
    """Return the chance of each draft if the one before it is right, to three digits."""
    return tuple(round(share / before, 3) for before, share in pairwise((1.0, *shares)))


class Drafts(NamedTuple):
    """How many drafts a pass verifies, and which are right."""

    many: int  #: per request and pass, at most
    accept: tuple[float, ...] = LIKELY  #: chance of the first, second, ... if those before it are; the last repeats
    rejected: Routed = "other"  #: whose routing a wrong token has: another token's, its index's, the recorded one
    recorded: bool = False  #: how many and which are right is as recorded, instead of the first two

    @property
    def text(self) -> str:
        """The setting with everything spelled out."""
        if self.recorded:
            return f"{RECORDED}:rejected={self.rejected}"
        chances = "/".join(str(chance).removesuffix(".0") for chance in self.accept)
        return f"{self.many}:accept={chances}:rejected={self.rejected}" if self.many else OFF

    @property
    def kept(self) -> float:
        """Expected tokens of a pass: the known one, and every draft that is right together with those before it."""
        chances = [self.accept[min(j, len(self.accept) - 1)] for j in range(self.many)]
        return 1.0 + sum(accumulate(chances, mul))


def parse_drafts(text: str) -> Drafts:
    """Return the drafts of a setting. Raises TraceError."""
    first, *others = text.split(":")
    many, found = whole(first), {name: value for name, _, value in (other.partition("=") for other in others)}
    recorded = first == RECORDED
    rejected = ROUTED.get(found.pop("rejected", RECORDED if recorded else "other"))
    chances = LIKELY if recorded or "accept" not in found else _chances(found.pop("accept"))
    doubtful = found or len(others) > len({each.partition("=")[0] for each in others})
    if (many is None and not recorded) or doubtful or rejected is None or chances is None:
        raise TraceError(f"invalid draft {text!r}: {_meant(first, others)}{EXPECTED} ({', '.join(HEADS)})")
    if rejected == RECORDED and not recorded:
        why = "rows of a draft that was not made are in no trace"
        raise TraceError(f"invalid draft {text!r}: {why}; use rejected=other or own, or --draft recorded")
    return Drafts(many or 0, chances, rejected, recorded)


def _meant(first: str, others: Sequence[str]) -> str:
    """Return the first suggestion for a name that is misspelt, if there is one."""
    known = {"accept": HEADS, "rejected": ROUTED}
    named = [(first, {RECORDED: ""})]
    for name, _, value in (other.partition("=") for other in others):
        named += [(name, known), (value, known.get(name, {}))]
    return next(filter(None, (meant(each, names) for each, names in named)), "")


def _chances(text: str) -> tuple[float, ...] | None:
    if text in HEADS:
        return given_the_last(HEADS[text])
    chances = [float(each) if re.fullmatch(NUMBER, each) else -1.0 for each in text.split("/")]
    return tuple(chances) if all(0 <= chance <= 1 for chance in chances) else None


# -- chance, from the seed alone

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def hash53(seed: int, numbers: np.ndarray) -> np.ndarray:
    """Return 53 random bits for each number, uint64: three rounds of SplitMix64's mixing. docs/semantics.md has it."""
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint64) + np.uint64((seed * _GOLDEN + 1) % (1 << 64))
        for _ in range(3):
            x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
            x = x ^ (x >> np.uint64(31))
    return x >> np.uint64(11)


def uniform(seed: int, numbers: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each, exact in float64."""
    return hash53(seed, numbers).astype(np.float64) / float(1 << 53)


# -- rows and shares


class Rows(NamedTuple):
    """Rows of passes or shares, one after the other."""

    token: np.ndarray  #: (R,) int64, in the token axis: the position that a row is computed for
    request: np.ndarray  #: (R,) int64
    phase: np.ndarray  #: (R,) int8, 0 prefill, 1 decode
    reads: np.ndarray  #: (R,) int64, the token whose routing it has; other than `token` in rejected rows only
    draft: np.ndarray  #: (R,) int8, KNOWN, ACCEPTED or REJECTED

    @classmethod
    def plain(cls, token: np.ndarray, request: np.ndarray, phase: np.ndarray) -> Rows:
        """Return rows without drafts."""
        return cls(token, request, phase, token, np.zeros(len(token), np.int8))

    def at(self, order: np.ndarray) -> Rows:
        """Return these rows of them."""
        return Rows(*(column[order] for column in self))


class Shares(NamedTuple):
    """The rows that each request gives to each pass: its prompt, or a known token with its drafts."""

    begins: np.ndarray  #: (R + 1,) int64, first share of each request
    offsets: np.ndarray  #: (S + 1,) int64, first row of each share
    rows: Rows  #: of all shares, in the order of requests


def shares(trace: Trace, prompts: np.ndarray, size: int, drafts: Drafts, seed: int) -> Shares:
    """Return the shares of requests whose first `prompts` (R,) tokens are prompt, in pieces of `size` (0: whole)."""
    offsets = np.asarray(trace.request_offsets, np.int64)
    right = verified_of(trace).right if drafts.recorded else _right(trace, drafts.many, drafts.accept, seed)
    edges: list[int] = []  # the first token of each share
    begins = [0]
    for first, end, prompt in zip(offsets[:-1].tolist(), offsets[1:].tolist(), prompts.tolist(), strict=True):
        edges += range(first, first + prompt, size or max(prompt, 1))
        at = first + prompt
        while at < end:
            edges.append(at)
            at += 1 + min(int(right[at]), end - 1 - at)
        begins.append(len(edges))
    return _laid_out(trace, prompts, np.array(edges, np.int64), np.array(begins, np.int64), drafts, seed)


def verified_of(trace: Trace) -> Verified:
    """Return the recorded passes of a trace. Raises TraceError if it has no record of drafts."""
    if trace.verified is None:
        where = f"{trace.path} has" if trace.path else "this trace has"
        fix = "record one with --draft-model, or pass --draft N"
        raise TraceError(f"--draft recorded: {where} no record of drafts; {fix}")
    return trace.verified


def _right(trace: Trace, many: int, accept: Sequence[float], seed: int) -> np.ndarray:
    """Return how many drafts after each token would be accepted if its request went on for ever, (T,)."""
    tokens, right = np.arange(trace.tokens, dtype=np.int64), np.zeros(trace.tokens, np.int64)
    going = np.ones(trace.tokens, bool)
    for j in range(1, min(many, trace.tokens) + 1):
        going &= uniform(seed, tokens + j) < accept[min(j, len(accept)) - 1]
        right += going
    return right


def _laid_out(
    trace: Trace, prompts: np.ndarray, edges: np.ndarray, begins: np.ndarray, drafts: Drafts, seed: int
) -> Shares:
    """Return the rows of shares that begin at these tokens."""
    offsets = np.asarray(trace.request_offsets, np.int64)
    request = np.repeat(np.arange(trace.requests, dtype=np.int64), np.diff(begins))
    first, end = offsets[request], offsets[request + 1]
    decoded = edges >= first + prompts[request]
    last = np.arange(len(edges)) + 1 == begins[request + 1]
    kept = np.where(last, end, np.append(edges[1:], 0)) - edges
    many = verified_of(trace).many[edges] if drafts.recorded else np.minimum(drafts.many, end - 1 - edges)
    rows = np.where(decoded, 1 + many, kept)
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
    share = np.repeat(np.arange(len(edges)), rows)
    inside = np.arange(len(share)) - starts[share]  # j of a draft
    token = edges[share] + inside
    draft = np.where(inside >= kept[share], REJECTED, np.where(decoded[share] & (inside > 0), ACCEPTED, KNOWN))
    reads, wrong = token.copy(), np.flatnonzero(draft == REJECTED)
    of = share[wrong]
    if drafts.rejected == RECORDED:
        reads[wrong] = trace.tokens + verified_of(trace).first[edges[of]] + inside[wrong] - kept[of]
    elif drafts.rejected == "own":
        reads[wrong] = np.minimum(token[wrong], end[of] - 1)
    else:
        drawn = hash53(seed + 1, edges[of] * 64 + inside[wrong]) % (end - first)[of].astype(np.uint64)
        reads[wrong] = first[of] + drawn.astype(np.int64)
    phase = np.where(decoded[share], DECODE, PREFILL).astype(np.int8)
    return Shares(begins, starts, Rows(token, request[share], phase, reads, draft.astype(np.int8)))
