"""The contract of importers: options, result, and how a file's own facts become a `Geometry`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError, field_validator

from moereplay.traces.dense import check_dense_bits, in_words, with_params, with_stored
from moereplay.traces.documents import first_fault
from moereplay.traces.files import digest_of
from moereplay.traces.geometry import known_models, recognised
from moereplay.traces.importers import sources
from moereplay.traces.patterns import axes_of
from moereplay.traces.schema import (
    LEAST_BITS,
    MOST_BITS,
    MOST_BYTES,
    Frozen,
    Geometry,
    Header,
    Provenance,
    Request,
    Router,
    TraceError,
    check_bits,
)
from moereplay.traces.texts import MOST_NAME, changed, settled
from moereplay.traces.weight_formats import BITS_PER_WEIGHT, named_in

SAME_FORMAT, NEAR_FORMAT = 0.003, 0.25  #: bits of a block format are exact, those of a mixture differ by model
NO_PHASE = "no phase was recorded: every token counts as decoded; pass --prompt-length if the first tokens are a prompt"
DECODE_ONLY = "decode steps only: rows of the prompts were not recorded"
Order = Literal["tokens,layers,k", "layers,tokens,k"]  #: of an array's axes
TOKENS_FIRST: Order = "tokens,layers,k"
LAYERS_FIRST: Order = "layers,tokens,k"
ASSUMED = "assumed: "  #: how a note begins that says how a file was read
WARNED = "warning: "  #: and one of what makes its results doubtful


class Options(Frozen):
    """Facts that the user adds to a foreign file; a field may be left out if the file states it."""

    model: str | None = None  #: name kept in the provenance
    model_name: str | None = Field(default=None, min_length=1, max_length=200)  #: kept there where `model` is None
    geometry: Geometry | None = None  #: sizes of that model
    #: bytes of one expert, for all layers or per layer, or of every expert by layer
    expert_bytes: tuple[tuple[int, ...], ...] | tuple[int, ...] | int | None = None
    expert_bits: float | None = None  #: precision of those bytes
    weight_format: str = ""  #: of experts and, but for formats of experts alone, of dense weights
    dense_bytes: int | None = Field(default=None, ge=1, le=MOST_BYTES)  #: of everything but routed experts, as stored
    dense_bits: str = ""  #: instead: bits per weight of these, or a format
    matrices: tuple[int, ...] = ()  #: relative sizes of an expert's matrices in reading order
    prompt_length: int | None = Field(default=None, ge=0)  #: prompt tokens of every request, at most its length
    chunk: int | None = Field(default=None, ge=1)  #: tokens after which the recorder cleared its context
    columns: dict[str, tuple[str, ...]] | None = None  #: the file's names for fields, see `columns.py`
    where: tuple[str, str] | None = None  #: a column, and its value in the rows to read
    shape: tuple[int, int] | None = None  #: layers and k of a token's row, where ids are flat
    ids: Literal["layer", "global"] = "layer"  #: whether they count from 0 in each layer, or on through the layers
    axes: Order | None = None  #: of arrays, where the user states it
    real_experts: int | None = Field(default=None, ge=1)  #: ids from here on are computed without weights

    @property
    def renumbers(self) -> bool:
        """True if the ids of the file are other numbers than the experts of a layer."""
        return self.ids == "global" or self.real_experts is not None

    def prompt_of(self, tokens: int, recorded: int) -> int:
        """Return the number of prompt tokens: the option's, at most `tokens`, else the recorded number."""
        return recorded if self.prompt_length is None else min(self.prompt_length, tokens)

    def phase_note(self) -> list[str]:
        """Return the note for a file that does not mark prompt tokens; empty with --prompt-length."""
        return [NO_PHASE] if self.prompt_length is None else []

    def token_first(
        self,
        array: np.ndarray,
        place: str,
        usual: Order = TOKENS_FIRST,
        fits: Callable[[int], bool] = lambda tokens: True,
        ids: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return an array of three axes with the tokens first: as the option says, else from its `usual` order.

        Raises TraceError if the option is missing, and the model, the totals beside the array (`fits` numbers of
        tokens) or `ids` (the array itself, unless it is of logits) show the other order.
        """
        turned = (self.axes or usual) == LAYERS_FIRST
        found, rows = (each.transpose(1, 0, 2) if turned else each for each in (array, array if ids is None else ids))
        if self.axes:
            return found
        tokens, layers = found.shape[:2]
        shown_by_ids = axes_of([rows])
        why = shown_by_ids.why if shown_by_ids.layers_first else ""
        if self.geometry and self.geometry.layers == tokens != layers:
            why = f"{self.model or 'the geometry given'} has {tokens} layers"
        elif shown_by_ids.layers_first is None and fits(layers) and not fits(tokens):
            why = f"by the counts beside it, it has {layers:,} tokens, not {tokens:,}"
        if why:
            other = LAYERS_FIRST if usual == TOKENS_FIRST else TOKENS_FIRST
            told = f"shape {array.shape} was expected to be ({usual}), but {why}"
            raise TraceError(f"{place}: {told}; pass --axes {other}, or --axes {usual} if that is its order")
        return found

    def counted(self, ids: np.ndarray, layers: int) -> Shape:
        """Return the shape of ids (..., k) without a stated number of experts: the model's, else the largest id + 1."""
        return self.shape_of(layers, ids.shape[-1], int(ids.max()))

    def shape_of(self, layers: int, k: int, highest: int) -> Shape:
        """Return the shape of a file from the facts that its ids show."""
        return Shape(layers, k, highest, None if self.geometry or highest < 0 else highest + 1)

    def assumed(self, said: list[str], shape: Shape, basis: str = "the largest id + 1") -> str:
        """Return a note on how a file without a header was read; `basis` is the source of its number of experts."""
        told = [f"{ASSUMED}{said[0]}", *said[1:], f"layers 0..{shape.layers - 1}"]
        if self.geometry and not self.renumbers:
            source = "--model says" if self.model else "the geometry given has"
            told.append(f"experts = {self.geometry.experts} as {source}")
        elif not self.renumbers:
            told.append(f"experts = {shape.experts} as {basis}")
        return "; ".join(told)

    @field_validator("expert_bits")
    @classmethod
    def _is_precision(cls, bits: float | None) -> float | None:
        if bits is not None:
            check_bits(bits)
        return bits

    @field_validator("dense_bits")
    @classmethod
    def _is_bits(cls, text: str) -> str:
        if text:
            check_dense_bits(text)
        return text


@dataclass(frozen=True)
class Foreign:
    """A foreign trace: the header, and its requests, read lazily."""

    header: Header
    requests: Iterator[Request]

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions and omissions of the importer; also kept in the trace's provenance."""
        return self.header.provenance.notes


@dataclass(frozen=True)
class Importer:
    """One format. `sniff` never raises on a readable path; `read` raises TraceError."""

    name: str
    summary: str
    formats: str
    sniff: Callable[[Path], bool]
    read: Callable[[Path, Options], Foreign]
    columns: bool = False  #: whether it takes `Options.columns`
    flat: bool = False  #: whether it takes `Options.shape`
    arrays: bool = False  #: whether it takes `Options.axes`


@dataclass(frozen=True)
class Shape:
    """Facts that a file states about its model; None for those that it does not state."""

    layers: int
    k: int
    highest_id: int
    experts: int | None = None
    expert_bytes: tuple[int, ...] | None = None
    stated: Geometry | None = None  #: a whole geometry carried by the file
    router: Router | None = None  #: used when nothing else names one
    dense_bytes: tuple[int, ...] | None = None  #: of everything else inside each MoE layer, as stored

    def __str__(self) -> str:
        return f"{self.layers} layers, {self.k} of {self.experts or f'at least {self.highest_id + 1}'} experts"


@dataclass(frozen=True)
class Origin:
    """Source of the rows: `source` is the path that the user named, `files` are the files that were read."""

    importer: str
    source: Path
    files: list[Path]
    model: str | None = None
    revision: str = ""
    decoding: str = ""
    synthetic: str = ""  #: how a generator made the routing, where the file says so
    beside: tuple[Path, ...] = ()  #: files of a folder that describe the others, and were read too


def header_for(shape: Shape, options: Options, origin: Origin, notes: list[str]) -> Header:
    """Return the header of an imported trace.

    Sizes: `--expert-bytes`, else the file's, else the model's. Raises TraceError if there are none, or if the model
    passed contradicts the file; only k may differ, because it can be set at run time: the file's value is used.
    Files of a folder that were not read are noted.
    """
    sources.refuse_missing(origin.source, origin.files)
    origin = replace(origin, model=options.model_name or origin.model)
    if shape.highest_id < 0:
        raise TraceError(f"{origin.source}: every id is -1 (not routed): expected expert ids")
    base = options.geometry or shape.stated
    if base is not None:
        _check_agreement(shape, base, options, origin.source)
    stored = options.weight_format or named_in(origin.model or "") or named_in(origin.source.name) or ""
    named = BITS_PER_WEIGHT[stored] if stored else None
    if named and base and int(named) in base.bytes_by_bits:
        named = int(named)
    sizes = _sizes(shape, base, options, named, origin.source)
    table = _table(sizes, base, options)
    every = tuple(chain.from_iterable(table)) or sizes
    bits = _bits(shape, base, options, named, every, origin)
    fields: dict[str, object] = base.model_dump() if base else {"router": shape.router or Router()}
    fields |= {"layers": shape.layers, "k": shape.k, "expert_bytes": sizes, "expert_bits": bits or 16}
    fields["experts"] = shape.experts or (base.experts if base else shape.highest_id + 1)
    if options.renumbers:
        fields["experts"] = shape.highest_id + 1
    fields["bytes_by_expert"] = ()
    fields["weight_format"] = _format(stored, bits, every, options, origin) or fields.get("weight_format", "")
    try:
        made = Geometry.model_validate(fields)
        geometry = _dense(_by_expert(made, table, origin.source), shape, options, origin, stored)
    except ValidationError as wrong:
        raise TraceError(f"{origin.source}: {first_fault(wrong)}; check the sizes given") from wrong
    beside = sources.notes(origin.source, origin.files, origin.beside)
    told = [*notes, *_size_notes(shape, base, bits, geometry, options), *_text_notes(origin, options), *beside]
    return Header(
        geometry=geometry,
        provenance=Provenance(
            model=options.model or origin.model or "unknown",
            revision=origin.revision,
            source=origin.source.resolve().name,
            source_sha256=digest_of(origin.files),
            importer=origin.importer,
            decoding=origin.decoding,
            synthetic=origin.synthetic,
            notes=tuple(told),
        ),
    )


def _check_agreement(shape: Shape, base: Geometry, options: Options, source: Path) -> None:
    experts = shape.experts if shape.experts and not options.renumbers else base.experts
    beyond = shape.highest_id >= base.experts and not options.renumbers
    if (shape.layers, experts) == (base.layers, base.experts) and not beyond:
        return
    model = options.model or ("the geometry given" if options.geometry else "its metadata")
    theirs = f"{base.layers} layers, {base.k} of {base.experts} experts"
    fix = "pass the model that it was recorded with"
    if shape.layers == base.layers and shape.highest_id >= base.experts:
        fix += f"; or, if ids from {base.experts} on have no weights, add --real-experts {base.experts}"
        fix += "; if ids count on through the layers, --ids global" if base.layers > 1 else ""
    raise TraceError(f"{source} has {shape}, but {model} has {theirs}; {fix}")


def _sizes(shape: Shape, base: Geometry | None, options: Options, named: float | None, source: Path) -> tuple[int, ...]:
    given = options.expert_bytes
    if isinstance(given, int):
        return (given,) * shape.layers
    if given is not None and len(given) != shape.layers:
        raise TraceError(
            f"{source} has {shape.layers} layers, --expert-bytes {len(given)} values: pass one value, or one per layer"
        )
    if given:
        return tuple(max(each, default=0) if isinstance(each, tuple) else each for each in given)
    sizes = shape.expert_bytes or (base and base.bytes_at(options.expert_bits or named or base.expert_bits))
    if sizes is not None:
        return sizes
    wanted = (shape.layers, shape.experts or shape.highest_id + 1, shape.k)

    def distance(name: str) -> float:
        known = known_models()[name].geometry
        return sum(abs(a - b) / b for a, b in zip(wanted, (known.layers, known.experts, known.k), strict=True))

    model = f"--model NAME (the nearest known is {min(sorted(known_models()), key=distance)})"
    raise TraceError(f"{source} has no expert size ({shape}); add {model} or --expert-bytes BYTES")


def _table(sizes: tuple[int, ...], base: Geometry | None, options: Options) -> tuple[tuple[int, ...], ...]:
    """Return the bytes of every expert by layer: those given, or the model's; empty if a layer has one size."""
    given = options.expert_bytes
    if given is None:
        return base.bytes_by_expert if base and sizes == base.expert_bytes else ()
    return tuple(row for row in given if isinstance(row, tuple)) if isinstance(given, tuple) else ()


def _by_expert(geometry: Geometry, table: tuple[tuple[int, ...], ...], source: Path) -> Geometry:
    try:
        return geometry.sized(table) if table else geometry
    except TraceError as wrong:
        raise TraceError(f"{source}: {wrong}; check --expert-bytes") from None


def _bits(
    shape: Shape,
    base: Geometry | None,
    options: Options,
    named_bits: float | None,
    sizes: tuple[int, ...],
    origin: Origin,
) -> float | None:
    """Return the precision of `sizes` from the option, the model or its parameter count, or None.

    Without --model, bytes that the file states are measured before the format in a name.
    """
    if options.expert_bits:
        return options.expert_bits
    if base is None:
        like = recognised(origin.model or "")
        agrees = like and like.geometry.layers == shape.layers and shape.experts in (None, like.geometry.experts)
        return (_per_parameter(sizes, like.geometry) if like and agrees else None) or named_bits
    if options.expert_bytes is None and (shape.expert_bytes is None or shape.stated is not None):
        return shape.stated.expert_bits if shape.stated else named_bits or base.expert_bits
    named = [bits for bits, known in base.bytes_by_bits.items() if known == sizes]
    return named[0] if named else _per_parameter(sizes, base)


def _per_parameter(sizes: tuple[int, ...], known: Geometry) -> float | None:
    """Return the bits per parameter; None if the number of parameters is unknown or the result is implausible."""
    if known.expert_params is None:
        return None
    bits = round(sum(sizes) / len(sizes) * 8 / known.expert_params, 3)
    return bits if LEAST_BITS <= bits <= MOST_BITS else None


def _format(stored: str, bits: float | None, sizes: tuple[int, ...], options: Options, origin: Origin) -> str:
    """Return the experts' format: the option, or the format in the file's or model's name if the bits are close to it.

    Experts with the bits of the model's own checkpoint keep its format: files named Q4_K_M may hold MXFP4.
    """
    if options.weight_format or not stored or bits is None:
        return options.weight_format
    like = recognised(options.model or origin.model or "")
    if like and like.geometry.expert_params:
        exact = sum(sizes) / len(sizes) * 8 / like.geometry.expert_params
        if abs(exact / like.published.bits - 1) < SAME_FORMAT:
            return like.published.format
    return stored if abs(bits / BITS_PER_WEIGHT[stored] - 1) < NEAR_FORMAT else ""


def _dense(geometry: Geometry, shape: Shape, options: Options, origin: Origin, stored: str) -> Geometry:
    """Return the geometry with the dense weights from options, the file or the weight format.

    Raises TraceError for bits where the weights are not known.
    """
    name = options.model or origin.model or ""
    known = with_params(geometry, name)
    if options.matrices:
        known = known.model_copy(update={"matrices": options.matrices})
    if shape.dense_bytes:
        known = known.model_copy(update={"dense_layer_bytes": shape.dense_bytes})
    if not (options.dense_bytes or options.dense_bits) and (
        shape.dense_bytes or known.dense_stated or known.dense_bytes
    ):
        return known
    return with_stored(known, name or "the model", options.dense_bytes, options.dense_bits, stored)


def dense_line(geometry: Geometry, model: str) -> str:
    """Describe the dense weights, which are read for every token."""
    said = in_words(geometry, model)
    return said if "--dense" in said else f"{said}; override with --dense or --dense-bits"


def _size_notes(
    shape: Shape, base: Geometry | None, bits: float | None, geometry: Geometry, options: Options
) -> list[str]:
    notes = []
    if base is not None and base.k != shape.k:
        notes.append(f"the file routes to {shape.k} experts per token where the model's default is {base.k}")
    if base is None and shape.experts is None and not options.renumbers:
        notes.append(f"number of experts was not recorded: {geometry.experts} is the highest id + 1")
    if bits is None:
        notes.append("unknown precision of the expert bytes: assumed 16 bits; pass --expert-bits")
    return notes


def _text_notes(origin: Origin, options: Options) -> list[str]:
    """Describe which of the file's strings were changed for the header."""
    texts = {"model": (not options.model and origin.model) or "", "revision": origin.revision}
    found = {name: changed(text, MOST_NAME) for name, text in texts.items()}
    fix = {"model": "; pass --model for a known one"}
    return [
        f"the {name} of the file is kept as '{settled(texts[name], MOST_NAME)}': {told}{fix.get(name, '')}"
        for name, told in found.items()
        if told
    ]


def size_line(geometry: Geometry) -> str:
    """Describe the experts' size, which decides every time of a replay."""
    total = geometry.total_bytes
    mean = total / (geometry.layers * geometry.experts)
    sizes = [size / 2**20 for size in geometry.rows.sizes]
    differ = f" on average, {min(sizes):.4g} to {max(sizes):.4g}," if geometry.bytes_by_expert else ""
    each = f"{mean / 2**20:.4g} MiB{differ} at {geometry.expert_bits:g} bits"
    return f"an expert has {each}, all have {total / 2**30:.4g} GiB; override with --expert-bits or --expert-bytes"
