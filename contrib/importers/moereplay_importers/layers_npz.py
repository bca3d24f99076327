"""Teacher-forced text as llama.cpp recordings publish it: an npz per stream, layer first, ids alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from moereplay.traces.documents import first_fault
from moereplay.traces.importers import archive
from moereplay.traces.importers.contract import LAYERS_FIRST, Foreign, Importer, Options, Origin, Shape, header_for
from moereplay.traces.importers.sources import files_of
from moereplay.traces.importers.text import parse_json
from moereplay.traces.patterns import overlap, reset_stride
from moereplay.traces.schema import Request, TraceError, shown

LAYER_ARRAYS = frozenset({"experts", "meta"})
FORCED = "teacher-forced text: every token is prompt; replay it token by token"


class Meta(BaseModel):
    """The keys of `meta` that are used; others are ignored."""

    model: str | None = None
    source: str = ""
    num_experts: int | None = Field(default=None, ge=1)
    n_moe_layers: int | None = None
    k: int | None = None
    chunk: int | None = Field(default=None, ge=1)


def sniff_layers(path: Path) -> bool:
    """Return True for npz files, alone or in a folder, that all hold experts and meta."""
    files = files_of(path, ".npz")
    return bool(files) and all(archive.members(file) >= LAYER_ARRAYS for file in files)


def read_layers(path: Path, options: Options) -> Foreign:
    """Read teacher-forced text as npz, layer first: `experts` (L, T, k) ids in rank order and `meta`, a JSON string.

    `meta` keys read: `model`, `num_experts`, `n_moe_layers`, `k`, `chunk`, `source`. A file is a stream of text; a
    folder is one stream per file, by name. The recorder of these files clears its context every so many tokens
    (`--chunk`, else `chunk`, else found where the overlap of adjacent tokens keeps falling to chance); a request is
    the text between two resets. Nothing was generated: every token is prompt.

    Return the requests between context resets, file after file. Raises TraceError if a file contradicts its meta.
    """
    files = files_of(path, ".npz")
    if not files:
        raise TraceError(f"{path}: missing .npz files: expected arrays {', '.join(sorted(LAYER_ARRAYS))}")
    rows, meta = _stream(files[0], options)
    _, layers, k = rows.shape
    others = [] if meta.num_experts or options.geometry else files[1:]  # whose ids say how many experts there are
    highest = max(int(rows.max()), *(int(_stream(file, options)[0].max()) for file in others), -1)
    shape = Shape(layers, k, highest, experts=meta.num_experts)
    chunk, how = _chunk(files, meta, options)
    origin = Origin(LAYERS_NPZ.name, path, files, model=meta.model, revision=meta.source)
    header = header_for(shape, options, origin, [FORCED, how])
    return Foreign(header, _chunks(files, (layers, k), chunk, options))


def _stream(file: Path, options: Options) -> tuple[np.ndarray, Meta]:
    """Return rows (T, L, k) and meta of one file, checked against each other."""
    rows = options.token_first(archive.expert_ids(file, "experts"), f"{file}: experts", LAYERS_FIRST)
    try:
        meta = Meta.model_validate(parse_json(archive.text(file, "meta"), f"{file}: meta"))
    except ValidationError as wrong:
        raise TraceError(f"{file}: invalid meta: {first_fault(wrong)}") from wrong
    for key, said, found in (("n_moe_layers", meta.n_moe_layers, rows.shape[1]), ("k", meta.k, rows.shape[2])):
        if said not in (None, found):
            told = f"meta says {key} = {shown(said)}, but experts has {found}"
            raise TraceError(f"{file}: {told}: expected (layers, tokens, k)")
    if meta.num_experts is not None and rows.max() >= meta.num_experts:
        raise TraceError(f"{file}: experts has id {rows.max()}, but meta says num_experts = {meta.num_experts}")
    return rows, meta


def _chunk(files: list[Path], meta: Meta, options: Options) -> tuple[int | None, str]:
    """Return tokens between context resets, None if there are none, and a note on the source of this number."""
    told = options.chunk or meta.chunk
    if told:
        return told, f"split into requests of {told} tokens, as passed"
    strides = (_found_stride(file, options) for file in files)
    found = next((stride for stride in strides if stride), None)
    if found is None:
        return None, "no context resets found: one request per file"
    return found, f"split into requests of {found} tokens, where the overlap of adjacent tokens falls to chance"


def _found_stride(file: Path, options: Options) -> int | None:
    rows, meta = _stream(file, options)
    if len(rows) < 2:
        return None
    experts = meta.num_experts or int(rows.max()) + 1
    return reset_stride(overlap(rows[:-1], rows[1:]), np.arange(1, len(rows)), rows.shape[2] / experts)


def _chunks(files: list[Path], sizes: tuple[int, int], chunk: int | None, options: Options) -> Iterator[Request]:
    for file in files:
        rows, _ = _stream(file, options)
        if rows.shape[1:] != sizes:
            raise TraceError(f"{file}: {rows.shape[1:]} (layers, k): expected {sizes}, as in {files[0].name}")
        for start in range(0, len(rows), chunk or len(rows)):
            part = rows[start : start + (chunk or len(rows))]
            yield Request(part, options.prompt_of(len(part), len(part)))


LAYERS_NPZ = Importer(
    name="layers_npz",
    summary="teacher-forced streams, layer first, ids only (llama.cpp recordings)",
    formats="FILE.npz with experts (layers, tokens, k) and meta, or a folder of them",
    sniff=sniff_layers,
    read=read_layers,
    arrays=True,
)
