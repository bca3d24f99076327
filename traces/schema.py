"""What a trace is: geometry, router, header, the rows of a request, and the trace itself.

A trace has a flat token axis; requests are ranges of it. Shapes below use T tokens, L MoE layers, E experts, k active.
Nothing here touches a disk: `traces/store.py` does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

FORMAT_VERSION = 1

#: Arrays along the token axis: name -> (dtype, axes after the token axis). `lookahead/d` follows `logits`.
TOKEN_ARRAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "chosen": ("<i2", ("layers", "k")),
    "weights": ("<f4", ("layers", "k")),
    "logits": ("<f4", ("layers", "experts")),
    "token_ids": ("<i4", ()),
    "nll": ("<f4", ()),
    "residency": ("i1", ("layers", "k")),
}
LOOKAHEAD = "lookahead/"
LOOKAHEAD_AXES = ("<f4", ("layers", "experts"))

WEIGHT_LIMIT = 1 << 16  #: of a gate weight: sums over a pass's tokens stay integers of 64 bits (`demand.to_units`)
BIAS_LIMIT = 126  #: of a correction bias: scores, at most 1 before it, stay integers of 32 bits


class TraceError(Exception):
    """A trace, or a file on its way to becoming one, cannot be used; the message names the thing and the fix."""


class Frozen(BaseModel):
    """Immutable, and no unknown keys: a misspelt setting is an error, not a silence."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Router(Frozen):
    """How logits become a choice and weights (`traces/routers.py`); every constant the rule needs.

    The correction bias of routers that have one is an array of the trace, `router_bias` (L, E), not an attribute.
    """

    family: Literal["softmax_topk", "topk_softmax", "sparsemixer", "softmax_groups", "sigmoid_groups"] = "softmax_topk"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = Field(default=1, ge=1)
    groups_kept: int = Field(default=1, ge=1)
    jitter: float = Field(default=0.0, ge=0)


class Geometry(Frozen):
    """Sizes of a model's MoE part; bytes are of one expert, per MoE layer, at the stored precision."""

    layers: int = Field(ge=1)
    experts: int = Field(ge=1)
    k: int = Field(ge=1)
    expert_bytes: tuple[int, ...]
    expert_bits: float = Field(default=16, gt=0)
    bytes_by_bits: dict[int, tuple[int, ...]] = Field(default_factory=dict)
    expert_params: int | None = None
    dense_params: int | None = None
    head_params: int | None = None
    shared_experts: int = Field(default=0, ge=0)
    router: Router = Router()

    @model_validator(mode="after")
    def _consistent(self) -> Geometry:
        if self.k > self.experts:
            raise ValueError(f"k = {self.k} exceeds experts = {self.experts}")
        for name, sizes in (("expert_bytes", self.expert_bytes), *self.bytes_by_bits.items()):
            if len(sizes) != self.layers:
                raise ValueError(f"bytes ({name}) has {len(sizes)} entries for {self.layers} layers")
            if min(sizes) < 1:
                raise ValueError(f"bytes ({name}) must be positive, found {min(sizes)}")
        return self

    def bytes_at(self, bits: float) -> tuple[int, ...]:
        """Bytes of one expert per layer at `bits`: the sourced figure where known, else scaled from the stored one."""
        if bits == self.expert_bits:
            return self.expert_bytes
        if bits in self.bytes_by_bits:
            return self.bytes_by_bits[int(bits)]
        return tuple(-(-int(size * bits * 1000) // int(self.expert_bits * 1000)) for size in self.expert_bytes)

    def stored_at(self, bits: float) -> Geometry:
        """The same model with its experts stored at `bits`."""
        return self.model_copy(update={"expert_bytes": self.bytes_at(bits), "expert_bits": bits})


class Provenance(Frozen):
    """Where the rows come from. Free text where a tool has no better; nothing here changes a replay."""

    model: str = "unknown"
    revision: str = ""
    dtype: str = ""
    source: str = ""
    source_sha256: str = ""
    importer: str = ""
    prompts: str = ""
    seed: int | None = None
    decoding: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Header(Frozen):
    """Everything about a trace that is not an array."""

    geometry: Geometry
    provenance: Provenance = Provenance()
    lookahead_depth: int = Field(default=0, ge=0)
    lookahead_input: Literal["target_norm", "gate_input", "layer_output"] = "target_norm"


@dataclass(frozen=True)
class Request:
    """One prompt and its generated tokens, ready to append. Optional arrays are None or present for every request."""

    chosen: np.ndarray  #: (T, L, k) expert ids in rank order by choice score; -1 = not routed
    prompt_length: int
    weights: np.ndarray | None = None  #: (T, L, k) gate weights of the chosen
    logits: np.ndarray | None = None  #: (T, L, E) raw router logits
    lookahead: tuple[np.ndarray, ...] = ()  #: [d-1] is (T, L, E): layer l + d's gate on layer l's residual
    token_ids: np.ndarray | None = None  #: (T,) input tokens
    nll: np.ndarray | None = None  #: (T,) their negative log-likelihood
    residency: np.ndarray | None = None  #: (T, L, k) a foreign cache's verdict: 0 miss, 1 hit, 2 prefetched, -1 unknown

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that are present, by their name in the store, with their stored dtype."""
        named = {name: getattr(self, name) for name in TOKEN_ARRAYS}
        named |= {f"{LOOKAHEAD}{depth}": rows for depth, rows in enumerate(self.lookahead, 1)}
        return {name: np.ascontiguousarray(rows, dtype_of(name)) for name, rows in named.items() if rows is not None}


@dataclass(frozen=True)
class Trace:
    """A readable trace: header, request ranges and lazily read arrays (zarr arrays or numpy's)."""

    header: Header
    request_offsets: np.ndarray  #: (R + 1,) int64, first token of each request
    prompt_lengths: np.ndarray  #: (R,) int64
    arrays: Mapping[str, Any]
    digest: str
    path: Path | None = None
    router_bias: np.ndarray | None = None  #: (L, E) f32
    complete: bool = True
    array_digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def geometry(self) -> Geometry:
        """Sizes of the model's MoE part."""
        return self.header.geometry

    @property
    def tokens(self) -> int:
        """Tokens of all requests."""
        return int(self.request_offsets[-1])

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.prompt_lengths)

    @property
    def capabilities(self) -> frozenset[str]:
        """What policies may need of a trace: `ids` always; `weights`, `logits`, `lookahead` if recorded."""
        recorded = {name for name in ("weights", "logits") if name in self.arrays}
        return frozenset(recorded | {"ids"} | ({"lookahead"} if self.header.lookahead_depth else set()))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows [start, stop) of a token array. Raises TraceError if the trace lacks it or its bytes are damaged."""
        if name not in self.arrays:
            raise TraceError(f"{self.path or 'this trace'} has no {name}; it holds {', '.join(sorted(self.arrays))}")
        stop = self.tokens if stop is None else stop
        try:
            return np.asarray(self.arrays[name][start:stop])
        except (ValueError, RuntimeError, OSError, MemoryError) as broken:  # a crc32c, blosc, the disk, false sizes
            where = f"{self.path}: {name} rows {start}-{stop}"
            raise TraceError(f"{where} are damaged ({broken}); restore the trace from a copy") from broken

    def request(self, index: int) -> Request:
        """One request's rows, as they were appended."""
        first, last = (int(offset) for offset in self.request_offsets[index : index + 2])
        rows = {name: self.read(name, first, last) for name in self.arrays}
        look = tuple(rows.pop(f"{LOOKAHEAD}{d}") for d in range(1, self.header.lookahead_depth + 1))
        return Request(prompt_length=int(self.prompt_lengths[index]), lookahead=look, **rows)


def dtype_of(name: str) -> str:
    """Stored dtype of a token array."""
    return LOOKAHEAD_AXES[0] if name.startswith(LOOKAHEAD) else TOKEN_ARRAYS[name][0]


def row_shape(name: str, geometry: Geometry) -> tuple[int, ...]:
    """Shape of one token's row of an array."""
    axes = LOOKAHEAD_AXES[1] if name.startswith(LOOKAHEAD) else TOKEN_ARRAYS[name][1]
    return tuple(getattr(geometry, axis) for axis in axes)


def check_request(request: Request, header: Header, index: int) -> dict[str, np.ndarray]:
    """The request's arrays: shapes, and rows as `check_rows` wants them. Raises TraceError naming array and row."""
    arrays = request.arrays()
    tokens, where = len(request.chosen), f"request {index}"
    if tokens == 0 or not 0 <= request.prompt_length <= tokens:
        raise TraceError(
            f"{where}: {request.prompt_length} prompt tokens of {tokens}; a request needs at least one token"
        )
    for name, rows in arrays.items():
        expected = (tokens, *row_shape(name, header.geometry))
        if rows.shape != expected:
            raise TraceError(f"{where}: {name} has shape {rows.shape}, expected {expected}")
    _check_ids(request.chosen, header.geometry.experts, where, 0)  # as given: the stored dtype would wrap them
    for name, rows in arrays.items():
        check_rows(name, rows, header.geometry, where)
    return arrays


def check_rows(name: str, rows: np.ndarray, geometry: Geometry, where: str, first: int = 0) -> None:
    """Raise TraceError unless rows of a token array (T, ...) hold what its name says; `first` is the first one's token.

    Ids lie in [-1, E) and do not repeat within a row, floats are finite, gate weights lie in [0, WEIGHT_LIMIT].
    """
    if name == "chosen":
        _check_ids(rows, geometry.experts, where, first)
        _check_distinct(rows, where, first)
    if rows.dtype.kind == "f":
        _refuse(~np.isfinite(rows), name, rows, where, first, "expected a finite number")
    if name == "weights":
        wrong = (rows < 0) | (rows > WEIGHT_LIMIT)
        _refuse(wrong, name, rows, where, first, f"gate weights are 0 to {WEIGHT_LIMIT:,}")
    if name == "residency":
        _refuse((rows < -1) | (rows > 2), name, rows, where, first, "0 is a miss, 1 a hit, 2 prefetched, -1 unknown")


def check_bias(bias: np.ndarray, where: str) -> None:
    """Raise TraceError unless a router's correction bias (L, E) is finite and small enough for scores in UNITs."""
    bad = np.argwhere(~(np.abs(bias) <= BIAS_LIMIT))
    if len(bad):
        layer, expert = bad[0].tolist()
        raise TraceError(
            f"{where}: router_bias of layer {layer}, expert {expert} is {bias[layer, expert]}; "
            f"expected a number between -{BIAS_LIMIT} and {BIAS_LIMIT}"
        )


def _check_ids(ids: np.ndarray, experts: int, where: str, first: int) -> None:
    wrong = (ids < -1) | (ids >= experts)
    _refuse(wrong, "chosen", ids, where, first, f"ids are 0 to {experts - 1}, or -1 for not routed")


def _check_distinct(ids: np.ndarray, where: str, first: int) -> None:
    ordered = np.sort(ids, axis=-1)
    bad = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bad.any():
        token, layer, _ = np.argwhere(bad)[0].tolist()
        place, row = _place("chosen", [first + token, layer]), ids[token, layer].tolist()
        raise TraceError(f"{where}: {place[0]} repeats an expert: {row} ({place[1]})")


def _refuse(wrong: np.ndarray, name: str, rows: np.ndarray, where: str, first: int, expected: str) -> None:
    """Name the first of the wrong values."""
    if not wrong.any():
        return
    at = np.argwhere(wrong)[0].tolist()
    place = _place(name, [first + at[0], *at[1:]])
    raise TraceError(f"{where}: {place[0]} is {rows[tuple(at)]} ({place[1]}); {expected}")


def _place(name: str, index: list[int]) -> tuple[str, str]:
    """An element of a token array, and what its first two indices are."""
    layer = f", layer {index[1]}" if len(index) > 1 else ""
    return f"{name}{index}", f"token {index[0]}{layer}"


def memory_trace(header: Header, requests: list[Request], router_bias: np.ndarray | None = None) -> Trace:
    """A trace held in memory, for synthetic rows, tests and library use."""
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


def canonical(document: object) -> bytes:
    """The one JSON spelling of a document, for hashing."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
