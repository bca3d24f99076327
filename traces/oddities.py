"""Checks of every row for patterns that no router produces, in one pass by blocks.

A `Census` holds the counts of one pass: ranges of tokens that route nowhere or alike in all layers, and use of ids per
layer. Each check is a function of it. The thresholds are far beyond real routing: in 135,000 tokens of gpt-oss-20b,
Qwen3-30B-A3B and Gemma no two neighbours route alike in all layers, and no rank of a layer has one expert throughout.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import lgamma, log
from typing import Literal

import numpy as np

from moereplay.traces.patterns import experts_per_layer
from moereplay.traces.schema import Trace

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
    fewer = int(sum(each[: np.flatnonzero(each)[-1]].sum() for each in rows if each.any()))
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
