"""Routing of a Megatron run as DynaNDE publishes it: a csv or a torch file per layer, with the scores of the chosen.

    layer_id,token_id,expert_0,...,expert_{E-1}        0 where an expert was not chosen

or a dict of `indices` (T, k), `scores` (T, k) and, if they are there, `samples` (T,) token ids and `layer`. A file
holds one layer, numbered in its name (`_layer11_`) or in the dict (`layer_id` is always 0); or it holds several by
their `layer_id`. Megatron has the sequence before the batch, so row s * B + b is token s of text b: B is found where
rows that far from each other share most experts, and rows are put into B requests.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for
from moereplay.traces.importers.sources import files_of
from moereplay.traces.importers.table import COUNT, LAYER, read_table
from moereplay.traces.importers.text import start_of, suffix_of
from moereplay.traces.importers.torch_file import Archive, Tensor, mentions, torch_files
from moereplay.traces.patterns import interleaved
from moereplay.traces.schema import VALUES, Request, TraceError, check_values

START = b"layer_id,token_id,expert_0"
NUMBERED = re.compile(r"layer[_-]?(\d{1,4})", re.IGNORECASE)
FORCED = "tokens of texts fed to the model: every token is prompt; replay it token by token"


class Layer(NamedTuple):
    """One layer's rows."""

    number: int
    ids: np.ndarray  #: (T, k), -1 where fewer were chosen
    scores: np.ndarray  #: (T, k)
    experts: int | None
    tokens: np.ndarray | None  #: (T,) input tokens
    file: Path


def sniff(path: Path) -> bool:
    """Return True for a csv that begins with these columns, a torch file of indices and scores, or a folder of them."""
    tables = files_of(path, ".csv")
    return start_of(tables[0], len(START)) == START if tables else mentions(path, "samples", "indices", "scores")


def read(path: Path, options: Options) -> Foreign:
    """Return a request per text.

    Raises TraceError naming the file whose rows differ from the others' or repeat them.
    """
    files = files_of(path, ".csv") or torch_files(path)
    if not files:
        raise TraceError(f"{path}: missing .csv or .pt files: expected {START.decode()},..., or indices and scores")
    layers = sorted((layer for file in files for layer in _of_file(file)), key=lambda layer: layer.number)
    ids, scores = _together(path, layers)
    batch = interleaved(ids)
    count, tokens = layers[0].experts, layers[0].tokens
    notes = [FORCED, _order(batch, len(ids)), *_copies(layers)]
    shape = Shape(len(layers), ids.shape[2], int(ids.max()), count)
    header = header_for(shape, options, Origin(DYNANDE.name, path, files), notes)
    return Foreign(header, _requests(ids, scores, tokens, batch, options))


def _requests(
    ids: np.ndarray, scores: np.ndarray, tokens: np.ndarray | None, batch: int, options: Options
) -> Iterator[Request]:
    for text in range(batch):
        own = ids[text::batch]
        prompt = options.prompt_of(len(own), len(own))
        yield Request(own, prompt, scores[text::batch], token_ids=None if tokens is None else tokens[text::batch])


def _order(batch: int, rows: int) -> str:
    if batch == 1:
        return "rows are taken as the tokens of one text: no batch was found in their order"
    how = f"rows {batch} apart share most experts, so they are in Megatron's order of sequence before batch"
    return f"{how}: {batch} texts of {rows // batch} tokens"


def _copies(layers: list[Layer]) -> Iterator[str]:
    """Yield a line for each layer that has the rows of an earlier one."""
    seen: dict[bytes, int] = {}
    for layer in layers:
        first = seen.setdefault(layer.ids.tobytes(), layer.number)
        if first != layer.number:
            yield f"layer {layer.number} has the rows of layer {first} throughout: a copy, not a layer of its own"


def _together(path: Path, layers: list[Layer]) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and scores (T, L, k). Raises TraceError for layers of other lengths or widths, or of one number."""
    first, k = layers[0], max(layer.ids.shape[1] for layer in layers)
    for before, layer in itertools.pairwise(layers):
        if layer.number == before.number:
            raise TraceError(f"{layer.file} and {before.file.name} are both layer {layer.number}; import one of them")
        if (len(layer.ids), layer.experts) != (len(first.ids), first.experts):
            said = f"{len(layer.ids)} tokens, {layer.experts or 'any number of'} experts"
            raise TraceError(
                f"{layer.file} has {said}; {first.file.name} has {len(first.ids)}, {first.experts or 'any'}"
            )
    if int(max(layer.ids.max() for layer in layers)) < 0:
        raise TraceError(f"{path}: all scores are 0: expected the scores of the chosen experts")
    ids = np.stack([_wide(layer.ids, k, -1) for layer in layers], 1)
    return ids, np.stack([_wide(layer.scores, k, 0) for layer in layers], 1)


def _wide(rows: np.ndarray, k: int, fill: int) -> np.ndarray:
    return np.pad(rows, ((0, 0), (0, k - rows.shape[1])), constant_values=fill)


def _of_file(file: Path) -> list[Layer]:
    return _of_table(file) if suffix_of(file) == ".csv" else [_of_torch(file)]


def _of_table(file: Path) -> list[Layer]:
    """Return the layers of a csv, by their number where there are several, else by the file's name."""
    table = read_table(file, ("layer_id", "token_id", "expert_0"))
    names = [name for name in table.columns if name not in ("layer_id", "token_id")]
    if names != [f"expert_{number}" for number in range(len(names))]:
        raise TraceError(f"{file} line 1: invalid columns: expected layer_id,token_id,expert_0,expert_1,...")
    layer, token = table.checked(LAYER, "layer_id"), table.checked(COUNT, "token_id")
    scores = table.checked(VALUES["weights"], *names).reshape(len(layer), -1)
    numbers = np.unique(layer)
    alone = _number(file) if len(numbers) == 1 else None
    found = []
    for number in numbers.tolist():
        own = layer == number
        _check_tokens(file, token[own], table.lines[own])
        ids, kept = _ranked(scores[own])
        found.append(Layer(number if alone is None else alone, ids, kept, len(names), None, file))
    return found


def _check_tokens(file: Path, tokens: np.ndarray, lines: np.ndarray) -> None:
    wrong = np.flatnonzero(np.diff(tokens) != 1)
    if len(wrong):
        line, token = lines[wrong[0] + 1], tokens[wrong[0] + 1]
        raise TraceError(
            f"{file} line {line}: invalid token_id {token} after {tokens[wrong[0]]}: expected the next number"
        )


def _ranked(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the chosen by falling score, as ids (T, k) and scores (T, k); k is the most that a token has."""
    order = np.argsort(-scores, axis=-1, kind="stable")[:, : max(1, int((scores > 0).sum(1).max()))]
    kept = np.take_along_axis(scores, order, -1)
    return np.where(kept > 0, order, -1), kept


def _of_torch(file: Path) -> Layer:
    root: Any = Archive(file).root
    fields = root if isinstance(root, dict) else {}
    ids, scores, tokens = (fields.get(name) for name in ("indices", "scores", "samples"))
    for tensor in (ids, scores):
        if not isinstance(tensor, Tensor) or len(tensor.shape) != 2 or min(tensor.shape) < 1:
            raise TraceError(f"{file}: missing indices and scores (tokens, k): expected tensors of one layer")
    rows, weights = ids.array(), scores.array()  # type: ignore[union-attr]
    if rows.shape != weights.shape:
        raise TraceError(f"{file}: indices are {rows.shape}, scores {weights.shape}: expected the same shape")
    check_values(rows, "chosen", f"{file}: indices")
    check_values(weights, "weights", f"{file}: scores")
    layer, named = fields.get("layer"), _number(file)
    number = layer if type(layer) is int and 0 <= layer <= LAYER.most else named
    return Layer(number or 0, rows, weights, None, _samples(tokens, len(rows), file), file)


def _samples(tokens: Any, rows: int, file: Path) -> np.ndarray | None:
    if not isinstance(tokens, Tensor) or tokens.kind not in "iu" or tokens.shape != (rows,):
        return None
    found = tokens.array()
    check_values(found, "token_ids", f"{file}: samples")
    return found


def _number(file: Path) -> int | None:
    """Return the layer that a file is named after."""
    found = NUMBERED.findall(file.stem)
    return int(found[-1]) if found else None


DYNANDE = Importer(
    name="dynande",
    summary="Megatron routing as DynaNDE publishes it: scores of the chosen, rows by sequence before batch",
    formats="FILE.csv with layer_id,token_id,expert_0,..., FILE.pt with samples, indices, scores; or their folder",
    sniff=sniff,
    read=read,
)
