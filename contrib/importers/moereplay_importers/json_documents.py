"""Ids in one JSON document: rows [layer, expert, ...], and routing atlases."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.importers.by_request import renumbering
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, header_for
from moereplay.traces.importers.rows import Rows, Seen, fits, refuse_twice, requests_in, streamed
from moereplay.traces.importers.table import COUNT, LAYER, ids_below
from moereplay.traces.importers.text import read_json, start_of, suffix_of
from moereplay.traces.schema import MOST_EXPERTS, Request, TraceError, shown
from moereplay.traces.texts import counted

LISTS = ("trace", "entries", "data")
START = re.compile(
    rb'\s*(?:\{[^\[\]{}]{0,4000}"(?:trace|entries|data)"\s*:\s*)?\[\s*\[?\s*\d{1,6}\s*,\s*-?\d{1,6}\s*[,\]]'
)
LOOKED_AT = 1 << 13  #: bytes
WIDEST = 65  #: numbers of a row whose width is looked for
FORM = "[[layer, expert, ...], ...], alone or under trace, entries or data, or a flat list and top_k"
DECODED = "decode steps only: prompts and request boundaries were not recorded"


def sniff_rows(path: Path) -> bool:
    """Return True for a JSON document that begins with lists of whole numbers."""
    return path.is_file() and suffix_of(path) == ".json" and bool(START.match(start_of(path, LOOKED_AT)))


def read_rows(path: Path, options: Options) -> Foreign:
    """Read rows [layer, expert, expert, ...], one per token and layer, as imp's diagnostics write them.

        [[0, 6, 10, 8], [1, 3, 2, 0], ...]
        {"top_k": 3, "trace": [[0, 6, 10, 8], ...]}
        [0, 6, 10, 8, 1, 3, 2, 0, ...]

    The rows may be under `trace`, `entries` or `data`. They are decode steps: a token begins where the layer
    does not rise; requests are not marked. A flat list has rows of `top_k` + 1 numbers; without `top_k` the
    width is inferred, if exactly one makes the layers repeat. In imp a slot of the cache is one of an expert's three
    matrices: its 186 slots per layer are 62 experts here. Source: kekzl/imp, tools/analysis/expert_cache_sim.py.

    Return one request. Raises TraceError naming the row that is wrong.
    """
    if not path.is_file():
        raise TraceError(f"{path}: invalid document: expected JSON of {FORM}")
    rows, said = _rows(path)
    layer, experts = rows[:, 0], rows[:, 1:]
    token = np.cumsum(np.concatenate([[False], np.diff(layer) <= 0]))
    numbers = np.arange(len(rows))
    found = Rows(path, numbers, np.zeros_like(numbers), token, layer, experts, phase=np.ones_like(numbers))
    seen = Seen([found])
    shape = seen.shape(options)
    notes = [options.assumed([*said, *renumbering(seen.layers), f"k = {seen.k}; one request"], shape), DECODED]
    header = header_for(shape, options, Origin(LAYER_ROWS.name, path, [path], decoding="recorded decode steps"), notes)
    return Foreign(header, requests_in(streamed(path, [found], seen), header.geometry, options))


def _rows(path: Path) -> tuple[np.ndarray, list[str]]:
    """Return (N, 1 + k) of the document, -1 where a row is shorter, and how it was read."""
    document, k = read_json(path), None
    if isinstance(document, dict):
        k = document.get("top_k")
        if k is not None and not fits(k, LAYER._replace(least=1, most=MOST_EXPERTS)):
            raise TraceError(f"{path}: invalid top_k {shown(k)}: expected the number of experts per token")
        document = next((document[name] for name in LISTS if isinstance(document.get(name), list)), None)
    if not isinstance(document, list) or not document:
        raise TraceError(f"{path}: no rows: expected {FORM}")
    said = []
    if not isinstance(document[0], list):
        width = k + 1 if k else _width(document, path)
        if len(document) % width:
            raise TraceError(
                f"{path}: {len(document):,} numbers do not divide into rows of {width}: the file may be truncated"
            )
        said = [f"a flat list of rows of {width} numbers"]
        document = [document[at : at + width] for at in range(0, len(document), width)]
    for at, row in enumerate(document):
        _check(row, f"{path} row {at}")
    widest = max(map(len, document))
    return np.array([row + [-1] * (widest - len(row)) for row in document], np.int64), said


def _check(row: Any, place: str) -> None:
    """Raises TraceError for anything but a layer with its experts."""
    if not isinstance(row, list) or len(row) < 2:
        raise TraceError(f"{place}: invalid row {shown(row)}: expected [layer, expert, ...]")
    if not fits(row[0], LAYER) or not all(fits(each, ids_below(None)) for each in row[1:]):
        raise TraceError(
            f"{place}: invalid row {shown(row)}: expected a layer, then experts, {ids_below(None).expected}"
        )


def _width(numbers: list[Any], path: Path) -> int:
    """Return the width of rows whose layers come round. Raises TraceError if there is none, or more than one."""
    if not all(type(each) is int for each in numbers):
        raise TraceError(f"{path}: not a flat list of integers: expected {FORM}")
    flat = np.array(numbers, np.float64)
    fitting = [
        width for width in range(2, WIDEST + 1) if len(flat) % width == 0 and _comes_round(flat.reshape(-1, width))
    ]
    if len(fitting) != 1:
        found = f"rows of {' or '.join(map(str, fitting))} numbers fit" if fitting else "no row width fits"
        raise TraceError(f'{path}: a flat list without top_k: {found}; use {{"top_k": k, "trace": [...]}}')
    return fitting[0]


def _comes_round(rows: np.ndarray) -> bool:
    """Return True if layers (the first of 1 + k numbers) repeat one rising sequence, and experts differ in each row."""
    layer = rows[:, 0]
    falls = np.flatnonzero(np.diff(layer) <= 0) + 1
    period = int(falls[0]) if len(falls) else len(layer)
    ordered = np.sort(rows[:, 1:], axis=1)
    distinct = not (ordered[:, 1:] == ordered[:, :-1]).any()
    return distinct and len(layer) % period == 0 and bool((layer.reshape(-1, period) == layer[:period]).all())


LAYER_ROWS = Importer(
    name="layer_rows",
    summary="imp's decode traces and others of rows [layer, expert, ...]: ids of every decode step",
    formats="FILE.json of [[layer, expert, ...], ...], alone or under trace, entries or data; or flat, with top_k",
    sniff=sniff_rows,
    read=read_rows,
)


# ---------------------------------------------------------------- routing atlases

IDS = "executed_topk"
ATLAS_START = 1 << 20  #: bytes of a document in which the first layer begins
STARTS, ENDS = ("row_start", "start_row", "row_begin", "start"), ("row_end", "end_row", "end")
RANGES, LENGTHS = ("row_range", "rows"), ("prompt_tokens", "n_rows", "tokens")
FORCED = "whole prompts: every token is prompt; replay it token by token"
SCORES = "executed_scores are selection scores with the router's bias, not gate weights: left out"


def sniff_atlas(path: Path) -> bool:
    """Return True for a JSON document that has the ids of layers under their name."""
    return path.is_file() and suffix_of(path) == ".json" and f'"{IDS}"'.encode() in start_of(path, ATLAS_START)


def read_atlas(path: Path, options: Options) -> Foreign:
    """Read a routing atlas, the ids of all rows by layer, as of GLM-5.2 in colibri's issue 119.

        {"schema": "glm52-routing-trace-export/v2", "routing": {"k": 8},
         "layers": {"3": {"executed_topk": [[17, 40, ...], ...], "executed_scores": ...}, ...},
         "conditional": {"prompts": [{"row_start": 0, "row_end": 37, "category": "math"}, ...]}}

    Rows are the tokens of consecutive prompts; `conditional.prompts` gives the start of each. Scores are those that
    the router selects by (a sigmoid plus its correction bias), not gate weights, so they are left out. The document
    is described by its author in words; where its prompts have other keys than those known here, all rows are one
    request, with a note.

    Return a request per prompt. Raises TraceError naming the layer whose rows are wrong.
    """
    document = read_json(path)
    layers = document.get("layers") if isinstance(document, dict) else None
    if not isinstance(layers, dict) or not layers:
        raise TraceError(f'{path}: missing layers: expected {{"layers": {{"3": {{"{IDS}": [[ids], ...]}}}}}}')
    if wrong := [name for name in layers if not name.isdecimal() or len(name) > 4 or not fits(int(name), LAYER)]:
        raise TraceError(f"{path}: invalid key {shown(wrong[0])!r} in layers: expected layer numbers")
    numbers = sorted(map(int, layers))
    k = document["routing"].get("k") if isinstance(document.get("routing"), dict) else None
    ids = np.stack(_alike([_ids(layers[str(number)], number, k, path) for number in numbers], numbers, path), 1)
    ends, said = _ends(document, len(ids))
    shape = options.counted(ids, len(numbers))
    how = [f"rows are tokens, k = {ids.shape[2]}", said, *renumbering(np.array(numbers))]
    scored = any(isinstance(each, dict) and "executed_scores" in each for each in layers.values())
    notes = [options.assumed(how, shape), FORCED, *([SCORES] if scored else [])]
    header = header_for(shape, options, Origin(ROUTING_ATLAS.name, path, [path]), notes)
    prompts = (ids[first:last] for first, last in pairwise(ends))
    return Foreign(header, (Request(each, options.prompt_of(len(each), len(each))) for each in prompts))


def _ids(layer: Any, number: int, k: Any, path: Path) -> np.ndarray:
    """Return (T, k) of one layer."""
    rows = layer.get(IDS) if isinstance(layer, dict) else None
    place = f"{path}: layer {number}: {IDS}"
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], list):
        raise TraceError(f"{place} is {shown(rows)}: expected [[ids of a token], ...]")
    width = k if isinstance(k, int) else len(rows[0])
    for at, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != width or not all(fits(each, ids_below(None)) for each in row):
            raise TraceError(f"{place}[{at}] is {shown(row)}: expected {width} ids, each {ids_below(None).expected}")
    found = np.array(rows, np.int64)
    refuse_twice(path, np.arange(len(found)), found)
    return found


def _alike(layers: list[np.ndarray], numbers: list[int], path: Path) -> list[np.ndarray]:
    """Return the layers. Raises TraceError for one of other tokens or k than the first."""
    for number, ids in zip(numbers, layers, strict=True):
        if ids.shape != layers[0].shape:
            raise TraceError(f"{path}: layer {number} has ids {ids.shape}; layer {numbers[0]} has {layers[0].shape}")
    return layers


def _ends(document: dict[str, Any], tokens: int) -> tuple[list[int], str]:
    """Return where prompts begin and the last ends, and a note about it. Raises TraceError for ranges with gaps."""
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
            return [0, tokens], f"prompts have {keys} but no known row ranges: one request"
        return [0, *np.cumsum(lengths).tolist()], f"{counted(len(lengths), 'request')}, split by the lengths of prompts"
    ends = [0, *(last for _, last in ranges)]
    if [first for first, _ in ranges] != ends[:-1] or ends[-1] != tokens or min(np.diff(ends)) < 1:
        wrong = next(
            (at for at, (first, last) in enumerate(ranges) if first != ends[at] or last <= first), len(ranges) - 1
        )
        raise TraceError(
            f"conditional.prompts[{wrong}] has rows {ranges[wrong]}: expected ranges up to {tokens:,} without gaps"
        )
    return ends, f"{counted(len(ranges), 'request')}, split by the row ranges of prompts"


def _length(prompt: Any) -> int:
    """Return the number of rows of a prompt, 0 if no key gives it."""
    found = [prompt.get(name) for name in LENGTHS] if isinstance(prompt, dict) else []
    return next((int(each) for each in found if each is not None and fits(each, COUNT)), 0)


def _range(prompt: Any) -> tuple[int, int] | None:
    """Return the first row of a prompt and the one after its last."""
    if not isinstance(prompt, dict):
        return None
    pair: Any = next((prompt[name] for name in RANGES if isinstance(prompt.get(name), list)), None)
    if pair is None:
        pair = [next((prompt[name] for name in names if name in prompt), None) for names in (STARTS, ENDS)]
    return (pair[0], pair[1]) if len(pair) == 2 and all(fits(each, COUNT) for each in pair) else None


ROUTING_ATLAS = Importer(
    name="routing_atlas",
    summary="routing atlases as of GLM-5.2: ids of all rows by layer, prompts by their rows",
    formats="FILE.json with layers.N.executed_topk [[ids], ...] and conditional.prompts",
    sniff=sniff_atlas,
    read=read_atlas,
)
