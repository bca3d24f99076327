"""A routing atlas: one JSON document with the ids of all rows by layer, as of GLM-5.2 in colibri's issue 119.

    {"schema": "glm52-routing-trace-export/v2", "routing": {"k": 8},
     "layers": {"3": {"executed_topk": [[17, 40, ...], ...], "executed_scores": ...}, ...},
     "conditional": {"prompts": [{"row_start": 0, "row_end": 37, "category": "math"}, ...]}}

Rows are tokens of prompts, one after the other; `conditional.prompts` says where each begins. Scores are what the
router selects by (a sigmoid and its correction bias) and not gate weights: they are left out. The document is described
by its author in words; where its prompts have other keys than those known here, all rows are one request, with a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.importers.by_request import renumbering
from moereplay.traces.importers.contract import (
    Foreign,
    Importer,
    Options,
    Origin,
    assumed,
    counted,
    header_for,
    prompt_tokens,
)
from moereplay.traces.importers.rows import fits, refuse_twice
from moereplay.traces.importers.table import COUNT, LAYER, ids_below
from moereplay.traces.importers.text import read_json, start_of, suffix_of
from moereplay.traces.schema import Request, TraceError, shown

IDS = "executed_topk"
LOOKED_AT = 1 << 20  #: bytes of a document in which the first layer begins
STARTS, ENDS = ("row_start", "start_row", "row_begin", "start"), ("row_end", "end_row", "end")
RANGES, LENGTHS = ("row_range", "rows"), ("prompt_tokens", "n_rows", "tokens")
FORCED = "whole prompts: every token is prompt; replay it token by token"
SCORES = "executed_scores are scores of selection, with the router's bias, and no gate weights: left out"


def sniff(path: Path) -> bool:
    """A JSON document that has the ids of layers under their name."""
    return path.is_file() and suffix_of(path) == ".json" and f'"{IDS}"'.encode() in start_of(path, LOOKED_AT)


def read(path: Path, options: Options) -> Foreign:
    """A request per prompt. Raises TraceError naming the layer whose rows are wrong."""
    document = read_json(path)
    layers = document.get("layers") if isinstance(document, dict) else None
    if not isinstance(layers, dict) or not layers:
        raise TraceError(f'{path}: no layers; expected {{"layers": {{"3": {{"{IDS}": [[ids], ...]}}}}}}')
    if wrong := [name for name in layers if not name.isdecimal() or len(name) > 4 or not fits(int(name), LAYER)]:
        raise TraceError(f"{path}: layers has {shown(wrong[0])!r}; expected numbers of layers")
    numbers = sorted(map(int, layers))
    k = document["routing"].get("k") if isinstance(document.get("routing"), dict) else None
    ids = np.stack(_alike([_ids(layers[str(number)], number, k, path) for number in numbers], numbers, path), 1)
    ends, said = _ends(document, len(ids))
    shape = counted(ids, len(numbers), options)
    how = [f"rows are tokens, k = {ids.shape[2]}", said, *renumbering(np.array(numbers))]
    scored = any(isinstance(each, dict) and "executed_scores" in each for each in layers.values())
    notes = [assumed(how, shape, options), FORCED, *([SCORES] if scored else [])]
    header = header_for(shape, options, Origin(IMPORTER.name, path, [path]), notes)
    return Foreign(header, _requests(ids, ends, options))


def _requests(ids: np.ndarray, ends: list[int], options: Options) -> Iterator[Request]:
    for first, last in pairwise(ends):
        yield Request(ids[first:last], prompt_tokens(options, last - first, last - first))


def _ids(layer: Any, number: int, k: Any, path: Path) -> np.ndarray:
    """(T, k) of one layer."""
    rows = layer.get(IDS) if isinstance(layer, dict) else None
    place = f"{path}: layer {number}: {IDS}"
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], list):
        raise TraceError(f"{place} is {shown(rows)}; expected [[ids of a token], ...]")
    width = k if isinstance(k, int) else len(rows[0])
    for at, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != width or not all(fits(each, ids_below(None)) for each in row):
            raise TraceError(f"{place}[{at}] is {shown(row)}; expected {width} ids, each {ids_below(None).expected}")
    found = np.array(rows, np.int64)
    refuse_twice(path, np.arange(len(found)), found)
    return found


def _alike(layers: list[np.ndarray], numbers: list[int], path: Path) -> list[np.ndarray]:
    """The layers. Raises TraceError for one of other tokens or k than the first."""
    for number, ids in zip(numbers, layers, strict=True):
        if ids.shape != layers[0].shape:
            raise TraceError(f"{path}: layer {number} has ids {ids.shape}; layer {numbers[0]} has {layers[0].shape}")
    return layers


def _ends(document: dict[str, Any], tokens: int) -> tuple[list[int], str]:
    """Where prompts begin, and the last ends; and how that is known. Raises TraceError for ranges with gaps."""
    conditional = document.get("conditional")
    prompts = conditional.get("prompts") if isinstance(conditional, dict) else None
    if not isinstance(prompts, list) or not prompts:
        return [0, tokens], "no prompts are listed: one request"
    found = [_range(prompt) for prompt in prompts]
    ranges = [each for each in found if each is not None]
    if len(ranges) < len(found):
        lengths = [_length(prompt) for prompt in prompts]
        if sum(lengths) != tokens or not all(lengths):
            keys = shown(", ".join(prompts[0]) if isinstance(prompts[0], dict) else prompts[0])
            return [0, tokens], f"prompts have {keys}, no rows that are known: one request"
        return [0, *np.cumsum(lengths).tolist()], f"{len(lengths):,} requests, as the lengths of prompts say"
    ends = [0, *(last for _, last in ranges)]
    if [first for first, _ in ranges] != ends[:-1] or ends[-1] != tokens or min(np.diff(ends)) < 1:
        wrong = next(
            (at for at, (first, last) in enumerate(ranges) if first != ends[at] or last <= first), len(ranges) - 1
        )
        raise TraceError(
            f"conditional.prompts[{wrong}] has rows {ranges[wrong]}; expected ranges up to {tokens:,} without gaps"
        )
    return ends, f"{len(ranges):,} requests, by the rows of prompts"


def _length(prompt: Any) -> int:
    """The rows of a prompt, 0 if its keys do not say it."""
    found = [prompt.get(name) for name in LENGTHS] if isinstance(prompt, dict) else []
    return next((int(each) for each in found if each is not None and fits(each, COUNT)), 0)


def _range(prompt: Any) -> tuple[int, int] | None:
    """The first row of a prompt and the one after its last."""
    if not isinstance(prompt, dict):
        return None
    pair: Any = next((prompt[name] for name in RANGES if isinstance(prompt.get(name), list)), None)
    if pair is None:
        pair = [next((prompt[name] for name in names if name in prompt), None) for names in (STARTS, ENDS)]
    return (pair[0], pair[1]) if len(pair) == 2 and all(fits(each, COUNT) for each in pair) else None


IMPORTER = Importer(
    name="routing_atlas",
    summary="routing atlases as of GLM-5.2: ids of all rows by layer, prompts by their rows",
    formats="FILE.json with layers.N.executed_topk [[ids], ...] and conditional.prompts",
    sniff=sniff,
    read=read,
)
