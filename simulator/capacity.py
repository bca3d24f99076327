"""Capacity: the text forms, the bytes of each pool, what residents leave of them, and how much memory is left.

5%        of all expert bytes at the trace's stored precision      5%@16   of their bytes at 16 bits
600MB  1.5GiB   bytes                51experts   mean experts      32/layer   experts of every layer
4+4+8experts    experts of each layer, which has a pool of so many
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import NamedTuple

import numpy as np

from moereplay.simulator.errors import ConfigError
from moereplay.traces.dense import assumption, dense_of, recorded, resolved, with_bits, with_bytes
from moereplay.traces.schema import MOST_BYTES as MOST_OF_TRACE
from moereplay.traces.schema import Geometry, Trace, TraceError, shown
from moereplay.traces.texts import size, whole

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
LONGEST = 40  #: characters of a capacity
MOST_BYTES = 1 << 62  #: engines count bytes in int64
#: Enough of a model to read a capacity by.
ONE_EXPERT = Geometry(layers=1, experts=1, k=1, expert_bytes=(1,))
FORMS = "5%, 5%@16, 600MB, 1.5GiB, 51experts, 32/layer or, by layer, 4+4+8experts"
BY_LAYER = re.compile(r"([0-9]{1,9}(?:\+[0-9]{1,9})+)\s*experts?")


@dataclass(frozen=True)
class Capacity:
    """Bytes of each pool, and the total in every form."""

    pools: tuple[int, ...]
    total: int
    percent_stored: float
    experts_of_layer: int
    per_layer: float
    token_cycles: float

    def forms(self) -> str:
        """Return the share, the bytes and the experts of a layer in one line."""
        held = f"{self.per_layer:.3g} of {self.experts_of_layer} experts per layer"
        return f"{self.percent_stored:.4g}% = {size(self.total)}, {held}"


def parse_capacity(
    text: str,
    geometry: Geometry,
    scope: str,
    tiers: tuple[tuple[int, ...], ...],
    reserved: int = 0,
    per_token: tuple[float, ...] = (),
    homes: Sequence[int] = (),
) -> Capacity:
    """Return the pools of a capacity. Raises ConfigError if it is invalid or smaller than a pool's largest expert.

    `tiers[0]` holds the bytes per layer at which experts are cached in this run; `reserved` bytes of the capacity
    belong to no pool. `per_token` is the number of experts of a token in each layer, if it differs from k. `homes` has
    the link of every expert x, for scope `per_link`.
    """
    listed = _pools_listed(text, geometry, scope, reserved)
    total = sum(listed) or _total(text, geometry)
    if total > MOST_BYTES:
        raise ConfigError(f"capacity {text} is more than 2**62 bytes; all experts of a trace are less than 2**60")
    share = max(0, total - reserved) / geometry.total_bytes
    if scope == "per_layer":
        pools = listed or tuple(int(share * size) for size in geometry.layer_bytes)
        largest = tiers[0]
    elif scope == "per_link":
        pools = tuple(int(share * sum(sizes)) for sizes in at_homes(homes, geometry.rows.bytes.tolist()))
        largest = tuple(max(sizes, default=0) for sizes in at_homes(homes, _of_every(tiers[0], geometry)))
    else:
        pools = (int(share * geometry.total_bytes),)
        largest = (max(tiers[0]),)
    for index, (pool, most) in enumerate(zip(pools, largest, strict=True)):
        if pool < most:
            where = {"per_layer": f"layer {index}'s pool", "per_link": f"link {index}'s pool"}.get(scope, "the pool")
            buffers = f" after {reserved:,} of side buffers" if reserved else ""
            raise ConfigError(
                f"capacity {text} gives {where} {pool:,} bytes{buffers}, less than one expert of {most:,}; raise it"
            )
    return _described(pools, geometry, tiers[0], per_token)


def at_homes(homes: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Return the bytes of the experts at each link; `sizes` are those of every expert x."""
    found: list[list[int]] = [[] for _ in range(max(homes) + 1)]
    for each, home in zip(sizes, homes, strict=True):
        found[home].append(each)
    return found


def by_layer(experts: Sequence[int]) -> str:
    """Return the capacity that gives each layer a pool of so many experts."""
    return f"{'+'.join(map(str, experts))}experts"


def _pools_listed(text: str, geometry: Geometry, scope: str, reserved: int) -> tuple[int, ...]:
    """Return the pools of a list of experts by layer, () for other forms. Raises ConfigError if it does not apply."""
    match = BY_LAYER.fullmatch(text)
    if not match:
        return ()
    counts = match[1].split("+")
    if scope != "per_layer":
        raise ConfigError(f"capacity {text} lists pools by layer: expected a total such as 25%, or --scope per_layer")
    if len(counts) != geometry.layers:
        raise ConfigError(
            f"capacity {text} has {len(counts)} layers, the model has {geometry.layers}; list a number for each"
        )
    if geometry.bytes_by_expert:
        raise ConfigError(
            f"capacity {text} counts experts, and those of a layer differ in bytes; pass --slots padded, or a total"
        )
    if reserved:
        raise ConfigError(f"capacity {text} leaves side buffers no bytes: choose count=beside, or a total such as 25%")
    return tuple(int(count) * size for count, size in zip(counts, geometry.expert_bytes, strict=True))


def _of_every(sizes: Sequence[int], geometry: Geometry) -> list[int]:
    """Return the bytes of every expert x, given those by layer; the expert's own where they differ."""
    if geometry.bytes_by_expert:
        return geometry.rows.bytes.tolist()
    return [size for size in sizes for _ in range(geometry.experts)]


def padded(geometry: Geometry, scope: str, homes: Sequence[int] = ()) -> Geometry:
    """Return the geometry as slots hold it that all have the bytes of their pool's largest expert.

    `homes` as in `parse_capacity`.
    """
    each, many = geometry.rows.bytes, geometry.layers * geometry.experts
    pool_of = np.array(homes) if homes else np.arange(many) // geometry.experts * (scope == "per_layer")
    largest = np.zeros(pool_of.max() + 1, np.int64)
    np.maximum.at(largest, pool_of, each)
    return geometry.sized(largest[pool_of].reshape(-1, geometry.experts).tolist())


def check_readable(text: str) -> None:
    """Raises ConfigError for a text that is not a capacity for any model."""
    if not BY_LAYER.fullmatch(text):
        _total(text, ONE_EXPERT)


def _described(
    pools: tuple[int, ...], geometry: Geometry, sizes: tuple[int, ...], per_token: tuple[float, ...]
) -> Capacity:
    total, stored = sum(pools), geometry.total_bytes
    each = geometry.mean_bytes if geometry.bytes_by_expert else sizes
    mean = sum(each) / geometry.layers
    return Capacity(
        pools=pools,
        total=total,
        percent_stored=100 * total / stored,
        experts_of_layer=geometry.experts,
        per_layer=total / mean / geometry.layers,
        token_cycles=total / _token_bytes(geometry, each, per_token),
    )


def _differs(geometry: Geometry, per_token: tuple[float, ...]) -> bool:
    return any(count != geometry.k for count in per_token)


def _token_bytes(geometry: Geometry, sizes: Sequence[float], per_token: tuple[float, ...]) -> float:
    """Return the bytes that one token demands over all layers."""
    if not _differs(geometry, per_token):
        return sum(sizes) * geometry.k
    return sum(size * count for size, count in zip(sizes, per_token, strict=True))


def _total(text: str, geometry: Geometry) -> Fraction:
    """Return the exact bytes over all layers. Raises ConfigError for an invalid capacity."""
    if len(text) > LONGEST:
        raise ConfigError(f"capacity {text[:LONGEST]!r}... has {len(text):,} characters: expected {FORMS}")
    if match := re.fullmatch(rf"{NUMBER}%(?:@{NUMBER})?", text):
        bits = float(match[2]) if match[2] else geometry.expert_bits
        if bits <= 0:
            raise ConfigError(f"capacity {text!r}: bits must be positive")
        stored = geometry.experts * sum(geometry.bytes_at(bits))
        return Fraction(match[1]) / 100 * (geometry.total_bytes if bits == geometry.expert_bits else stored)
    if (size := parse_size(text)) is not None:
        return size
    if match := re.fullmatch(rf"{NUMBER}\s*experts?", text):
        return Fraction(match[1]) * geometry.total_bytes / (geometry.layers * geometry.experts)
    if match := re.fullmatch(rf"{NUMBER}/layer", text):
        return Fraction(match[1]) * geometry.total_bytes / geometry.experts
    raise ConfigError(f"invalid capacity {text!r}: expected {FORMS}")


def parse_size(text: str) -> Fraction | None:
    """Return `600MB` or `1.5GiB` in exact bytes; None for anything else, including numbers without a unit."""
    match = re.fullmatch(rf"{NUMBER}\s*({'|'.join(UNITS)})", text) if len(text) <= LONGEST else None
    return Fraction(match[1]) * UNITS[match[2]] if match else None


def dense_size(text: str) -> int:
    """Return the bytes of `--dense`, as 1816MiB or a whole number. Raises ValueError."""
    size = whole(text) or parse_size(text)
    if not size or size > MOST_OF_TRACE:
        raise ValueError(f"invalid --dense {text[:LONGEST]!r}: expected a size such as 1816MiB, 11.4GB or 1904214016")
    return int(size)


def surplus(capacity: Capacity, geometry: Geometry, taken: np.ndarray, homes: Sequence[int] = ()) -> str | None:
    """Return the warning for a capacity that holds all copies at every precision, or None.

    `taken`: the bytes of every copy in its pool, those of an expert in sequence; `homes` as in `parse_capacity`.
    """
    if homes:
        of, pools = taken.reshape(len(homes), -1), np.array(homes)
        needed = [int(of[pools == pool].sum()) for pool in range(len(capacity.pools))]
    else:
        needed = taken.reshape(len(capacity.pools), -1).sum(1).tolist()
    if capacity.total <= sum(needed) or any(pool < need for pool, need in zip(capacity.pools, needed, strict=True)):
        return None
    every = f"all {geometry.layers * geometry.experts:,} experts"
    times = f"{capacity.total / sum(needed):.4g} times"
    return f"capacity is {times} {every}: everything fits and nothing is ever evicted"


def cliff(
    capacity: Capacity, geometry: Geometry, sizes: tuple[int, ...], per_token: tuple[float, ...] = ()
) -> str | None:
    """Return the warning for a capacity below one token's demand, or None.

    `sizes` are the fewest bytes of an expert by layer. Between two uses of an expert, a token uses all its experts of
    every other layer. A global LRU that fetched them all still holds the expert only if they fit as well. The layer
    whose own experts have the most bytes needs the least capacity for that.
    """
    if capacity.token_cycles >= 1:
        return None
    text = "capacity below one token cycle, one token's demand over all layers"
    counts = per_token if _differs(geometry, per_token) else (geometry.k,) * geometry.layers
    own = max((count - 1) * size for count, size in zip(counts, sizes, strict=True))
    least = _token_bytes(geometry, sizes, per_token) - own
    each = (
        f"{geometry.k} experts in every layer"
        if counts[0] == min(counts) == max(counts)
        else f"{sum(counts):.4g} experts"
    )
    if len(capacity.pools) == 1 and capacity.total < least:
        text += (
            "; a global LRU that starts cold, fetches every miss and does not prefetch hits nothing "
            f"on one-token passes that use {each}"
        )
    return text


# memory

CONTEXT = 4096  #: positions in the KV cache, assumed by default
RUNTIME = 500_000_000  #: bytes, assumed by default: buffers, the engine's code, an accelerator's context


class Memory(NamedTuple):
    """Division of a fast memory, in bytes."""

    total_bytes: int
    dense_bytes: int  #: weights of everything except routed experts; `traces/dense.py` says which are counted
    kv_bytes: int
    runtime_bytes: int
    head_bytes: int = 0  #: of a layer that drafts

    @property
    def cache_bytes(self) -> int:
        """Bytes left for experts, at least 0."""
        taken = self.dense_bytes + self.kv_bytes + self.runtime_bytes + self.head_bytes
        return max(0, self.total_bytes - taken)


def sized(geometry: Geometry, model: str, dense: str = "", dense_bits: str = "") -> Geometry:
    """Return the geometry of `model` with its dense weight bytes, if known.

    `dense` and `dense_bits` are the settings of those names; they override the trace. Raises ConfigError.
    """
    try:
        if dense_bits:
            geometry = with_bits(geometry, model, dense_bits)
        return resolved(with_bytes(geometry, dense_size(dense)) if dense else geometry, model)
    except (TraceError, ValueError) as wrong:
        raise ConfigError(str(wrong)) from None


def divided(trace: Trace, total: int, context: int, runtime: str = "", dense: str = "", dense_bits: str = "") -> Memory:
    """Divide the memory `total` of a machine that runs the trace's model with `context` KV cache positions.

    Raises ConfigError for an invalid size, and if not one expert fits, with the missing bytes.
    """
    about = trace.header.provenance
    geometry = sized(_as_known(trace), about.model, dense, dense_bits)
    dense_bytes = dense_of(geometry).resident
    taken = size_of(runtime, "runtime") if runtime else RUNTIME
    found = Memory(total, dense_bytes, geometry.kv_held(context), taken)
    largest = max(geometry.expert_bytes)
    if found.cache_bytes < largest:
        said = assumption(geometry, recorded(about))
        lacking = found.dense_bytes + found.kv_bytes + found.runtime_bytes + largest - found.total_bytes
        raise ConfigError(
            f"{size(total)} of memory cannot hold {_spelled(found)} and an expert of {largest:,} bytes: "
            f"{size(lacking)} are missing; give more memory, a smaller --runtime, a shorter --context, or fewer bits "
            "per weight: --dense or --dense-bits here, --expert-bits where the trace is made"
            f"{f' ({said})' if said else ''}"
        )
    return found


def kv_bytes_of(trace: Trace) -> int:
    """Return the KV cache bytes of one position, from the trace or its model's name; 0 if unknown."""
    return _as_known(trace).kv_bytes


def _as_known(trace: Trace) -> Geometry:
    from moereplay.traces.geometry import as_known  # as in traces.dense: few replays need the known models

    return as_known(trace.geometry, trace.header.provenance.model)


def size_of(text: str, what: str) -> int:
    """Return the bytes of `8GB` or `7.5GiB`. Raises ConfigError naming the option `what`."""
    size = parse_size(text)
    if size is None:
        raise ConfigError(f"invalid --{what} {shown(text)!r}: expected {with_unit('size', text, '500', 'MB')}")
    return int(size)


def memory_of(text: str, option: str) -> int:
    """Return the bytes of a device's memory as it is sold, in powers of two: 64GB and 64GiB are 64 * 2**30 bytes.

    Raises ConfigError naming the option for none, and for more than an engine counts.
    """
    size = parse_size(re.sub("(?<=[KMGT])B$", "iB", text.strip()))
    if size is None or not 1 <= size <= MOST_BYTES:
        raise ConfigError(f"invalid --{option} {shown(text)!r}: expected {with_unit('size', text, '64', 'GB')}")
    return int(size)


def with_unit(what: str, text: str, example: str, unit: str) -> str:
    """Return what was expected: the number that was typed with a unit, or an example."""
    number = text.strip() if len(text) <= LONGEST and re.fullmatch(NUMBER, text.strip()) else example
    return f"a {what} with a unit, such as {number}{unit}"


def _spelled(memory: Memory) -> str:
    named = {"dense weights": memory.dense_bytes, "KV cache": memory.kv_bytes, "runtime": memory.runtime_bytes}
    return ", ".join(f"{size(count)} of {name}" for name, count in named.items() if count)


# experts that are in the fast tier for good

#: In place of an expert: all of its layer. In place of a layer: all layers.
ALL = -1
MOST_LAYERS = 1 << 20  #: of a range
Listed = tuple[tuple[int, int], ...]
EVERY_EXPERT: Listed = ((ALL, ALL),)


def layers_in(text: str) -> tuple[int, ...]:
    """Return the layers of `A-B,C`, both ends of a range included, in the order of the text. Raises ValueError."""
    layers = list[int]()
    for part in text.split(","):
        ends = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, -1)
        if last - first not in range(MOST_LAYERS):
            raise ValueError(f"invalid layers {text!r}: expected A-B, as in 0-3,8")
        layers += range(first, last + 1)
    return tuple(layers)


def of_layers(text: str) -> Listed:
    """Return what `layers:A-B,C` or `all` names: all experts of these MoE layers, both ends included.

    Raises ConfigError.
    """
    if text == "all":
        return EVERY_EXPERT
    try:
        layers = layers_in(text.removeprefix("layers:"))
    except ValueError:
        raise ConfigError(
            f"invalid --resident {text!r}: expected layers:A-B, as in layers:0-3,8, all, or a JSON file"
        ) from None
    return tuple((layer, ALL) for layer in layers)


def residents(listed: Listed, geometry: Geometry) -> Listed:
    """Return every (layer, expert) that a list names. Raises ConfigError for what the model lacks."""
    every, layers = range(geometry.experts), range(geometry.layers)
    placed = [(each, expert) for layer, expert in listed for each in (layers if layer == ALL else (layer,))]
    named = [(layer, e) for layer, expert in placed for e in (every if expert == ALL else (expert,))]
    check_experts("resident", tuple(named), geometry)
    return tuple(named)


def pairs_of(listed: Listed) -> np.ndarray:
    """Return a list as an array (n, 2) of layers and experts. Raises OverflowError for numbers of more than 64 bits."""
    for known, pairs in tuple(_recent):  # a replay reads a list of 20,000 experts several times
        if known is listed:
            return pairs
    pairs = np.fromiter(chain.from_iterable(listed), np.int64, 2 * len(listed)).reshape(-1, 2)
    pairs.flags.writeable = False
    _recent.append((listed, pairs))
    return pairs


_recent: deque[tuple[Listed, np.ndarray]] = deque(maxlen=8)  #: lists of this process, and their arrays


def bytes_before(pools: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the bytes that a list names before each entry in the same pool, by every entry's pool and size."""
    order = np.argsort(pools, kind="stable")
    of, ends = pools[order], np.cumsum(sizes[order])
    before = np.empty_like(ends)
    before[order] = ends - sizes[order] - (ends - sizes[order])[np.searchsorted(of, of)]
    return before


def check_experts(option: str, listed: Listed, geometry: Geometry) -> None:
    """Raises ConfigError for an expert that is listed twice, or that the model lacks."""
    if not listed:
        return
    with suppress(OverflowError):
        pairs = pairs_of(listed)
        inside = ((pairs >= 0) & (pairs < (geometry.layers, geometry.experts))).all()
        if inside and np.bincount(pairs @ (geometry.experts, 1), minlength=1).max() <= 1:
            return
    for (layer, expert), times in Counter(listed).items():
        if times > 1:
            raise ConfigError(f"{option} lists expert {expert} of layer {layer} {times} times")
        if not (0 <= layer < geometry.layers and 0 <= expert < geometry.experts):
            raise ConfigError(
                f"{option} lists expert {expert} of layer {layer}; "
                f"the model has {geometry.layers} layers of {geometry.experts}"
            )


def room(
    pools: Sequence[int], pool_of: Sequence[int], sizes: Sequence[int], experts: int, listed: Listed, fetches: bool
) -> tuple[int, ...]:
    """Return the bytes that residents leave of each pool.

    `pool_of` has the pool of every expert x, `sizes` its bytes there; a layer has `experts`; `fetches`: a miss may have
    to be fetched. Raises ConfigError if the residents do not fit, or if no other expert of the pool fits beside them.
    """
    if not listed:
        return tuple(pools)
    left, there = list(pools), {layer * experts + expert for layer, expert in listed}
    for x in there:
        left[pool_of[x]] -= sizes[x]
    largest = [0] * len(left)
    for x, pool in enumerate(pool_of):
        if x not in there:
            largest[pool] = max(largest[pool], sizes[x])
    for pool, (given, free, most) in enumerate(zip(pools, left, largest, strict=True)):
        if free < 0:
            raise ConfigError(
                f"--resident fills pool {pool} with {given - free:,} bytes, its capacity is {given:,}; "
                "name fewer experts"
            )
        if fetches and free < most:
            raise ConfigError(
                f"--resident leaves {free:,} of the {given:,} bytes of pool {pool}, less than an expert of {most:,} "
                "that may have to be fetched; name fewer experts, or choose --miss cpu, which fetches none"
            )
    return tuple(left)
