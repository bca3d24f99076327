"""Checks for defects that real traces have had: shuffled rows, copied layers, context resets, wrong sizes.

Each check is a function of a `Sample` and returns a finding, or None if the trace lacks the data for it. The sample
is the first tokens of every request, so it is the same each time and bounded for traces of any length.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import lgamma, log
from typing import Literal

import numpy as np

from moereplay.traces.patterns import axes_of, beginnings, experts_per_layer, interleaved, overlap, reset_stride, shared
from moereplay.traces.routers import choice_scores
from moereplay.traces.schema import Geometry, Router, Trace
from moereplay.traces.summary import chance_of, experts_per_token
from moereplay.traces.texts import counted

SAMPLE_TOKENS = 20_000
FEWEST_PER_REQUEST = 64
FLOAT_TOKENS = 512  #: tokens of float arrays: these are E / k times larger than the ids, and faults in them not rare
MOST_LAYERS_KNOWN = 128  #: more than any model has so far
FEWEST_PAIRS = 32  #: fewer pairs give no meaningful mean overlap
MANY_PAIRS, FEWEST_LAYERS = 256, 4  #: required to correlate layers
SIGMAS_SHIFTED, CORRELATED = 8.0, 0.2  #: thresholds for a layer that is a token early or late
COMPARED = 4096  #: tokens on which layers are compared
ALIKE = 0.9  #: share of tokens at which two layers that are not copies never agree
FEWEST_BEGUN = 32  #: tokens of a common prefix
ABOVE_CHANCE = (
    0.02  #: real traces are 0.1 to 0.4 above the overlap of tokens half a request apart, shuffled ones within 0.01
)
AGREEMENT = 0.99  #: ties at low precision may fall either way
OFF = 0.05  #: relative error of a sum of weights, more than half precision causes


@dataclass(frozen=True)
class Sample:
    """The first tokens of every request; S tokens in all."""

    trace: Trace
    chosen: np.ndarray  #: (S, L, k)
    position: np.ndarray  #: (S,) token within the request
    spans: list[tuple[int, int]]  #: first token and last + 1 in the sample, per request
    ranges: list[tuple[int, int]]  #: the same in the trace

    @property
    def geometry(self) -> Geometry:
        """Geometry of the header."""
        return self.trace.geometry

    @property
    def chance(self) -> float:
        """Expected overlap of two random rows."""
        return chance_of(experts_per_token(self.trace), self.geometry.experts)

    def read(self, name: str) -> np.ndarray:
        """Read another array for the tokens of the sample."""
        return np.concatenate([self.trace.read(name, start, stop) for start, stop in self.ranges])

    def apart(self) -> float:
        """Return the overlap of tokens half a request apart, a baseline for neighbours. NaN if requests are short."""
        pairs = [(np.arange(start, stop - half), half) for start, stop in self.spans if (half := (stop - start) // 2)]
        if not pairs:
            return float("nan")
        earlier = np.concatenate([tokens for tokens, _ in pairs])
        later = np.concatenate([tokens + half for tokens, half in pairs])
        return float(overlap(self.chosen[earlier], self.chosen[later]).mean())

    def adjacent(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the overlap of each token with the one before it in its request, and the token's position."""
        later = np.flatnonzero(self.position > 0)
        return overlap(self.chosen[later - 1], self.chosen[later]), self.position[later]


def examine(trace: Trace, tokens: int = SAMPLE_TOKENS) -> tuple[Finding, ...]:
    """Return the findings of all checks that apply: some read every row, others about `tokens` tokens.

    Raises TraceError only if rows cannot be read.
    """
    sample = take_sample(trace, tokens)
    every_row = census(trace)
    findings = [check(sample) for check in CHECKS] + [check(trace, every_row) for check in CENSUS_CHECKS]
    return tuple(finding for finding in findings if finding is not None)


def take_sample(trace: Trace, tokens: int) -> Sample:
    """Return the first tokens of each request, equally many per request, `tokens` in total."""
    share = max(FEWEST_PER_REQUEST, tokens // max(trace.requests, 1))
    spans, ranges, taken = [], [], 0
    for start, end in zip(trace.request_offsets[:-1].tolist(), trace.request_offsets[1:].tolist(), strict=True):
        stop = min(end, start + share)
        spans.append((taken, taken + stop - start))
        ranges.append((start, stop))
        taken += stop - start
        if taken >= tokens:
            break
    chosen = np.concatenate([trace.read("chosen", start, stop) for start, stop in ranges])
    position = np.concatenate([np.arange(stop - start) for start, stop in ranges])
    return Sample(trace, chosen, position, spans, ranges)


def check_complete(sample: Sample) -> Finding:
    """Check that the recording is finished; an unfinished one is valid but not the whole run."""
    if sample.trace.complete:
        return Finding(
            "complete", "ok", f"{counted(sample.trace.requests, 'request')}, {counted(sample.trace.tokens, 'token')}"
        )
    return Finding(
        "complete", "warning", f"recording is unfinished after {counted(sample.trace.requests, 'request')}; resume it"
    )


def check_ids(sample: Sample) -> Finding:
    """Check that ids are in [-1, E) and distinct within a row."""
    ids, experts = sample.chosen, sample.geometry.experts
    outside = int(((ids < -1) | (ids >= experts)).sum())
    if outside:
        text = f"{outside} ids outside 0 to {experts - 1}, largest {ids.max()}: physical ids, or another model's sizes"
        return Finding("ids", "error", text)
    ordered = np.sort(ids, -1)
    repeats = int(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).sum())
    if repeats:
        text = f"{repeats} experts repeated within a row: k is wrong, or a strided view was read flat"
        return Finding("ids", "error", text)
    return Finding("ids", "ok", f"all in 0 to {experts - 1}, distinct within each row")


def check_padding(sample: Sample) -> Finding:
    """Check that -1 is only at the end of rows, and that no rank or layer is always empty."""
    empty = sample.chosen < 0
    holes = int((empty[..., :-1] & ~empty[..., 1:]).sum())
    if holes:
        return Finding("padding", "warning", f"-1 stands before a routed expert in {holes} places: no rank order")
    ranks, layers = np.flatnonzero(empty.all((0, 1))), np.flatnonzero(empty.all((0, 2)))
    if len(ranks) or len(layers):
        what = f"rank {ranks[0]}" if len(ranks) else f"layer {layers[0]}"
        return Finding("padding", "warning", f"{what} is -1 for every token; k or the number of layers is too large")
    partial = np.flatnonzero(empty.any((0, 2))).tolist()
    if partial:
        return Finding("padding", "ok", f"{empty.mean():.2%} of the places not routed, in layers {partial}")
    return Finding("padding", "ok", "every token routed to k experts")


def check_adjacent(sample: Sample) -> Finding:
    """Check that neighbouring tokens share experts; overlap at chance means that rows are not in text order."""
    overlaps, _ = sample.adjacent()
    if len(overlaps) < FEWEST_PAIRS:
        return Finding("adjacent overlap", "ok", f"{len(overlaps)} pairs of tokens: too few to judge")
    seen, apart = float(overlaps.mean()), sample.apart()
    text = f"adjacent tokens share {seen:.3f} of their experts"
    text += f" (chance {sample.chance:.3f}, half a request away {apart:.3f})"
    if seen > sample.chance * 1.1 and seen > apart + ABOVE_CHANCE:
        return Finding("adjacent overlap", "ok", text)
    if seen > 1 - ABOVE_CHANCE and apart > 1 - ABOVE_CHANCE:
        return Finding("adjacent overlap", "ok", f"{text}: tokens route alike in any order")
    batch = max(interleaved(sample.chosen[start:stop]) for start, stop in sample.spans)
    if batch > 1:
        text += f": rows {batch} apart share more, so {batch} texts alternate (sequence before batch)"
    else:
        text += ": rows are shuffled or interleaved, or a strided view was read flat"
    return Finding("adjacent overlap", "warning", text)


def check_same_token(sample: Sample) -> Finding | None:
    """Check that equal tokens use similar experts; overlap at chance means that ids and rows are misaligned."""
    if "token_ids" not in sample.trace.arrays:
        return None
    ids = sample.read("token_ids")
    order = np.argsort(ids, kind="stable")
    again = np.flatnonzero(ids[order][1:] == ids[order][:-1])
    if len(again) < FEWEST_PAIRS:
        return Finding("same-token overlap", "ok", f"{len(again)} repeated tokens: too few to judge")
    seen = float(overlap(sample.chosen[order[again]], sample.chosen[order[again + 1]]).mean())
    text = f"a repeated token shares {seen:.3f} of its experts (chance {sample.chance:.3f})"
    if seen > sample.chance + ABOVE_CHANCE:
        return Finding("same-token overlap", "ok", text)
    return Finding("same-token overlap", "warning", f"{text}: token ids and rows are not aligned")


def check_axes(sample: Sample) -> Finding:
    """Check that the first axis is tokens and the second layers."""
    found = axes_of(sample.chosen[start:stop] for start, stop in sample.spans)
    if found.layers_first:
        fix = "tokens and layers are probably exchanged; exchange them, or import an array with --axes layers,tokens,k"
        return Finding("axes", "warning", f"{found.why} (tokens, then layers): {fix}")
    if found.layers_first is None and sample.geometry.layers > MOST_LAYERS_KNOWN:
        text = (
            f"{sample.geometry.layers:,} layers, more than any known model has: tokens may have been taken for layers"
        )
        return Finding("axes", "warning", text)
    return Finding("axes", "ok", "neighbouring layers do not share more experts than neighbouring tokens")


def check_layers(sample: Sample) -> Finding:
    """Check that no two layers route alike; equal layers are copies, even if shifted by one token or sorted by id."""
    name = "identical layers"
    if len(sample.chosen) < FEWEST_PAIRS:
        return Finding(name, "ok", f"{len(sample.chosen)} tokens: too few to judge")
    if sample.geometry.k == sample.geometry.experts:
        return Finding(name, "ok", "every layer chooses all experts")
    for first, second, late, share in _alike(_sets(sample.chosen[:COMPARED])):
        if share == 1 and not late:
            return Finding(name, "error", f"layers [{first}, {second}] have identical rows: copies")
        level: Level = "error" if share == 1 else "warning"
        when = " one token later" if late else ""
        text = f"layer {second} has the rows of layer {first}{when} in {share:.1%} of {COMPARED:,} tokens or fewer"
        return Finding(name, level, f"{text}: a copy")
    return Finding(name, "ok", f"all {sample.geometry.layers} layers differ")


def _sets(chosen: np.ndarray) -> np.ndarray:
    """Return (T, L) hashes of each row's set of experts, in any order; 0 for an empty row."""
    odd = np.uint64(0x9E3779B97F4A7C15)
    mixed = (chosen.astype(np.int64) + 2).astype(np.uint64) * odd
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.where(chosen < 0, np.uint64(0), mixed).sum(-1, dtype=np.uint64)


def _alike(sets: np.ndarray) -> Iterator[tuple[int, int, int, float]]:
    """Yield pairs of varying layers that nearly always route alike, the delay of the second in tokens, and share."""
    varies = (sets != sets[0]).mean(0) > 1 - ALIKE
    for late in (0, 1):
        earlier, later = sets[: len(sets) - late], sets[late:]
        for layer in np.flatnonzero(varies).tolist():
            share = (later == earlier[:, layer : layer + 1]).mean(0)
            share[: layer + 1 if not late else 0] = 0
            share[layer] = 0
            for other in np.flatnonzero(share >= ALIKE).tolist():
                yield layer, other, late, float(share[other])


def check_shift(sample: Sample) -> Finding | None:
    """Check that layers change at the same tokens; a layer that changes a token early or late is shifted."""
    later = np.flatnonzero(sample.position[:COMPARED] > 0)
    if len(later) < MANY_PAIRS or sample.geometry.layers < FEWEST_LAYERS:
        return None
    before, after = sample.chosen[later - 1], sample.chosen[later]
    series = shared(before, after).astype(float)
    series -= series.mean(0)
    others = series.sum(1, keepdims=True) - series
    agree = {late: _correlation(series[1 + late : len(series) - 1 + late], others[1:-1]) for late in (-1, 0, 1)}
    for late in (-1, 1):  # as many tokens after the others
        apart = (agree[late] - agree[0]) * np.sqrt(len(series))
        if apart.max() > SIGMAS_SHIFTED and agree[late][apart.argmax()] > CORRELATED:
            when = "after" if late > 0 else "before"
            text = f"layer {apart.argmax()} changes one token {when} the other layers: its rows are shifted"
            return Finding("aligned layers", "warning", text)
    return Finding("aligned layers", "ok", "layers change at the same tokens")


def _correlation(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the correlation (L,) of columns (n, L); 0 for a constant column."""
    scale = np.sqrt((one**2).sum(0) * (other**2).sum(0))
    return (one * other).sum(0) / np.maximum(scale, 1e-9)


def check_resets(sample: Sample) -> Finding:
    """Check that overlap does not fall to chance at a fixed stride, where a recorder cleared its context."""
    overlaps, positions = sample.adjacent()
    stride = reset_stride(overlaps, positions, sample.chance) if len(overlaps) >= FEWEST_PAIRS else None
    if stride is None:
        return Finding("context resets", "ok", "no stride at which overlap falls to chance")
    level = overlaps[positions % stride == 0].mean()
    text = f"overlap falls to {level:.3f} every {stride} tokens: the context was cleared; import with --chunk {stride}"
    return Finding("context resets", "warning", text)


def check_duplicates(sample: Sample) -> Finding:
    """Check for equal requests, and for requests that begin like an earlier one."""
    lengths = np.diff(sample.trace.request_offsets)
    keys = [
        (int(lengths[index]), hashlib.blake2b(sample.chosen[start:stop].tobytes()).digest())
        for index, (start, stop) in enumerate(sample.spans)
    ]
    most, times = Counter(keys).most_common(1)[0]
    if times > 1:
        same = [index for index, key in enumerate(keys) if key == most]
        again = len(keys) - len(set(keys))
        text = f"{counted(again, 'request')} {'repeats' if again == 1 else 'repeat'} another one, "
        text += f"such as {same[0]} and {same[1]}"
        return Finding("duplicate requests", "warning", text)
    begun, tokens, longest = _begun_before(sample)
    if tokens < FEWEST_BEGUN:
        return Finding("duplicate requests", "ok", f"no two of {counted(len(keys), 'request')} are alike")
    text = (
        f"request {longest} begins with {tokens} rows of an earlier one; {begun:,} tokens of the sample "
        f"are in such prefixes"
    )
    return Finding(
        "duplicate requests", "warning", f"{text}: a prefix that an engine with a prefix cache computes once"
    )


def _begun_before(sample: Sample) -> tuple[int, int, int]:
    """Return the tokens in common prefixes with earlier requests, the longest such prefix, and its request."""
    known: set[int] = set()
    total, most, which = 0, 0, 0
    for index, (start, stop) in enumerate(sample.spans):
        hashes = beginnings(sample.chosen[start:stop])
        same = np.isin(hashes, np.fromiter(known, np.uint64, len(known))) if known else np.zeros(len(hashes), bool)
        alike = len(hashes) if same.all() else int(np.argmin(same))
        total, known = total + alike, known | set(hashes.tolist())
        if alike > most:
            most, which = alike, index
    return total, most, which


def check_finite(sample: Sample) -> Finding | None:
    """Check that recorded floats are finite."""
    names = [name for name in sample.trace.arrays if sample.trace.arrays[name].dtype.kind == "f"]
    if not names:
        return None
    for name in names:
        bad = int((~np.isfinite(sample.trace.read(name, 0, min(FLOAT_TOKENS, sample.trace.tokens)))).sum())
        if bad:
            return Finding("finite", "error", f"{name} has {bad} values that are not finite")
    return Finding("finite", "ok", f"{', '.join(sorted(names))}: all finite")


def check_ranks(sample: Sample) -> Finding | None:
    """Check that weights fall with rank, except for sigmoid routers, whose correction bias changes the order."""
    if "weights" not in sample.trace.arrays or sample.geometry.router.family == "sigmoid_groups":
        return None
    weights = sample.trace.read("weights", 0, min(FLOAT_TOKENS, sample.trace.tokens))
    falling = float((np.diff(weights, axis=-1) <= 0).all(-1).mean())
    if falling >= AGREEMENT:
        return Finding("rank order", "ok", f"weights fall with rank in {falling:.1%} of rows")
    text = f"weights fall with rank in only {falling:.1%} of rows: experts are not in rank order"
    return Finding("rank order", "warning", text)


def check_weights(sample: Sample) -> Finding | None:
    """Check that gate weights differ, are not all 0, and sum to the value that the header's router implies."""
    if "weights" not in sample.trace.arrays:
        return None
    stop = min(FLOAT_TOKENS, sample.trace.tokens)
    weights, routed = sample.trace.read("weights", 0, stop), sample.trace.read("chosen", 0, stop) >= 0
    whole = routed.all(-1)
    if not whole.any():
        return None
    rows, router = weights[whole], sample.geometry.router
    silent = float((rows == 0).all(-1).mean())
    if silent > 1 - AGREEMENT:
        return Finding("weights", "warning", f"all weights are 0 in {silent:.1%} of the routed rows: not recorded")
    if sample.geometry.k > 1 and len(rows) >= FEWEST_PAIRS and bool((rows == rows.flat[0]).all()):
        return Finding("weights", "warning", f"every weight is {rows.flat[0]:g}: no gate weights")
    if router != Router() and router.renormalise:
        sums = rows.sum(-1, dtype=np.float64)
        off = float((np.abs(sums - router.scale) > OFF * router.scale).mean())
        if off > 1 - AGREEMENT:
            text = f"weights sum to {np.median(sums):.3g} where router {router.family} makes {router.scale:g}"
            return Finding("weights", "warning", f"{text}, in {off:.1%} of the rows: another model's, or raw scores")
    return Finding("weights", "ok", "weights differ between experts")


def check_router(sample: Sample) -> Finding | None:
    """Check that the header's router chooses the recorded experts from the recorded logits."""
    if "logits" not in sample.trace.arrays:
        return None
    stop = min(FLOAT_TOKENS, sample.trace.tokens)
    router, k = sample.geometry.router, sample.geometry.k
    choice = choice_scores(router, sample.trace.read("logits", 0, stop), sample.trace.router_bias)
    chosen = sample.trace.read("chosen", 0, stop)
    picks = np.clip(chosen, 0, sample.geometry.experts - 1).astype(np.intp)
    # a tie may name either expert, so the scores of the chosen are compared, not their ids
    worst_best = -np.sort(-choice, -1)[..., k - 1 : k]
    agree = float((np.take_along_axis(choice, picks, -1) >= worst_best)[chosen >= 0].mean())
    text = f"router {router.family} chooses {agree:.1%} of the experts recorded"
    return Finding("router", "ok" if agree >= AGREEMENT else "warning", text)


CHECKS: tuple[Callable[[Sample], Finding | None], ...] = (
    check_complete,
    check_ids,
    check_padding,
    check_finite,
    check_adjacent,
    check_axes,
    check_same_token,
    check_layers,
    check_resets,
    check_duplicates,
    check_shift,
    check_weights,
    check_ranks,
    check_router,
)


# -- Checks of every row for patterns that no router produces, in one pass by blocks. A `Census` holds the counts of the
# -- pass: ranges of tokens that route nowhere or alike in all layers, and use of ids per layer. Each check is a
# -- function of it. The thresholds are far beyond real routing: in 135,000 tokens of gpt-oss-20b, Qwen3-30B-A3B and
# -- Gemma no two neighbours route alike in all layers, and no rank of a layer has one expert throughout.


BLOCK = 1 << 22  #: ids per block
MOST_KEPT = 1 << 16  #: ranges that are kept
SHORTEST = 4  #: equal neighbouring tokens that are reported
FEWEST_TOKENS = 32  #: with fewer tokens nothing is judged constant
IMPROBABLE = 1e-6  #: probability by chance
RARE = 100  #: row lengths that occur in less than one of this many rows do not determine k
FAR = 100.0  #: factor over the usual sum of weights, larger than differences between routers and layers

UNSEEN, SEVERAL = -1, -2  #: instead of the rank of an expert's uses
LONE_USES = 64  #: at one rank: beyond what routers show, in which experts of 32 uses have several ranks
FEWEST_USES = 4  #: of an expert whose rank says something

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """Result of one check. Error: the rows are certainly wrong; warning: they may be misleading."""

    check: str
    level: Level
    text: str
    noted: bool = False  #: True if an import prints it even when its level is ok


@dataclass
class Ranges:
    """Ranges of tokens with a common property, (request, first, last) by their positions in the request."""

    joins: int  #: ranges at this distance are joined: 1 for adjacent ranges, 0 for ranges that share a token
    found: list[tuple[int, int, int]] = field(default_factory=list)
    tokens: int = 0

    def add(self, request: int, first: int, last: int) -> None:
        """Add a range, or extend the last one."""
        self.tokens += last - first + 1
        if self.found and self.found[-1][0] == request and self.found[-1][2] + self.joins >= first:
            before = self.found.pop()
            first = before[1]
        if len(self.found) < MOST_KEPT:
            self.found.append((request, first, last))

    @property
    def longest(self) -> tuple[int, int, int]:
        """The longest range."""
        return max(self.found, key=lambda each: each[2] - each[1])

    def words(self) -> str:
        """Return in words the longest range and the number of others."""
        request, first, last = self.longest
        where = f"token {first}" if first == last else f"tokens {first} to {last}"
        others = len(self.found) - 1
        return f"{where} of request {request}" + (f", and {others} other ranges" if others else "")


@dataclass
class Census:
    """Counts of one pass over the rows."""

    tokens: int
    nowhere: Ranges = field(default_factory=lambda: Ranges(1))  #: -1 in every layer
    alike: Ranges = field(default_factory=lambda: Ranges(0))  #: runs of tokens that route alike in all layers
    pairs: int = 0  #: neighbours in a request that are both routed
    equal: int = 0  #: pairs that route alike
    rising: int = 0  #: rows of a layer with two experts or more whose ids rise
    falling: int = 0
    several: int = 0  #: rows of a layer with two experts or more
    uses: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))  #: (L, E)
    rank: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))  #: (L, E) of all uses, else `SEVERAL`
    constant: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool))  #: (L, k) one id throughout
    first: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))  #: (L, k) of the first routed token
    widths: np.ndarray = field(
        default_factory=lambda: np.zeros((0, 0), np.int64)
    )  #: (L, k + 1) rows of so many experts
    usual_sum: float = 0.0  #: median sum of the weights of a row, in the first rows that have any
    heavy: int = 0  #: rows whose weights sum to at least `FAR` times `usual_sum`
    heaviest: tuple[float, int, int, int] = (0.0, 0, 0, 0)  #: the largest sum; its request, token and layer

    @property
    def used(self) -> np.ndarray:
        """(L, E) bool: True if a layer uses an expert."""
        return self.uses > 0

    def least_and_most(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the least and the largest id of each layer (L,); 0 and -1 if a layer routes nothing."""
        any_used = np.any(self.used, axis=1)
        most = self.used.shape[1] - 1 - np.argmax(self.used[:, ::-1], 1)
        return np.where(any_used, np.argmax(self.used, 1), 0), np.where(any_used, most, -1)


def census(trace: Trace) -> Census:
    """Count over every row. Raises TraceError for damaged rows."""
    geometry = trace.geometry
    found = Census(trace.tokens, uses=np.zeros((geometry.layers, geometry.experts), np.int64))
    found.rank = np.full_like(found.uses, UNSEEN)
    found.constant = np.ones((geometry.layers, geometry.k), bool)
    found.widths = np.zeros((geometry.layers, geometry.k + 1), np.int64)
    for request, start, rows in _blocks(trace):
        before = 0 if start == 0 else 1  # the row before the block stands first
        _count(found, rows[before:])
        _neighbours(found, request, start - before, rows)
        gone = np.all(rows[before:] < 0, axis=(1, 2))
        for first, last in _runs(gone):
            found.nowhere.add(request, start + first, start + last)
        if "weights" in trace.arrays:
            begin = int(trace.request_offsets[request]) + start
            _weigh(found, request, start, trace.read("weights", begin, begin + len(rows) - before))
    return found


def _blocks(trace: Trace) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield request, position of the first token, and rows of a piece, with the row before it."""
    size = max(BLOCK // (trace.geometry.layers * trace.geometry.k), 2)
    offsets = trace.request_offsets.tolist()
    for request, (first, last) in enumerate(itertools.pairwise(offsets)):
        for start in range(first, last, size):
            rows = trace.read("chosen", max(start - 1, first), min(start + size, last))
            yield request, start - first, rows


def _count(found: Census, rows: np.ndarray) -> None:
    """Count uses of each expert per layer, ordered ids, and ranks that never change."""
    layers, experts = found.uses.shape
    inside = np.clip(rows, -1, experts - 1).astype(np.int64)
    flat = inside + (np.arange(layers) * (experts + 1))[:, None] + 1
    for rank in range(rows.shape[2]):
        seen = np.bincount(flat[:, :, rank].ravel(), minlength=layers * (experts + 1))
        seen = seen.reshape(layers, experts + 1)[:, 1:]
        found.uses += seen
        alone = (found.rank == UNSEEN) | (found.rank == rank)
        found.rank = np.where(seen > 0, np.where(alone, rank, SEVERAL), found.rank)
    wide = found.widths.shape[1]
    counts = (rows >= 0).sum(2, dtype=np.int64) + np.arange(layers) * wide
    found.widths += np.bincount(counts.ravel(), minlength=layers * wide).reshape(layers, wide)
    if rows.shape[2] > 1:
        whole = (rows >= 0).all(2)
        step = np.diff(rows, axis=2)
        found.several += int(whole.sum())
        found.rising += int(((step > 0).all(2) & whole).sum())
        found.falling += int(((step < 0).all(2) & whole).sum())
    routed = rows[(rows >= 0).any((1, 2))]
    if len(routed):
        if not found.first.size:
            found.first = routed[0].astype(np.int64)
        found.constant &= np.all(routed == found.first, axis=0)


def _weigh(found: Census, request: int, start: int, weights: np.ndarray) -> None:
    """Count rows whose weights (T, L, k) sum to far more than the usual row's."""
    sums = weights.sum(2, dtype=np.float64)
    if not found.usual_sum and (sums > 0).any():
        found.usual_sum = float(np.median(sums[sums > 0]))
    if found.usual_sum:
        found.heavy += int((sums >= FAR * found.usual_sum).sum())
    token, layer = np.unravel_index(int(sums.argmax()), sums.shape)
    if sums[token, layer] > found.heaviest[0]:
        found.heaviest = float(sums[token, layer]), request, start + int(token), int(layer)


def _neighbours(found: Census, request: int, start: int, rows: np.ndarray) -> None:
    """Count tokens whose rows equal the row before in every layer."""
    routed = np.any(rows >= 0, axis=(1, 2))
    both = routed[1:] & routed[:-1]
    same = np.all(rows[1:] == rows[:-1], axis=(1, 2)) & both
    found.pairs += int(both.sum())
    found.equal += int(same.sum())
    for first, last in _runs(same):
        found.alike.add(request, start + first, start + last + 1)


def _runs(flags: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield first and last index of every run of True."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0))
    yield from zip(edges[::2].tolist(), (edges[1::2] - 1).tolist(), strict=True)


# ---------------------------------------------------------------- checks


def check_routed(trace: Trace, found: Census) -> Finding:
    """Check that every token is routed in some layer."""
    gone = found.nowhere
    if not gone.tokens:
        return Finding("routed tokens", "ok", "every token is routed in some layer")
    text = f"{gone.tokens:,} of {found.tokens:,} tokens are routed nowhere (-1 in all layers): {gone.words()}"
    starts = trace.prompt_lengths.tolist()
    decoded = sum(max(last - max(first, starts[request]) + 1, 0) for request, first, last in gone.found)
    text += f"; {decoded:,} of them are decoded" if decoded else ""
    return Finding("routed tokens", "warning", f"{text}; they demand no experts, which makes bytes and times too low")


def check_repeats(trace: Trace, found: Census) -> Finding:
    """Check that no row repeats over many tokens, as from a padded or stale buffer."""
    if not found.alike.found:
        return Finding("repeated rows", "ok", "no two neighbouring tokens route alike in all layers")
    request, first, last = found.alike.longest
    length = last - first + 1
    rest = (found.equal - (length - 1) + 1) / (found.pairs + 2)
    share = f"{found.equal:,} of {found.pairs:,} neighbouring tokens route alike in all layers"
    if length < SHORTEST or found.pairs * rest ** (length - 1) > IMPROBABLE:
        return Finding("repeated rows", "ok", share)
    if _one_token(trace, request, first, last):
        return Finding("repeated rows", "ok", f"{share}, {found.alike.words()}, where the text has repeated one token")
    cause = "a stale or padded buffer, or an engine's warm-up pass"
    return Finding("repeated rows", "warning", f"{found.alike.words()} route alike in all layers: {cause}")


def _one_token(trace: Trace, request: int, first: int, last: int) -> bool:
    """Return True if the token ids of the range are recorded and equal."""
    if "token_ids" not in trace.arrays:
        return False
    begin = int(trace.request_offsets[request])
    ids = trace.read("token_ids", begin + first, begin + last + 1)
    return bool((ids == ids[0]).all())


def check_windows(trace: Trace, found: Census) -> Finding:
    """Check that layers share a range of ids; ids that continue from layer to layer are global numbers."""
    least, most = found.least_and_most()
    layers, distinct = len(least), int(found.used.sum())
    apart = layers > 1 and bool((most >= 0).all() and (least[1:] > most[:-1]).all())
    if not apart or distinct * log(layers) < -log(IMPROBABLE):
        return Finding("id ranges", "ok", "layers share the range of ids")
    shown = ", ".join(f"layer {at} {least[at]} to {most[at]}" for at in range(min(layers, 3)))
    text = f"no id is used in two layers: {shown}{', ...' if layers > 3 else ''}"
    each = experts_per_layer(least, most)
    if each is None:
        return Finding("id ranges", "error", f"{text}: expected ids of each layer from 0 on")
    fix = (
        f"ids continue through the layers, {each} in each instead of {trace.geometry.experts}; import with --ids global"
    )
    return Finding("id ranges", "error", f"{text}: {fix}")


def check_constant(trace: Trace, found: Census) -> Finding:
    """Check that choices change from token to token, unlike a dense layer's buffer or a shared expert."""
    k, routed = trace.geometry.k, found.tokens - found.nowhere.tokens
    if routed < FEWEST_TOKENS or k == trace.geometry.experts or not found.first.size:
        return Finding("constant experts", "ok", f"{routed:,} routed tokens: too few to judge")
    constant = found.constant & (found.first >= 0)
    whole = np.flatnonzero((constant | (found.first < 0)).all(1) & constant.any(1))
    if len(whole):
        text = f"layers {whole[:8].tolist()} choose the same experts for every token: dense, or never recorded"
        return Finding("constant experts", "error", text)
    ranks = np.flatnonzero(constant.sum(0) * 2 >= trace.geometry.layers)
    if len(ranks):
        text = f"rank {ranks[0]} has one expert for every token in {int(constant[:, ranks[0]].sum())} layers"
        return Finding("constant experts", "warning", f"{text}: possibly a shared expert recorded as a routed one")
    return Finding("constant experts", "ok", "every layer's choices change")


def check_ranks_apart(trace: Trace, found: Census) -> Finding | None:
    """Check that no rank has experts of its own, as copies of a shared expert or replicas that depend on the rank have.

    At most half of the ranks may be of that kind: in a made-up cycle all are.
    """
    k = trace.geometry.k
    if k == 1 or k == trace.geometry.experts:
        return None
    layers = np.zeros(k, np.int64)
    ids: list[list[int]] = [[] for _ in range(k)]
    for uses, rank in zip(found.uses, found.rank, strict=True):
        routed = int(uses.sum()) // k
        for at in range(k) if routed >= FEWEST_TOKENS else ():
            own = np.flatnonzero((rank == at) & (uses >= FEWEST_USES))
            if len(own) > 1 and (uses[own].sum() * 2 > routed or (uses[own] >= LONE_USES).sum() > 1):
                layers[at] += 1
                ids[at] = ids[at] or own.tolist()
    apart = np.flatnonzero(layers * 2 >= trace.geometry.layers)
    if not len(apart) or len(apart) * 2 > k:
        return Finding("experts by rank", "ok", "no rank has experts of its own")
    at = int(apart[0])
    listed = ", ".join(map(str, ids[at][:4])) + (", ..." if len(ids[at]) > 4 else "")
    text = (
        f"rank {at} has experts of its own ({listed}) in {layers[at]} layers, which no other rank chooses: copies of a"
    )
    text += " shared expert, or physical ids of replicas; use the logical ids, without shared experts"
    return Finding("experts by rank", "warning", text)


def check_sorted(trace: Trace, found: Census) -> Finding | None:
    """Check that experts are not sorted by id, which loses ranks; weights, if recorded, show the ranks anyway."""
    if "weights" in trace.arrays or found.several * lgamma(trace.geometry.k + 1) < -log(IMPROBABLE):
        return None
    for name, rows in (("rise", found.rising), ("fall", found.falling)):
        if rows == found.several:
            text = f"ids {name} in all of {rows:,} rows: sorted by id, so that ranks are lost"
            return Finding("rank order", "warning", f"{text}; results that depend on ranks are not the model's")
    return Finding("rank order", "ok", "ids are not sorted")


def check_range(trace: Trace, found: Census) -> Finding:
    """Check for ids that no layer uses: physical slots, the sizes of another model, or ids cut to too few bits."""
    experts = trace.geometry.experts
    choices = found.tokens * trace.geometry.layers * trace.geometry.k
    if choices < 50 * experts:
        return Finding("expert range", "ok", f"{choices:,} choices: too few to judge {experts} experts")
    idle = np.flatnonzero(~found.used.any(0))
    if not len(idle):
        return Finding("expert range", "ok", f"each of the {experts} experts is used in some layer")
    cause = "another model's sizes, or physical ids"
    highest = int(found.least_and_most()[1].max())
    if highest in (127, 255):
        cause += f", or ids cut to {(highest + 1).bit_length() - 1} bits"
    text = f"{len(idle)} of {experts} ids used in no layer (first {idle[0]}): {cause}"
    return Finding("expert range", "warning", text)


def check_widths(trace: Trace, found: Census) -> Finding:
    """Check that k is not too large because of a few damaged rows with more experts than the others."""
    name, k = "experts per row", trace.geometry.k
    rows = found.widths[:, 1:]
    usual = np.argmax(rows, 1)  # less one
    total, wider = rows.sum(1), np.where(np.arange(k) > usual[:, None], rows, 0).sum(1)
    fewer = int(sum(row[: np.flatnonzero(row)[-1]].sum() for row in rows if row.any()))
    odd = np.flatnonzero((wider > 0) & (wider * RARE <= np.maximum(total, RARE)) & (total >= SHORTEST))
    if len(odd):
        layer = int(odd[0])
        others = f", and in {len(odd) - 1} other layers alike" if len(odd) > 1 else ""
        text = f"{wider[layer]:,} of {total[layer]:,} rows of layer {layer} have more than {usual[layer] + 1} experts"
        text += f"{others}; rows with fewer than k = {k} are padded with -1: damaged rows make k too large"
        return Finding(name, "warning", text)
    if fewer:
        text = f"{fewer:,} of {int(total.sum()):,} rows have fewer experts than the widest row of their layer"
        return Finding(name, "ok", f"{text} (k = {k}), -1 in the remaining places", noted=True)
    return Finding(name, "ok", "all rows of a layer have the same number of experts")


def check_sums(trace: Trace, found: Census) -> Finding | None:
    """Check for damaged rows, whose weights are far larger than those of the others."""
    if "weights" not in trace.arrays or not found.usual_sum:
        return None
    if not found.heavy or found.heavy * RARE > max(found.tokens * trace.geometry.layers, RARE):
        return Finding("sums of weights", "ok", f"no row sums to {FAR:g} times the usual {found.usual_sum:.3g}")
    largest, request, token, layer = found.heaviest
    text = f"weights of token {token} of request {request}, layer {layer}, sum to {largest:,.6g}, usually to"
    text += f" {found.usual_sum:.3g}; {found.heavy:,} rows sum to {FAR:g} times that or more: damaged rows"
    return Finding("sums of weights", "warning", text)


CENSUS_CHECKS: tuple[Callable[[Trace, Census], Finding | None], ...] = (
    check_routed,
    check_repeats,
    check_windows,
    check_constant,
    check_ranks_apart,
    check_sorted,
    check_range,
    check_widths,
    check_sums,
)
