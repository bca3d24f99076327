"""Ids in archives of numpy: an array of any name, decode runs of gpt-oss, teacher-forced text layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from moereplay.traces.documents import first_fault
from moereplay.traces.importers import answers, archive, router_logits
from moereplay.traces.importers.answers import padding_of
from moereplay.traces.importers.contract import (
    DECODE_ONLY,
    LAYERS_FIRST,
    Foreign,
    Importer,
    Options,
    Origin,
    Shape,
    header_for,
)
from moereplay.traces.importers.layer_files import TOKENS
from moereplay.traces.importers.sources import files_of
from moereplay.traces.importers.text import parse_json, read_json
from moereplay.traces.patterns import overlap, reset_stride
from moereplay.traces.schema import Request, Router, TraceError, check_values, shown
from moereplay.traces.texts import counted

SUFFIXES = (".npy", ".npz")


def sniff_arrays(path: Path) -> bool:
    """Return True for an npy file, or an npz archive with one array, or with several of which --columns selects one.

    False for files of other importers.
    """
    if not path.is_file() or router_logits.sniff(path) or answers.sniff_vllm(path):
        return False
    return path.suffix == ".npy" or (path.suffix == ".npz" and len(archive.members(path)) == 1)


def read_arrays(path: Path, options: Options) -> Foreign:
    """Read an array of expert ids (tokens, layers, k) in rank order, in an npy file or an npz archive: one request.

    An archive with several such arrays, or with gate weights of the same shape, is read with `--columns
    experts=NAME,weights=NAME`. Prompt tokens are not marked; pass `--prompt-length`.

    Return one request. Raises TraceError for arrays without valid ids.
    """
    if not path.is_file() or path.suffix not in SUFFIXES:
        raise TraceError(f"{path}: invalid suffix: expected a file ending in {' or '.join(SUFFIXES)}")
    ids, weights, said = _arrays(path, options)
    lengths = _lengths(path)

    def turned(array: np.ndarray) -> np.ndarray:
        return options.token_first(array, str(path), fits=fits, ids=ids)

    def fits(tokens: int) -> bool:
        return tokens >= (options.prompt_length or 0) and tokens in (lengths or {tokens})

    ids, weights = turned(ids), None if weights is None else turned(weights)
    padded = padding_of(ids)
    ids, weights = ids[: len(ids) - padded], None if weights is None else weights[: len(ids) - padded]
    tokens, layers, k = ids.shape
    shape = options.counted(ids, layers)
    axes = "layer, token, rank" if options.axes == LAYERS_FIRST else "token, layer, rank"
    how = f"axes are ({axes}), {counted(tokens, 'token')}, k = {k}; one request"
    notes = [options.assumed([*said, how], shape), *options.phase_note()]
    notes += [f"{padded} rows at the end are padding, with the same ids in all layers: left out"] * bool(padded)
    header = header_for(shape, options, Origin(ARRAYS.name, path, [path]), notes)
    return Foreign(header, iter([Request(ids, options.prompt_of(len(ids), 0), weights=weights)]))


def _arrays(path: Path, options: Options) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
    """Return ids, weights if they are named, and notes."""
    asked = options.columns or {}
    if others := [field for field in asked if field not in ("experts", "weights")]:
        raise TraceError(
            f"{path}: --columns {others[0]}= cannot be combined with arrays; pass only experts= and weights="
        )
    if path.suffix == ".npy":
        if asked:
            raise TraceError(f"{path}: --columns cannot be combined with one array without a name")
        return archive.checked_ids(archive.lone(path), str(path)), None, []
    experts = asked["experts"][0] if "experts" in asked else _only(path)
    ids = archive.expert_ids(path, experts)
    weights = _weights(path, asked["weights"][0], ids) if "weights" in asked else None
    return ids, weights, [f"array {shown(experts)} holds the experts"]


def _only(path: Path) -> str:
    """Return the only array of an archive. Raises TraceError if there are several."""
    found = sorted(archive.members(path))
    if len(found) != 1:
        listed = shown(", ".join(found), 200) or "none"
        raise TraceError(f"{path}: its arrays are {listed}; pass the array of ids with --columns experts=NAME")
    return found[0]


def _weights(path: Path, name: str, ids: np.ndarray) -> np.ndarray:
    (weights,) = archive.arrays(path, name)
    if weights.shape != ids.shape:
        raise TraceError(f"{path}: {name} has shape {weights.shape}: expected {ids.shape}, as the experts")
    check_values(weights, "weights", f"{path}: {name}")
    return weights


def _lengths(path: Path) -> set[int]:
    """Return the lengths of the arrays of tokens beside the ids: their number of tokens."""
    if path.suffix != ".npz":
        return set()
    names = sorted(archive.members(path) & set(TOKENS))
    return {array.size for array in archive.arrays(path, *names) if array.ndim == 1 or 1 in array.shape[:1]}


ARRAYS = Importer(
    name="arrays",
    summary="an array of ids of any program: (tokens, layers, k)",
    formats="FILE.npy, or FILE.npz with one array, or with --columns experts=NAME[,weights=NAME]",
    sniff=sniff_arrays,
    read=read_arrays,
    columns=True,
    arrays=True,
)


# ---------------------------------------------------------------- gpt-oss runs

GPTOSS_ARRAYS = frozenset({"ids", "probs", "offsets"})


def sniff_gptoss(path: Path) -> bool:
    """Return True for one npz, alone or in a folder, that holds ids, probs and offsets."""
    files = files_of(path, ".npz")
    return len(files) == 1 and archive.members(files[0]) >= GPTOSS_ARRAYS


def read_gptoss(path: Path, options: Options) -> Foreign:
    """Read decode-only gpt-oss routing as one npz: many runs end to end.

    Arrays: `ids` (N, L, k) expert ids in rank order, `probs` (N, L, k) softmax over the chosen, `offsets` (R + 1,)
    first row of each run, optional `pos0` (R,) prompt length of each run. A sibling `NAME.meta.json` may list the
    runs (`n_prompt_tokens`, `n_decode_steps`); it is checked against the arrays. Prompt rows were not recorded, so
    every request starts at its first decoded token. Files of token texts in the folder are ignored.

    Return a request per run, weights = probs. Raises TraceError if the arrays or the list of runs disagree.
    """
    file = _only_archive(path)
    ids = archive.expert_ids(file, "ids")
    probs, offsets = archive.arrays(file, "probs", "offsets")
    offsets = _checked(file, ids, probs, offsets)
    listing = file.with_suffix(".meta.json")
    files = [file, listing] if listing.exists() else [file]
    if listing.exists():
        _check_listing(file, listing, offsets)
    shape = Shape(ids.shape[1], ids.shape[2], int(ids.max()), router=Router(family="topk_softmax"))
    origin = Origin(GPTOSS_NPZ.name, path, files, decoding="recorded decode steps")
    return Foreign(header_for(shape, options, origin, [DECODE_ONLY]), _runs(ids, probs, offsets, options))


def _only_archive(path: Path) -> Path:
    files = files_of(path, ".npz")
    if len(files) != 1:
        raise TraceError(f"{path}: {len(files)} npz files: expected one with {', '.join(sorted(GPTOSS_ARRAYS))}")
    return files[0]


def _checked(file: Path, ids: np.ndarray, probs: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the offsets as int64."""
    if probs.shape != ids.shape:
        raise TraceError(f"{file}: probs has shape {probs.shape}: expected that of ids, {ids.shape}")
    check_values(probs, "weights", f"{file}: probs")
    rows = len(ids)
    fine = offsets.ndim == 1 and len(offsets) > 1 and offsets.dtype.kind in "iu"
    fine = fine and offsets.min() == offsets[0] == 0 and offsets.max() == offsets[-1] == rows
    if not fine or (np.diff(offsets.astype(np.int64)) < 1).any():
        raise TraceError(f"{file}: offsets do not divide {rows} rows into runs: expected 0 rising to {rows}")
    return offsets.astype(np.int64)


def _check_listing(file: Path, listing: Path, offsets: np.ndarray) -> None:
    runs = read_json(listing)
    steps = np.diff(offsets).tolist()
    if not isinstance(runs, list) or len(runs) != len(steps):
        raise TraceError(f"{listing}: expected a list of the {len(steps)} runs of {file.name}")
    prompts = _prompts(file, len(steps)) if "pos0" in archive.members(file) else [None] * len(steps)
    for index, run in enumerate(runs):
        if not isinstance(run, dict) or run.get("n_decode_steps", steps[index]) != steps[index]:
            raise TraceError(
                f"{listing}: run {index} has another number of decode steps: expected {steps[index]}, as in {file.name}"
            )
        if prompts[index] is not None and run.get("n_prompt_tokens", prompts[index]) != prompts[index]:
            raise TraceError(
                f"{listing}: run {index} has another prompt length: expected {prompts[index]}, as in {file.name}"
            )


def _prompts(file: Path, runs: int) -> list[int]:
    (prompts,) = archive.arrays(file, "pos0")
    if prompts.shape != (runs,) or prompts.dtype.kind not in "iu":
        raise TraceError(
            f"{file}: invalid pos0 {prompts.dtype}{prompts.shape}: expected an integer for each of {runs} runs"
        )
    return prompts.tolist()


def _runs(ids: np.ndarray, probs: np.ndarray, offsets: np.ndarray, options: Options) -> Iterator[Request]:
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        yield Request(ids[start:stop], options.prompt_of(stop - start, 0), weights=probs[start:stop])


GPTOSS_NPZ = Importer(
    name="gptoss_npz",
    summary="gpt-oss decode runs in one npz, with gate weights",
    formats="NAME.npz with ids, probs, offsets (and NAME.meta.json), or its folder",
    sniff=sniff_gptoss,
    read=read_gptoss,
)


# ---------------------------------------------------------------- teacher-forced text

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
