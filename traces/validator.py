"""Checks that catch the defects real traces have had: shuffled rows, copied layers, context resets, wrong sizes.

Each check is a function of a `Sample` and returns a finding, or None where the trace lacks what it needs. The sample
is the first tokens of every request, so it is the same each time and bounded for traces of any length.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from traces.overlap import interleaved, overlap, reset_stride
from traces.routers import choice_scores
from traces.schema import Geometry, Trace

SAMPLE_TOKENS = 20_000
FEWEST_PER_REQUEST = 64
FLOAT_TOKENS = 512  #: float arrays are E / k times larger than the ids, and faults in them are not rare events
FEWEST_PAIRS = 32  #: below this an average overlap says nothing
ABOVE_CHANCE = 0.02  #: real traces lie 0.1 to 0.4 above tokens half a request apart, shuffled ones within 0.01
AGREEMENT = 0.99  #: ties at low precision may fall either way

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """What one check saw. Error: the rows cannot be right; warning: they may not mean what they seem to."""

    check: str
    level: Level
    text: str


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
        """Sizes the header claims."""
        return self.trace.geometry

    @property
    def chance(self) -> float:
        """Overlap of two rows drawn at random."""
        return self.geometry.k / self.geometry.experts

    def read(self, name: str) -> np.ndarray:
        """The rows of another array for the tokens of the sample."""
        return np.concatenate([self.trace.read(name, start, stop) for start, stop in self.ranges])

    def apart(self) -> float:
        """Overlap of tokens half a request apart: likeness without adjacency. NaN if requests are short."""
        pairs = [(np.arange(start, stop - half), half) for start, stop in self.spans if (half := (stop - start) // 2)]
        if not pairs:
            return float("nan")
        earlier = np.concatenate([tokens for tokens, _ in pairs])
        later = np.concatenate([tokens + half for tokens, half in pairs])
        return float(overlap(self.chosen[earlier], self.chosen[later]).mean())

    def adjacent(self) -> tuple[np.ndarray, np.ndarray]:
        """Overlap of each token with the one before it, and its position; tokens of one request only."""
        later = np.flatnonzero(self.position > 0)
        return overlap(self.chosen[later - 1], self.chosen[later]), self.position[later]


def examine(trace: Trace, tokens: int = SAMPLE_TOKENS) -> tuple[Finding, ...]:
    """Findings of every check that applies, on about `tokens` tokens. Raises TraceError only if rows cannot be read."""
    sample = take_sample(trace, tokens)
    findings = (check(sample) for check in CHECKS)
    return tuple(finding for finding in findings if finding is not None)


def take_sample(trace: Trace, tokens: int) -> Sample:
    """The first tokens of each request, equally many, until `tokens` are reached."""
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
    """A recording that was cut short is valid, but not the whole run."""
    if sample.trace.complete:
        return Finding("complete", "ok", f"{sample.trace.requests} requests, {sample.trace.tokens} tokens")
    return Finding("complete", "warning", f"recording is unfinished after {sample.trace.requests} requests; resume it")


def check_ids(sample: Sample) -> Finding:
    """Ids lie in [-1, E) and do not repeat within a row."""
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
    """-1 stands at the end of a row, and no rank or layer is empty throughout."""
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
    """Neighbours in a text share experts; at chance, the rows are not in the order of the text."""
    overlaps, _ = sample.adjacent()
    if len(overlaps) < FEWEST_PAIRS:
        return Finding("adjacent overlap", "ok", f"{len(overlaps)} pairs of tokens: too few to judge")
    seen, apart = float(overlaps.mean()), sample.apart()
    text = f"adjacent tokens share {seen:.3f} of their experts"
    text += f" (chance {sample.chance:.3f}, half a request away {apart:.3f})"
    if seen > sample.chance * 1.1 and seen > apart + ABOVE_CHANCE:
        return Finding("adjacent overlap", "ok", text)
    batch = max(interleaved(sample.chosen[start:stop]) for start, stop in sample.spans)
    if batch > 1:
        text += f": rows {batch} apart share more, so {batch} texts alternate (sequence before batch)"
    else:
        text += ": rows are shuffled or interleaved, or a strided view was read flat"
    return Finding("adjacent overlap", "warning", text)


def check_same_token(sample: Sample) -> Finding | None:
    """A token met again goes to much the same experts; at chance, ids and rows belong to different tokens."""
    if "token_ids" not in sample.trace.arrays:
        return None
    ids = sample.read("token_ids")
    order = np.argsort(ids, kind="stable")
    again = np.flatnonzero(ids[order][1:] == ids[order][:-1])
    if len(again) < FEWEST_PAIRS:
        return Finding("same-token overlap", "ok", f"{len(again)} repeated tokens: too few to judge")
    seen = float(overlap(sample.chosen[order[again]], sample.chosen[order[again + 1]]).mean())
    text = f"a token met again shares {seen:.3f} of its experts (chance {sample.chance:.3f})"
    if seen > sample.chance + ABOVE_CHANCE:
        return Finding("same-token overlap", "ok", text)
    return Finding("same-token overlap", "warning", f"{text}: token ids and rows are not aligned")


def check_layers(sample: Sample) -> Finding:
    """No two layers route alike; equal ones are copies."""
    if len(sample.chosen) < FEWEST_PAIRS:
        return Finding("identical layers", "ok", f"{len(sample.chosen)} tokens: too few to judge")
    by_rows: dict[bytes, list[int]] = {}
    for layer in range(sample.geometry.layers):
        by_rows.setdefault(_hash(sample.chosen[:, layer]), []).append(layer)
    copies = [layers for layers in by_rows.values() if len(layers) > 1]
    if copies:
        return Finding("identical layers", "error", f"layers {copies[0]} have the same rows throughout: copies")
    return Finding("identical layers", "ok", f"all {sample.geometry.layers} layers differ")


def check_resets(sample: Sample) -> Finding:
    """Overlap that keeps falling to chance at one stride shows where the recorder cleared its context."""
    overlaps, positions = sample.adjacent()
    stride = reset_stride(overlaps, positions, sample.chance) if len(overlaps) >= FEWEST_PAIRS else None
    if stride is None:
        return Finding("context resets", "ok", "no stride at which overlap falls to chance")
    level = overlaps[positions % stride == 0].mean()
    text = f"overlap falls to {level:.3f} every {stride} tokens: the context was cleared; import with --chunk {stride}"
    return Finding("context resets", "warning", text)


def check_duplicates(sample: Sample) -> Finding:
    """Requests with the same rows count one prompt several times."""
    lengths = np.diff(sample.trace.request_offsets)
    keys = [(int(lengths[index]), _hash(sample.chosen[start:stop])) for index, (start, stop) in enumerate(sample.spans)]
    most, times = Counter(keys).most_common(1)[0]
    if times == 1:
        return Finding("duplicate requests", "ok", f"no two of {len(keys)} requests are alike")
    same = [index for index, key in enumerate(keys) if key == most]
    text = f"{len(keys) - len(set(keys))} requests repeat another one, such as {same[0]} and {same[1]}"
    return Finding("duplicate requests", "warning", text)


def check_physical(sample: Sample) -> Finding:
    """Ids that no layer ever uses suggest physical slots, or the sizes of another model."""
    experts = sample.geometry.experts
    if sample.chosen.size < 50 * experts:
        return Finding("expert range", "ok", f"{sample.chosen.size} choices: too few to judge {experts} experts")
    used = np.zeros(experts, bool)
    used[sample.chosen[(sample.chosen >= 0) & (sample.chosen < experts)]] = True
    if used.all():
        return Finding("expert range", "ok", f"each of the {experts} experts is used in some layer")
    idle = np.flatnonzero(~used)
    text = f"{len(idle)} of {experts} ids used in no layer (first {idle[0]}): another model's sizes, or physical ids"
    return Finding("expert range", "warning", text)


def check_finite(sample: Sample) -> Finding | None:
    """Recorded floats are numbers."""
    names = [name for name in sample.trace.arrays if sample.trace.arrays[name].dtype.kind == "f"]
    if not names:
        return None
    for name in names:
        bad = int((~np.isfinite(sample.trace.read(name, 0, min(FLOAT_TOKENS, sample.trace.tokens)))).sum())
        if bad:
            return Finding("finite", "error", f"{name} has {bad} values that are not finite")
    return Finding("finite", "ok", f"{', '.join(sorted(names))}: all finite")


def check_ranks(sample: Sample) -> Finding | None:
    """Rank order follows the weights, unless a correction bias ranks them (sigmoid routers)."""
    if "weights" not in sample.trace.arrays or sample.geometry.router.family == "sigmoid_groups":
        return None
    weights = sample.trace.read("weights", 0, min(FLOAT_TOKENS, sample.trace.tokens))
    falling = float((np.diff(weights, axis=-1) <= 0).all(-1).mean())
    if falling >= AGREEMENT:
        return Finding("rank order", "ok", f"weights fall with rank in {falling:.1%} of rows")
    text = f"weights fall with rank in only {falling:.1%} of rows: experts are not in rank order"
    return Finding("rank order", "warning", text)


def check_router(sample: Sample) -> Finding | None:
    """The header's router, given the logits, chooses what was chosen."""
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


def _hash(rows: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(rows).tobytes()).digest()


CHECKS: tuple[Callable[[Sample], Finding | None], ...] = (
    check_complete,
    check_ids,
    check_padding,
    check_finite,
    check_adjacent,
    check_same_token,
    check_layers,
    check_resets,
    check_duplicates,
    check_physical,
    check_ranks,
    check_router,
)
