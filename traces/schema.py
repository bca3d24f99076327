"""The data model of traces: geometry, router, header, the rows of a request, and the trace itself.

A trace has a flat token axis; requests are ranges of it. Shapes below use T tokens, L MoE layers, E experts, k active.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator, model_validator

from moereplay.traces.documents import Cached, Name, Notes, Public, Text, Window, canonical_digest
from moereplay.traces.documents import Frozen as Frozen
from moereplay.traces.documents import canonical as canonical
from moereplay.traces.texts import counted, shown, size
from moereplay.traces.values import DRAFT, Verified, of_rejected, verified
from moereplay.traces.values import LOOKAHEAD as LOOKAHEAD
from moereplay.traces.values import MOST_EXPERTS as MOST_EXPERTS
from moereplay.traces.values import TOKEN_ARRAYS as TOKEN_ARRAYS
from moereplay.traces.values import VALUES as VALUES
from moereplay.traces.values import RowError as RowError
from moereplay.traces.values import TraceError as TraceError
from moereplay.traces.values import Values as Values
from moereplay.traces.values import check_rows as check_rows
from moereplay.traces.values import check_values as check_values
from moereplay.traces.values import dtype_of as dtype_of
from moereplay.traces.values import first_refused as first_refused
from moereplay.traces.values import row_shape as row_shape
from moereplay.traces.values import values_of as values_of
from moereplay.traces.weight_formats import check_format

FORMAT_VERSION = 1
# Limits of a trace. Importers and the writer reject larger values with an error that names them.
MOST_LAYERS = 4_096  #: layers x experts is an int32 index
MOST_BYTES = 1 << 60  #: all experts together: sums of bytes are int64
LEAST_BITS, MOST_BITS = 0.1, 64.0  #: precision of an expert
MOST_MATRICES, MOST_PART = 16, 1_000_000  #: of an expert, and the relative size of one
MOST_BIAS = 126  #: correction bias of a router: scores, at most 1 without it, stay int32 in UNITs


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


class Rows(NamedTuple):
    """Experts of one layer and size, as a row each."""

    sizes: tuple[int, ...]  #: bytes of an expert
    layers: tuple[int, ...]
    of: np.ndarray  #: (L * E,) the row of every expert x

    @property
    def bytes(self) -> np.ndarray:
        """(L * E,) int64: the bytes of every expert x."""
        return np.array(self.sizes, np.int64)[self.of]


class Geometry(Public, Cached):
    """Sizes of a model's MoE part. `expert_bytes` is the size of the largest expert of each MoE layer as stored."""

    refused_as: ClassVar[type[Exception]] = TraceError
    later: ClassVar[frozenset[str]] = frozenset({"dense_bits", "dense_stated", "dense_bytes", "dense_layer_bytes"})
    later |= {"head_bytes", "weight_format", "dense_format", "matrices", "kv_bytes", "kv_windows", "hidden"}
    later |= {"bytes_by_expert"}

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
    #: (L, E) as stored, where experts of a layer differ; empty: each has the `expert_bytes` of its layer
    bytes_by_expert: tuple[tuple[int, ...], ...] = ()

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
        each = {"bytes_by_expert": tuple(map(min, self.bytes_by_expert))} if self._checked_table() else {}
        for name, sizes in ({"expert_bytes": self.expert_bytes} | each | dense | self.bytes_by_bits).items():
            if len(sizes) != self.layers:
                raise ValueError(f"bytes ({name}) has {len(sizes)} entries for {self.layers} layers")
            if min(sizes) < 1:
                raise ValueError(f"bytes ({name}) must be positive, found {shown(min(sizes))}")
            if sum(sizes) * self.experts > MOST_BYTES:
                raise ValueError(f"bytes ({name}) are more than 2**60 for all experts, at {shown(max(sizes))} each")
        return self

    def _checked_table(self) -> bool:
        """Return whether experts of a layer differ in bytes. Raises ValueError for a table of another shape."""
        if any(len(row) != self.experts for row in self.bytes_by_expert):
            raise ValueError(f"bytes_by_expert: expected {self.experts} sizes in each layer")
        if self.bytes_by_expert and tuple(map(max, self.bytes_by_expert)) != self.expert_bytes:
            raise ValueError("expert_bytes: expected the largest of each layer in bytes_by_expert")
        return bool(self.bytes_by_expert)

    def sized(self, table: Iterable[Iterable[int]]) -> Geometry:
        """Return the geometry with these bytes of each expert (L, E). Raises TraceError for another shape."""
        rows = tuple(map(tuple, table))
        equal = all(len(set(row)) == 1 for row in rows)
        fields = {name: getattr(self, name) for name in Geometry.model_fields}
        return Geometry(**fields | {"expert_bytes": tuple(map(max, rows)), "bytes_by_expert": () if equal else rows})

    def refuse_uneven(self, what: str) -> None:
        """Raises TraceError if experts of a layer differ in bytes, for `what` takes one size per layer."""
        if self.bytes_by_expert:
            raise TraceError(
                f"{what} requires experts of one size in each layer, and here they differ; `moereplay replay`, `curve` "
                "and `bounds` take them; or import the routing with --expert-bytes, one size per layer"
            )

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of all experts of each layer."""
        return tuple(map(sum, self.bytes_by_expert)) or tuple(self.experts * each for each in self.expert_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all experts."""
        return sum(self.layer_bytes)

    @property
    def mean_bytes(self) -> tuple[float, ...]:
        """Mean bytes of an expert, by layer."""
        return tuple(each / self.experts for each in self.layer_bytes)

    @property
    def rows(self) -> Rows:
        """The experts by size: a row is a layer, or a layer's experts of one size where they differ."""
        if not self.bytes_by_expert:
            return Rows(self.expert_bytes, tuple(range(self.layers)), np.arange(self.layers).repeat(self.experts))
        pairs = [(layer, size) for layer, sizes in enumerate(self.bytes_by_expert) for size in sizes]
        known = {pair: row for row, pair in enumerate(sorted(set(pairs)))}
        layers, sizes = zip(*known, strict=True)
        return Rows(sizes, layers, np.array([known[pair] for pair in pairs]))

    @property
    def mean_bits(self) -> float:
        """Bits per weight of the experts as stored, scales included; the stated precision where weights are unknown."""
        weights = self.layers * self.experts * (self.expert_params or 0)
        return 8 * self.total_bytes / weights if weights else self.expert_bits

    def __repr__(self) -> str:
        total = size(self.total_bytes)
        return f"<Geometry: {self.in_words}, {total} of experts at {self.mean_bits:.4g} bits>"

    __str__ = __repr__

    @property
    def in_words(self) -> str:
        """The numbers of a model's shape."""
        return f"{counted(self.layers, 'layer')} of {counted(self.experts, 'expert')}, k = {self.k}"

    def bytes_at(self, bits: float) -> tuple[int, ...]:
        """Return the bytes of one expert per layer at `bits`: known sizes, else scaled from 16 bits or the stored bits.

        Scaling is exact, with bits as decimals, and rounds up. Experts of a layer that differ are scaled from their
        mean; at the stored bits it is the largest.
        """
        if bits == self.expert_bits:
            return self.expert_bytes
        if bits in self.bytes_by_bits:
            return self.bytes_by_bits[int(bits)]
        ratio = Fraction(str(bits)) / Fraction(str(16 if 16 in self.bytes_by_bits else self.expert_bits))
        if 16 in self.bytes_by_bits:
            return tuple(ceil(size * ratio) for size in self.bytes_by_bits[16])
        return tuple(ceil(Fraction(of_layer, self.experts) * ratio) for of_layer in self.layer_bytes)

    def stored_at(self, bits: float) -> Geometry:
        """Return the geometry with experts stored at `bits`. Raises TraceError for an invalid precision."""
        try:
            check_bits(bits)
        except ValueError as wrong:
            raise TraceError(str(wrong)) from None
        if bits == self.expert_bits:
            return self
        stored = {"expert_bytes": self.bytes_at(bits), "expert_bits": bits, "bytes_by_expert": ()}
        return self.model_copy(update=stored)


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
    drafts: np.ndarray | None = None  #: (T,) drafts beside a known token, -1 for an accepted one (`values.py`)
    #: With `drafts`: rows (D, ...) of the rejected ones for each of the other arrays but `nll` and `residency`.
    rejected: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __repr__(self) -> str:
        tokens = counted(len(self.chosen), "token")
        return f"<Request: {tokens}, {self.prompt_length:,} of them the prompt; {', '.join(self.given())}>"

    def given(self) -> dict[str, np.ndarray]:
        """Return the arrays that are present by their name in the store, with their original dtype."""
        named = {name: getattr(self, name) for name in TOKEN_ARRAYS}
        named |= {f"{LOOKAHEAD}{depth}": rows for depth, rows in enumerate(self.lookahead, 1)}
        named |= {f"{DRAFT}{name}": rows for name, rows in self.rejected.items()}
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
    rejects: int = 0  #: D, rows of rejected drafts
    rejected: Mapping[str, Any] = field(default_factory=dict)  #: their arrays, by the name of the token array
    #: Cache of derived arrays for a trace that has no path and digest (`traces/derived.py`).
    shared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        name = shown(self.path.name if self.path else self.header.provenance.model)
        rows = f"{counted(self.tokens, 'token')} of {counted(self.requests, 'request')}"
        held = size(self.geometry.total_bytes)
        return f"<Trace {name}: {rows}, {self.geometry.in_words}, {held}; {', '.join(sorted(self.capabilities))}>"

    @property
    def geometry(self) -> Geometry:
        """Geometry of the header."""
        return self.header.geometry

    @property
    def tokens(self) -> int:
        """Number of tokens of all requests."""
        return int(self.request_offsets[-1])

    @property
    def rows(self) -> int:
        """Number of rows that have routing: tokens, then rejected drafts."""
        return self.tokens + self.rejects

    @cached_property
    def verified(self) -> Verified | None:
        """The recorded passes of drafts; None without a record of drafts. Raises TraceError if it is damaged."""
        if "drafts" not in self.arrays:
            return None
        ranges = np.asarray(self.request_offsets), np.asarray(self.prompt_lengths)
        return verified(self.read("drafts"), *ranges, self.rejects, f"{self.path or 'this trace'}: ")

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
        """Read rows [start, stop) of a token array; from T on, those of rejected drafts.

        Raises TraceError if it is missing or damaged.
        """
        if name not in self.arrays:
            raise TraceError(f"{self.path or 'this trace'} has no {name}; it holds {', '.join(sorted(self.arrays))}")
        stop = self.tokens if stop is None else stop
        if stop <= self.tokens or not self.rejects:
            return self._rows(self.arrays[name], name, start, stop)
        begin, end = max(start - self.tokens, 0), min(stop - self.tokens, self.rejects)
        beyond = self._rows(self.rejected[name], f"{DRAFT}{name}", begin, end)
        return np.concatenate([self.read(name, start, self.tokens), beyond]) if start < self.tokens else beyond

    def _rows(self, array: Any, name: str, start: int, stop: int) -> np.ndarray:
        where = f"{self.path}: {name} rows {start}-{stop}"
        try:
            return np.asarray(array[start:stop])
        except (ValueError, RuntimeError, OSError) as broken:  # a crc32c, blosc, or the disk
            why = "a checksum differs" if "checksum" in str(broken) else broken
            raise TraceError(f"{where} are damaged ({why}); restore the trace from a copy") from broken
        except MemoryError as full:
            raise TraceError(f"{where} do not fit in memory ({full}); check the sizes, or free memory") from full

    def rejected_rows(self, names: Iterable[str], start: int, stop: int) -> dict[str, np.ndarray]:
        """Return rows [start, stop) of rejected drafts for the token arrays among `names` that they have."""
        return {name: self.read(name, self.tokens + start, self.tokens + stop) for name in of_rejected(names)}

    def request(self, index: int) -> Request:
        """Return the rows of one request, as they were appended."""
        first, last = (int(offset) for offset in self.request_offsets[index : index + 2])
        return self.cut(first, last, int(self.prompt_lengths[index]))

    def cut(self, first: int, last: int, prompt_length: int) -> Request:
        """Return tokens [first, last) of a request as one of their own; `first` was known before its pass.

        A pass that goes on after `last` loses its rejected drafts.
        """
        rows: dict[str, Any] = {name: self.read(name, first, last) for name in self.arrays}
        if self.verified:
            rows["drafts"], span = self.verified.span(first, last)
            rows["rejected"] = self.rejected_rows(self.arrays, span.start, span.stop)
        look = tuple(rows.pop(f"{LOOKAHEAD}{d}") for d in range(1, self.header.lookahead_depth + 1))
        return Request(prompt_length=prompt_length, lookahead=look, **rows)


def check_request(request: Request, header: Header, index: int) -> dict[str, np.ndarray]:
    """Check shapes, ranges and distinct ids; return the request's arrays as stored. Raises RowError naming the row."""
    try:
        _check_given(request, header.geometry)
        arrays = request.arrays()
        check_ids(arrays, header.geometry)
    except TraceError as wrong:
        raise RowError(f"request {index}: {wrong}") from None
    return arrays


def _check_given(request: Request, geometry: Geometry) -> None:
    tokens = len(request.chosen)
    if tokens == 0 or not 0 <= request.prompt_length <= tokens:
        raise TraceError(f"{request.prompt_length} prompt tokens of {tokens}: expected at least one token")
    arrays = request.given()
    check_drafts(arrays, np.array([0, tokens]), np.array([request.prompt_length]))
    for name, rows in arrays.items():
        check_shape(name, rows, arrays, geometry)
        check_values(rows, name, name)


def check_shape(name: str, rows: np.ndarray, arrays: Mapping[str, np.ndarray], geometry: Geometry) -> None:
    """Check the shape of one of the arrays: rows as of `chosen`, or of `draft/chosen`. Raises TraceError."""
    first = f"{DRAFT}chosen" if name.startswith(DRAFT) else "chosen"
    expected = (len(arrays[first]), *row_shape(name, geometry))
    if rows.shape != expected:
        raise TraceError(f"{name} has shape {rows.shape}, expected {expected}")


def check_ids(arrays: Mapping[str, np.ndarray], geometry: Geometry) -> None:
    """Check the ids of tokens, and of rejected drafts if there are any. Raises TraceError."""
    for name in ("chosen", f"{DRAFT}chosen"):
        if name in arrays:
            check_rows(name, arrays[name], geometry)


def check_drafts(arrays: Mapping[str, np.ndarray], offsets: np.ndarray, prompts: np.ndarray) -> None:
    """Check drafts of whole requests and that the rejected ones have rows in the same arrays. Raises TraceError."""
    wanted = {f"{DRAFT}{name}" for name in of_rejected(arrays)}
    if differing := wanted ^ {name for name in arrays if name.startswith(DRAFT)}:
        listed = ", ".join(sorted(differing))
        raise TraceError(f"{listed}: expected rows of rejected drafts for every array that has routing, with drafts")
    if wanted:
        if arrays["drafts"].shape != (offsets[-1],):
            raise TraceError(f"drafts has shape {arrays['drafts'].shape}, expected {(int(offsets[-1]),)}")
        check_values(arrays["drafts"], "drafts", "drafts")
        verified(arrays["drafts"], offsets, prompts, len(arrays[f"{DRAFT}chosen"]))


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
    digest = canonical_digest([header.model_dump(mode="json"), hashes])
    rejected = {name: arrays.pop(f"{DRAFT}{name}") for name in of_rejected(arrays)}
    rejects = len(rejected.get("chosen", ()))
    return Trace(header, offsets, prompts, arrays, digest, router_bias=router_bias, rejects=rejects, rejected=rejected)
