"""Dense weights (all weights outside the routed experts): bytes that a token reads, and bytes that are in memory.

The bytes come from the first of: the user, the trace's file, the model's parameters at stated bits, and its parameters
at 16 bits, which is an assumption. A stated total (`dense_bytes`) includes an embedding table that is not tied to the
head: it is in memory, and a token reads one row of it. Bytes derived from parameters exclude that table, which engines
leave in slow memory.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from moereplay.traces.schema import Geometry, Provenance, TraceError, check_bits
from moereplay.traces.units import GB
from moereplay.traces.weight_formats import BITS_PER_WEIGHT, OF_EXPERTS, bits_of, check_format, dense_bits_of, is_number

if TYPE_CHECKING:
    from moereplay.traces.geometry import KnownModel

TABLE_BITS, QUANTISED = 4.5, 8  #: files below a mean of 8 bits store the embedding table in Q4_K, at 4.5 bits
OPTIONS = "pass --dense or --dense-bits"


class Dense(NamedTuple):
    """Dense weights of a model as stored, in bytes."""

    layers: tuple[int, ...]  #: (L,) read per token in each MoE layer
    head: int  #: read per token outside the MoE layers
    resident: int  #: in memory

    @property
    def read(self) -> int:
        """Bytes that every token reads."""
        return sum(self.layers) + self.head

    @property
    def table(self) -> int:
        """Bytes of a stated embedding table that a token reads one row of."""
        return self.resident - self.read


def check_dense_bits(text: str) -> float:
    """Return the bits of `4.85`, or of a format by name. Raises ValueError."""
    try:
        bits = bits_of(text)
        check_bits(bits)
    except ValueError as wrong:
        expected = f"expected 0.1 to 64, or a weight format; {wrong}"
        raise ValueError(f"invalid --dense-bits {text[:40]!r}: {expected}") from None
    return bits


def with_bits(geometry: Geometry, model: str, text: str) -> Geometry:
    """Return the geometry with its dense weights at given bits (`4.85`), or at the bits that files of a format have.

    Raises TraceError for invalid bits, and if the model's dense weights are unknown.
    """
    known = with_params(geometry, model)
    try:
        bits = check_dense_bits(text)
    except ValueError as wrong:
        raise TraceError(str(wrong)) from None
    if known.dense_params is None:
        raise TraceError(
            f"--dense-bits {text}: unknown number of dense weights of {model}; pass their bytes with --dense"
        )
    named = "" if is_number(text) else check_format(text)
    if named:
        layers = known.dense_params * known.layers
        bits = dense_bits_of(named, layers, known.head_params or 0) or bits
    return known.model_copy(update=NOT_STORED | {"dense_bits": bits, "dense_stated": True, "dense_format": named})


#: Fields of a geometry whose stored dense bytes are unknown.
NOT_STORED: dict[str, object] = {"dense_bytes": 0, "dense_layer_bytes": (), "head_bytes": None}


def with_stored(geometry: Geometry, model: str, size: int | None, bits: str, weight_format: str = "") -> Geometry:
    """Return the geometry of the model with its dense weights as stated: bytes, bits, or as files of a format.

    Without any of these it is unchanged. Raises TraceError for bits if the model's dense weights are unknown.
    """
    if size:
        return with_bytes(geometry, size)
    if bits:
        return with_bits(geometry, model, bits)
    whole = with_params(geometry, model)
    if not weight_format or weight_format in OF_EXPERTS or whole.dense_params is None:
        return geometry
    return with_bits(whole, model, weight_format).model_copy(update={"dense_format": ""})  # taken, not stated


def with_bytes(geometry: Geometry, size: int) -> Geometry:
    """Return the geometry with a total of `size` bytes of dense weights, embedding table included."""
    return geometry.model_copy(update={"dense_bytes": size, "head_bytes": None})


def _recognised(model: str, geometry: Geometry) -> KnownModel | None:
    from moereplay.traces.geometry import recognised  # a replay whose trace has all sizes need not build its models

    return recognised(model, geometry)


def with_params(geometry: Geometry, model: str) -> Geometry:
    """Return the geometry with the dense parameters of the known model of that name, if it lacks them."""
    if geometry.dense_params is not None:
        return geometry
    like = _recognised(model, geometry)
    if like is None:
        return geometry
    known = {name: getattr(like.geometry, name) for name in ("dense_params", "head_params")}
    return geometry.model_copy(update=known)


def resolved(geometry: Geometry, model: str) -> Geometry:
    """Return the geometry with dense bytes split into layers and head, if bytes are stated; else unchanged.

    Layers whose bytes are stated keep them; the rest is divided between head and embedding in proportion to their
    weights. A total alone is divided in proportion to the weights, or equally among layers if these are unknown.
    """
    if geometry.head_bytes is not None or not (geometry.dense_bytes or geometry.dense_layer_bytes):
        return geometry
    known = with_params(geometry, model)
    like = _recognised(model, geometry)
    inside, head = (known.dense_params or 0) * known.layers, known.head_params or 0
    stated, total = geometry.dense_layer_bytes, geometry.dense_bytes
    if stated and not total:
        found, rest = stated, round(head * sum(stated) / inside) if inside else 0
        return known.model_copy(update={"dense_layer_bytes": found, "head_bytes": rest})
    read = total - _table_bytes(total, inside + head, like.embedding_params if like else 0)
    if stated:
        found = stated if read >= sum(stated) else tuple(each * read // sum(stated) for each in stated)
    else:
        found = _split(round(read * inside / (inside + head)) if inside else read, known.layers)
    return known.model_copy(update={"dense_layer_bytes": found, "head_bytes": read - sum(found)})


def _table_bytes(total: int, read: int, table: int) -> int:
    """Return the bytes of an embedding table of `table` weights in `total` bytes with `read` others, at the mean bits.

    Quantised files store it in Q4_K, below their mean: the head and small tensors have more bits.
    """
    bits = total * 8 / (read + table) if table else 0
    return round(table * (TABLE_BITS if TABLE_BITS < bits < QUANTISED else bits) / 8)


def _split(total: int, parts: int) -> tuple[int, ...]:
    """Return nearly equal parts that add up to the total."""
    return tuple(total // parts + (at < total % parts) for at in range(parts))


def dense_of(geometry: Geometry) -> Dense:
    """Return the bytes of the dense weights, 0 if unknown."""
    known = resolved(geometry, "")
    if known.head_bytes is not None:
        read = sum(known.dense_layer_bytes) + known.head_bytes
        return Dense(known.dense_layer_bytes, known.head_bytes, max(known.dense_bytes, read))
    layer, head = geometry.dense_params or 0, geometry.head_params or 0
    bytes_each = Fraction(str(geometry.dense_bits)) / 8  # the decimal that was given, not the double next to it
    sizes = [ceil(params * bytes_each) for params in (layer, head, layer * geometry.layers + head)]
    return Dense((sizes[0],) * geometry.layers, sizes[1], sizes[2])


def params_of(geometry: Geometry) -> tuple[tuple[int, ...], int]:
    """Return the number of dense weights in each layer and outside, estimated from bytes if the model is unknown."""
    dense = dense_of(geometry)
    bits = BITS_PER_WEIGHT.get(geometry.weight_format, geometry.expert_bits)
    if geometry.dense_params is None:
        return tuple(round(size * 8 / bits) for size in dense.layers), round(dense.head * 8 / bits)
    return (geometry.dense_params,) * geometry.layers, geometry.head_params or round(dense.head * 8 / bits)


def in_words(geometry: Geometry, model: str) -> str:
    """Return the bytes of the dense weights and their source, in words."""
    known = resolved(with_params(geometry, model), model)
    dense = dense_of(known)
    size = f"{dense.resident / GB:.4g} GB"
    if geometry.dense_bytes:
        return f"dense weights have {size} as stated; a token reads {dense.read / GB:.4g}"
    if geometry.dense_layer_bytes:
        head = "with those outside the layers at the same bits" if dense.head else "without those outside the layers"
        return f"dense weights have {size}: as the file states them by layer, {head}"
    if not dense.resident:
        return "dense weights are unknown and counted as 0 bytes; pass --dense"
    how = "" if geometry.dense_stated or geometry.dense_bits != ASSUMED_BITS else ", which is assumed"
    return f"dense weights have {size} at {geometry.dense_bits:.4g} bits{how}"


def recorded(provenance: Provenance) -> bool:
    """Return True if the trace was recorded from the model itself, so that its geometry was measured."""
    return bool(provenance.dtype) and not provenance.importer


def assumption(geometry: Geometry, recorded: bool = False) -> str | None:
    """Return in words the assumption about the dense weights' bytes; None if they are stated or unknown.

    `recorded`: the model itself was loaded and held them in 16 bits.
    """
    dense = dense_of(geometry)
    size = f"{dense.resident / GB:.4g} GB"
    if geometry.head_bytes is not None:
        if geometry.dense_bytes or geometry.head_bytes:
            return None
        return f"dense weights outside the MoE layers are not counted, the file states {size} inside them; pass --dense"
    if not dense.resident or geometry.dense_stated or geometry.dense_bits != ASSUMED_BITS or recorded:
        return None
    return f"dense weights assumed at 16 bits: {size}; {OPTIONS}"


ASSUMED_BITS = 16  #: default of `Geometry.dense_bits`
