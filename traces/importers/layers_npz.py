"""Teacher-forced text as npz, layer first: `experts` (L, T, k) ids in rank order and `meta`, a JSON string.

`meta` keys read: `model`, `num_experts`, `n_moe_layers`, `k`, `chunk`, `source`. A file is a stream of text; a folder
is one stream per file, by name. The recorder of these files clears its context every so many tokens (`--chunk`, else
`chunk`, else found where the overlap of adjacent tokens keeps falling to chance); a request is the text between two
resets. Nothing was generated: a whole request is prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from moereplay.traces.frozen import first_fault
from moereplay.traces.importers import archive
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for, prompt_tokens
from moereplay.traces.importers.sources import files_of
from moereplay.traces.importers.text import parse_json
from moereplay.traces.patterns import overlap, reset_stride
from moereplay.traces.schema import Request, TraceError, shown

ARRAYS = frozenset({"experts", "meta"})
FORCED = "teacher-forced text: every token is prompt; replay it token by token"


class Meta(BaseModel):
    """The keys of `meta` that are used; others are ignored."""

    model: str | None = None
    source: str = ""
    num_experts: int | None = Field(default=None, ge=1)
    n_moe_layers: int | None = None
    k: int | None = None
    chunk: int | None = Field(default=None, ge=1)


def sniff(path: Path) -> bool:
    """npz files, alone or in a folder, that all hold experts and meta."""
    files = files_of(path, ".npz")
    return bool(files) and all(archive.members(file) >= ARRAYS for file in files)


def read(path: Path, options: Options) -> Foreign:
    """Requests between context resets, file after file. Raises TraceError if a file contradicts its meta."""
    files = files_of(path, ".npz")
    if not files:
        raise TraceError(f"{path}: no .npz files; expected arrays {', '.join(sorted(ARRAYS))}")
    rows, meta = _stream(files[0])
    _, layers, k = rows.shape
    others = [] if meta.num_experts or options.geometry else files[1:]  # whose ids say how many experts there are
    highest = max(int(rows.max()), *(int(_stream(file)[0].max()) for file in others), -1)
    shape = Shape(layers, k, highest, experts=meta.num_experts)
    chunk, how = _chunk(files, meta, options)
    origin = Origin(IMPORTER.name, path, files, model=meta.model, revision=meta.source)
    header = header_for(shape, options, origin, [FORCED, how])
    return Foreign(header, _requests(files, (layers, k), chunk, options))


def _stream(file: Path) -> tuple[np.ndarray, Meta]:
    """Rows (T, L, k) and meta of one file, checked against each other."""
    rows = archive.expert_ids(file, "experts").transpose(1, 0, 2)
    try:
        meta = Meta.model_validate(parse_json(archive.text(file, "meta"), f"{file}: meta"))
    except ValidationError as wrong:
        raise TraceError(f"{file}: meta: {first_fault(wrong)}; expected a JSON object") from wrong
    for key, said, found in (("n_moe_layers", meta.n_moe_layers, rows.shape[1]), ("k", meta.k, rows.shape[2])):
        if said not in (None, found):
            told = f"meta says {key} = {shown(said)}, but experts has {found}"
            raise TraceError(f"{file}: {told}; expected (layers, tokens, k)")
    if meta.num_experts is not None and rows.max() >= meta.num_experts:
        raise TraceError(f"{file}: experts has id {rows.max()}, but meta says num_experts = {meta.num_experts}")
    return rows, meta


def _chunk(files: list[Path], meta: Meta, options: Options) -> tuple[int | None, str]:
    """Tokens between context resets, None if there are none, and the note that says how it is known."""
    told = options.chunk or meta.chunk
    if told:
        return told, f"split into requests of {told} tokens, as told"
    strides = (_found_stride(file) for file in files)
    found = next((stride for stride in strides if stride), None)
    if found is None:
        return None, "no context resets found: one request per file"
    return found, f"split into requests of {found} tokens: there the overlap of adjacent tokens falls to chance"


def _found_stride(file: Path) -> int | None:
    rows, meta = _stream(file)
    if len(rows) < 2:
        return None
    experts = meta.num_experts or int(rows.max()) + 1
    return reset_stride(overlap(rows[:-1], rows[1:]), np.arange(1, len(rows)), rows.shape[2] / experts)


def _requests(files: list[Path], sizes: tuple[int, int], chunk: int | None, options: Options) -> Iterator[Request]:
    for file in files:
        rows, _ = _stream(file)
        if rows.shape[1:] != sizes:
            raise TraceError(f"{file}: {rows.shape[1:]} (layers, k); expected {sizes}, as in {files[0].name}")
        for start in range(0, len(rows), chunk or len(rows)):
            part = rows[start : start + (chunk or len(rows))]
            yield Request(part, prompt_tokens(options, len(part), len(part)))


IMPORTER = Importer(
    name="layers_npz",
    summary="teacher-forced streams, layer first, ids only (llama.cpp recordings)",
    formats="FILE.npz with experts (layers, tokens, k) and meta, or a folder of them",
    sniff=sniff,
    read=read,
)
