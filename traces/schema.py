"""The data model of traces: geometry, router, header, the rows of a request, and the trace itself.

A trace has a flat token axis; requests are ranges of it. Shapes below use T tokens, L MoE layers, E experts, k active.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator, model_validator

from moereplay.traces.documents import canonical
from moereplay.traces.frozen import Frozen as Frozen
from moereplay.traces.frozen import Name, Notes, Public, Text
from moereplay.traces.kv_cache import Cached, Window
from moereplay.traces.texts import shown
from moereplay.traces.weight_formats import check_format

FORMAT_VERSION = 1
# Limits of a trace. Importers and the writer reject larger values with an error that names them.
MOST_EXPERTS = 32_767  #: per layer: ids are int16, -1 is "not routed"
MOST_LAYERS = 4_096  #: layers x experts is an int32 index
MOST_BYTES = 1 << 60  #: all experts together: sums of bytes are int64
LEAST_BITS, MOST_BITS = 0.1, 64.0  #: precision of an expert
MOST_MATRICES, MOST_PART = 16, 1_000_000  #: of an expert, and the relative size of one
MOST_WEIGHT = 65_536  #: gate weight: sums over a pass are int64 in UNITs
MOST_BIAS = 126  #: correction bias of a router: scores, at most 1 without it, stay int32 in UNITs
LARGEST = float(np.finfo(np.float32).max)

#: Arrays along the token axis: name -> (dtype, axes after the token axis). `lookahead/d` follows `logits`.
TOKEN_ARRAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "chosen": ("<i2", ("layers", "k")),
    "weights": ("<f4", ("layers", "k")),
    "logits": ("<f4", ("layers", "experts")),
    "token_ids": ("<i4", ()),
    "nll": ("<f4", ()),
    "residency": ("i1", ("layers", "k")),
}
LOOKAHEAD, LOOKAHEAD_AXES = "lookahead/", ("<f4", ("layers", "experts"))


class Values(NamedTuple):
    """Range of an array's values as passed, before conversion to the stored dtype."""

    kinds: str  #: numpy's kinds of allowed dtypes
    least: float
    most: float

    @property
    def expected(self) -> str:
        """Range in words."""
        if "f" not in self.kinds:
            return f"a whole number from {self.least} to {self.most}"
        return "a finite number" if self.most == LARGEST else f"a number from {self.least} to {self.most}"


VALUES: dict[str, Values] = {
    "chosen": Values("iu", -1, MOST_EXPERTS - 1),
    "weights": Values("iuf", 0, MOST_WEIGHT),
    "logits": Values("iuf", -LARGEST, LARGEST),
    "token_ids": Values("iu", 0, 2**31 - 1),
    "nll": Values("iuf", -LARGEST, LARGEST),
    "residency": Values("iu", -1, 2),
}


class TraceError(Exception):
    """A trace, or a file to import, cannot be used; the message names the problem and what to do."""


class RowError(TraceError):
    """Invalid rows of a request; the message names the request but not the file that it came from."""


class Router(Public):
    """The rule by which logits become a choice and weights (`traces/routers.py`), with its constants.

    A correction bias is not a field but an array of the trace, `router_bias` (L, E).
    """

    refused_as: ClassVar[type[Exception]] = TraceError
    family: Literal["softmax_topk", "topk_softmax", "sparsemixer", "softmax_groups", "sigmoid_groups"] = "softmax_topk"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = Field(default=1, ge=1)
    groups_kept: int = Field(default=1, ge=1)
    jitter: float = Field(default=0.0, ge=0)


class Geometry(Public, Cached):
    """Sizes of a model's MoE part. `expert_bytes` is the size of one expert in each MoE layer as stored."""

    refused_as: ClassVar[type[Exception]] = TraceError
    later: ClassVar[frozenset[str]] = frozenset({"dense_bits", "dense_stated", "dense_bytes", "dense_layer_bytes"})
    later |= {"head_bytes", "weight_format", "dense_format", "matrices", "kv_bytes", "kv_windows", "hidden"}

    layers: int = Field(ge=1)
    experts: int = Field(ge=1)
    k: int = Field(ge=1)
    expert_bytes: tuple[int, ...]
    expert_bits: float = 16
    bytes_by_bits: dict[int, tuple[int, ...]] = Field(default_factory=dict)
    expert_params: int | None = None
    dense_params: int | None = None
    head_params: int | None = None
    shared_experts: int = Field(default=0, ge=0)
    router: Router = Router()
    dense_bits: float = 16  #: per dense weight, that is any weight outside the routed experts
    dense_stated: bool = False  #: True if `dense_bits` comes from a file or the user; otherwise 16 is an assumption
    dense_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)  #: all dense weights as stored; 0: unknown
    dense_layer_bytes: tuple[int, ...] = ()  #: (L,) dense weights in each MoE layer as stored; empty: unknown
    head_bytes: int | None = Field(default=None, ge=0, le=MOST_BYTES)  #: dense weights read outside the MoE layers
    weight_format: str = ""  #: of the experts, a name of `traces.weight_formats`
    dense_format: str = ""  #: of the dense weights, if a file or the user names one
    #: Relative sizes of an expert's matrices, in reading order; empty: unknown, taken as three equal ones
    matrices: tuple[Annotated[int, Field(ge=1, le=MOST_PART)], ...] = Field(default=(), max_length=MOST_MATRICES)
    kv_bytes: int = Field(default=0, ge=0, le=MOST_BYTES)  #: KV cache per position, all layers together
    kv_windows: tuple[Window, ...] = Field(default=(), max_length=16)  #: parts of `kv_bytes` that stop growing
    hidden: int = Field(default=0, ge=0, le=1 << 24)  #: width of the residual, which a router reads; 0: unknown

    @field_validator("weight_format", "dense_format")
    @classmethod
    def _format(cls, name: str) -> str:
        return check_format(name) if name else ""

    @model_validator(mode="after")
    def _consistent(self) -> Geometry:
        for name, most in (("layers", MOST_LAYERS), ("experts", MOST_EXPERTS)):
            if getattr(self, name) > most:
                raise ValueError(f"{shown(getattr(self, name))} {name}; a trace holds at most {most:,}")
        if self.k > self.experts:
            raise ValueError(f"k = {shown(self.k)} exceeds experts = {self.experts}")
        check_bits(self.expert_bits, self.dense_bits)
        dense = {"dense_layer_bytes": self.dense_layer_bytes or self.expert_bytes}
        for name, sizes in ({"expert_bytes": self.expert_bytes} | dense | self.bytes_by_bits).items():
            if len(sizes) != self.layers:
                raise ValueError(f"bytes ({name}) has {len(sizes)} entries for {self.layers} layers")
            if min(sizes) < 1:
                raise ValueError(f"bytes ({name}) must be positive, found {shown(min(sizes))}")
            if sum(sizes) * self.experts > MOST_BYTES:
                raise ValueError(f"bytes ({name}) are more than 2**60 for all experts, at {shown(max(sizes))} each")
        return self

    def bytes_at(self, bits: float) -> tuple[int, ...]:
        """Return the bytes of one expert per layer at `bits`: known sizes, else scaled from 16 bits or the stored bits.

        Scaling is exact, with bits as decimals, and rounds up.
        """
        if bits == self.expert_bits:
            return self.expert_bytes
        if bits in self.bytes_by_bits:
            return self.bytes_by_bits[int(bits)]
        known, sizes = (
            (16, self.bytes_by_bits[16]) if 16 in self.bytes_by_bits else (self.expert_bits, self.expert_bytes)
        )
        ratio = Fraction(str(bits)) / Fraction(str(known))
        return tuple(ceil(size * ratio) for size in sizes)

    def stored_at(self, bits: float) -> Geometry:
        """Return the geometry with experts stored at `bits`. Raises TraceError for an invalid precision."""
        try:
            check_bits(bits)
        except ValueError as wrong:
            raise TraceError(str(wrong)) from None
        return self.model_copy(update={"expert_bytes": self.bytes_at(bits), "expert_bits": bits})


class Provenance(Public):
    """Origin of a trace: model, source, tool. Every text is made printable and short (`traces/texts.py`).

    Replays read only the model's name: a known model supplies sizes that the geometry lacks and a platform prices.
    """

    refused_as: ClassVar[type[Exception]] = TraceError

    model: Name = "unknown"
    revision: Name = ""
    dtype: Name = ""
    source: Text = ""
    source_sha256: Name = ""
    importer: Name = ""
    prompts: Text = ""
    seed: int | None = None
    decoding: Text = ""
    versions: dict[Name, Name] = Field(default_factory=dict)
    notes: Notes = ()
    synthetic: Text = ""  #: statistics of generated routing, if `importer` no longer shows them

    later: ClassVar[frozenset[str]] = frozenset({"synthetic"})


class Header(Public):
    """Fields of a trace that are not arrays."""

    refused_as: ClassVar[type[Exception]] = TraceError
    geometry: Geometry
    provenance: Provenance = Provenance()
    lookahead_depth: int = Field(default=0, ge=0)
    lookahead_input: Literal["target_norm", "gate_input", "layer_output"] = "target_norm"


@dataclass(frozen=True)
class Request:
    """A prompt and its generated tokens. An optional array is given for every request of a trace or for none."""

    chosen: np.ndarray  #: (T, L, k) expert ids in rank order by choice score; -1 = not routed
    prompt_length: int
    weights: np.ndarray | None = None  #: (T, L, k) gate weights of the chosen
    logits: np.ndarray | None = None  #: (T, L, E) raw router logits
    lookahead: tuple[np.ndarray, ...] = ()  #: [d-1] is (T, L, E): layer l + d's gate on layer l's residual
    token_ids: np.ndarray | None = None  #: (T,) input tokens
    nll: np.ndarray | None = None  #: (T,) their negative log-likelihood
    residency: np.ndarray | None = None  #: (T, L, k) a foreign cache's verdict: 0 miss, 1 hit, 2 prefetched, -1 unknown

    def given(self) -> dict[str, np.ndarray]:
        """Return the arrays that are present by their name in the store, with their original dtype."""
        named = {name: getattr(self, name) for name in TOKEN_ARRAYS}
        named |= {f"{LOOKAHEAD}{depth}": rows for depth, rows in enumerate(self.lookahead, 1)}
        return {name: rows for name, rows in named.items() if rows is not None}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays with their stored dtype; `check_request` ensures that the conversion is lossless."""
        return {name: np.ascontiguousarray(rows, dtype_of(name)) for name, rows in self.given().items()}


@dataclass(frozen=True)
class Trace:
    """A readable trace: header, request ranges and lazily read arrays (zarr or numpy)."""

    header: Header
    request_offsets: np.ndarray  #: (R + 1,) int64, first token of each request
    prompt_lengths: np.ndarray  #: (R,) int64
    arrays: Mapping[str, Any]
    digest: str
    path: Path | None = None
    router_bias: np.ndarray | None = None  #: (L, E) f32
    complete: bool = True
    array_digests: Mapping[str, str] = field(default_factory=dict)
    #: Cache of derived arrays for a trace that has no path and digest (`traces/shared.py`).
    shared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def geometry(self) -> Geometry:
        """Geometry of the header."""
        return self.header.geometry

    @property
    def tokens(self) -> int:
        """Number of tokens of all requests."""
        return int(self.request_offsets[-1])

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.prompt_lengths)

    @property
    def capabilities(self) -> frozenset[str]:
        """Recorded data that policies may need: `ids` always; `weights`, `logits`, `lookahead` if recorded."""
        recorded = {name for name in ("weights", "logits") if name in self.arrays}
        return frozenset(recorded | {"ids"} | ({"lookahead"} if self.header.lookahead_depth else set()))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read rows [start, stop) of a token array. Raises TraceError if it is missing or damaged."""
        if name not in self.arrays:
            raise TraceError(f"{self.path or 'this trace'} has no {name}; it holds {', '.join(sorted(self.arrays))}")
        stop = self.tokens if stop is None else stop
        where = f"{self.path}: {name} rows {start}-{stop}"
        try:
            return np.asarray(self.arrays[name][start:stop])
        except (ValueError, RuntimeError, OSError) as broken:  # a crc32c, blosc, or the disk
            raise TraceError(f"{where} are damaged ({broken}); restore the trace from a copy") from broken
        except MemoryError as full:
            raise TraceError(f"{where} do not fit in memory ({full}); check the sizes, or free memory") from full

    def request(self, index: int) -> Request:
        """Return the rows of one request, as they were appended."""
        first, last = (int(offset) for offset in self.request_offsets[index : index + 2])
        rows = {name: self.read(name, first, last) for name in self.arrays}
        look = tuple(rows.pop(f"{LOOKAHEAD}{d}") for d in range(1, self.header.lookahead_depth + 1))
        return Request(prompt_length=int(self.prompt_lengths[index]), lookahead=look, **rows)


def dtype_of(name: str) -> str:
    """Return the stored dtype of a token array."""
    return LOOKAHEAD_AXES[0] if name.startswith(LOOKAHEAD) else TOKEN_ARRAYS[name][0]


def row_shape(name: str, geometry: Geometry) -> tuple[int, ...]:
    """Return the shape of one token's row of an array."""
    axes = LOOKAHEAD_AXES[1] if name.startswith(LOOKAHEAD) else TOKEN_ARRAYS[name][1]
    return tuple(getattr(geometry, axis) for axis in axes)


def values_of(name: str) -> Values:
    """Return the range of a token array's values."""
    return VALUES["logits" if name.startswith(LOOKAHEAD) else name]


def first_refused(values: np.ndarray, allowed: Values) -> tuple[int, ...] | None:
    """Return the index of the first number outside the range, or NaN; None if there is none."""
    if not values.size or (allowed.least <= values.min().item() and values.max().item() <= allowed.most):
        return None
    wide = values.astype(np.float64) if values.dtype.kind == "f" else values
    bad = np.argwhere(~((wide >= allowed.least) & (wide <= allowed.most)))
    return tuple(bad[0].tolist())


def check_values(values: np.ndarray, name: str, place: str) -> None:
    """Check values for the array `name` before conversion to its dtype. Raises TraceError naming `place` and index."""
    allowed = values_of(name)
    if values.dtype.kind not in allowed.kinds:
        wanted = "numbers" if "f" in allowed.kinds else "whole numbers"
        raise TraceError(f"{place} is an array of {values.dtype}: expected {wanted}")
    at = first_refused(values, allowed)
    if at is not None:
        raise TraceError(f"{place}{list(at)} is {values[at]}: expected {allowed.expected}")


def check_request(request: Request, header: Header, index: int) -> dict[str, np.ndarray]:
    """Check shapes, ranges and distinct ids; return the request's arrays as stored. Raises RowError naming the row."""
    try:
        _check_given(request, header.geometry)
        arrays = request.arrays()
        check_rows("chosen", arrays["chosen"], header.geometry)
    except TraceError as wrong:
        raise RowError(f"request {index}: {wrong}") from None
    return arrays


def _check_given(request: Request, geometry: Geometry) -> None:
    tokens = len(request.chosen)
    if tokens == 0 or not 0 <= request.prompt_length <= tokens:
        raise TraceError(f"{request.prompt_length} prompt tokens of {tokens}: expected at least one token")
    for name, rows in request.given().items():
        expected = (tokens, *row_shape(name, geometry))
        if rows.shape != expected:
            raise TraceError(f"{name} has shape {rows.shape}, expected {expected}")
        check_values(rows, name, name)


def check_rows(name: str, rows: np.ndarray, geometry: Geometry, where: str = "", first: int = 0) -> None:
    """Check rows of a token array (T, ...) as stored: values in range, ids below E and distinct within a layer.

    `first` is the token of the first row, and `where` begins the message. Raises TraceError naming token and layer.
    """
    allowed, expected = values_of(name), f"expected {values_of(name).expected}"
    if name == "chosen":
        allowed = allowed._replace(most=geometry.experts - 1)
        expected = f"ids are 0 to {geometry.experts - 1}, or -1 for not routed"
    at = first_refused(rows, allowed)
    if at is not None:
        raise TraceError(f"{where}{_element(name, first, at)} is {rows[at]}{_place(first, at)}: {expected}")
    if name == "chosen":
        _check_distinct(rows, where, first)


def _check_distinct(ids: np.ndarray, where: str, first: int) -> None:
    ordered = np.sort(ids, axis=-1)
    bad = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bad.any():
        at = tuple(np.argwhere(bad)[0, :2].tolist())
        row = ids[at].tolist()
        raise TraceError(f"{where}{_element('chosen', first, at)} repeats an expert: {row}{_place(first, at)}")


def _element(name: str, first: int, at: tuple[int, ...]) -> str:
    return f"{name}{[first + at[0], *at[1:]]}"


def _place(first: int, at: tuple[int, ...]) -> str:
    token, layer = first + at[0], f", layer {at[1]}" if len(at) > 1 else ""
    return f" (token {token}{layer})"


def check_bits(*precisions: float) -> None:
    """Raise ValueError for an invalid precision of weights, or NaN."""
    if wrong := [bits for bits in precisions if not LEAST_BITS <= bits <= MOST_BITS]:
        raise ValueError(f"invalid precision {shown(wrong[0])} bits: expected {LEAST_BITS:g} to {MOST_BITS:g}")


def memory_trace(header: Header, requests: list[Request], router_bias: np.ndarray | None = None) -> Trace:
    """Return a trace in memory."""
    checked = [check_request(request, header, index) for index, request in enumerate(requests)]
    lengths = [len(arrays["chosen"]) for arrays in checked]
    arrays = {name: np.concatenate([rows[name] for rows in checked]) for name in checked[0]}
    prompts = np.array([request.prompt_length for request in requests], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    content = {**arrays, "request_offsets": offsets, "prompt_lengths": prompts}
    content |= {} if router_bias is None else {"router_bias": router_bias}
    hashes = {name: hashlib.sha256(rows.tobytes()).hexdigest() for name, rows in content.items()}
    digest = hashlib.sha256(canonical([header.model_dump(mode="json"), hashes])).hexdigest()
    return Trace(header, offsets, prompts, arrays, digest, router_bias=router_bias)
