"""Checks for defects that real traces have had: shuffled rows, copied layers, context resets, wrong sizes.

Each check is a function of a `Sample` and returns a finding, or None if the trace lacks the data for it. The sample
is the first tokens of every request, so it is the same each time and bounded for traces of any length.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from moereplay.traces.oddities import CENSUS_CHECKS, Finding, Level, census
from moereplay.traces.patterns import axes_of, beginnings, interleaved, overlap, reset_stride, shared
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
