"""gpt-oss decode runs as published by the fingerprinting collection: one JSON document per run.

`router_data[t]` = {"token_P": {"layer_l": {"selected_experts": [k ids], "selected_probs": [k]}}}, P the absolute
position of the input token. Prompt rows were not recorded, so every request starts at its first decoded token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for, prompt_tokens
from moereplay.traces.importers.rows import fits
from moereplay.traces.importers.sources import files_of
from moereplay.traces.importers.text import holds, read_json
from moereplay.traces.schema import VALUES, Request, Router, TraceError, shown

MARK = '"router_data"'
ENTRY = '{"token_P": {"layer_0": {"selected_experts", "selected_probs"}, ...}}'
NOTE = "decode steps only: rows of the prompts were not recorded"


def sniff(path: Path) -> bool:
    """JSON documents, alone or in a folder, that all hold router_data."""
    files = files_of(path, ".json")
    return bool(files) and all(holds(file, MARK) for file in files)


def read(path: Path, options: Options) -> Foreign:
    """One request per document, by file name. Raises TraceError naming the file and the entry that is wrong."""
    files = files_of(path, ".json")
    if not files:
        raise TraceError(f"{path}: no .json files; expected runs with router_data")
    ids, _ = _run(files[0])
    others = [] if options.geometry else files[1:]  # whose ids say how many experts there are, if nothing else does
    highest = max(int(ids.max()), *(int(_run(file)[0].max()) for file in others), -1)
    shape = Shape(ids.shape[1], ids.shape[2], highest, router=Router(family="topk_softmax"))
    origin = Origin(IMPORTER.name, path, files, decoding="recorded decode steps")
    return Foreign(header_for(shape, options, origin, [NOTE]), _requests(files, options))


def _requests(files: list[Path], options: Options) -> Iterator[Request]:
    for file in files:
        ids, probs = _run(file)
        yield Request(ids, prompt_tokens(options, len(ids), 0), weights=probs)


def _run(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights of one run, (T, L, k) each. Raises TraceError naming the entry that is wrong."""
    document = read_json(file)
    entries = document.get("router_data") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise TraceError(f"{file}: router_data is missing or empty; expected a list of {ENTRY}")
    positions, ids, probs = [], [], []
    for step, entry in enumerate(entries):
        try:
            position, layers = _step(entry)
            ids.append([_numbers(layer["selected_experts"], "chosen") for layer in layers])
            probs.append([_numbers(layer["selected_probs"], "weights") for layer in layers])
        except (KeyError, TypeError, ValueError, AttributeError) as wrong:
            place = f"{file}: router_data[{step}] is not regular ({shown(wrong, 160)})"
            raise TraceError(f"{place}; expected {ENTRY} everywhere") from None
        positions.append(position)
    _refuse_gaps(file, positions)
    return _dense(file, ids, np.int64), _dense(file, probs, np.float32)


def _step(entry: dict[str, dict[str, Any]]) -> tuple[int, list[dict[str, list[float]]]]:
    """Position of one step, and its layers in order."""
    ((token, layers),) = entry.items()
    return int(token.removeprefix("token_")), [layers[f"layer_{layer}"] for layer in range(len(layers))]


def _numbers(cells: Any, name: str) -> list[float]:
    """A list of what the trace's array `name` may hold. Raises ValueError saying which is not."""
    for cell in cells:
        if not fits(cell, VALUES[name]):
            raise ValueError(f"{shown(cell)} is not {VALUES[name].expected}")
    return cells


def _refuse_gaps(file: Path, positions: list[int]) -> None:
    for step, (before, position) in enumerate(itertools.pairwise(positions), 1):
        if position != before + 1:
            raise TraceError(f"{file}: router_data[{step}] is token {shown(position)}; expected {shown(before + 1)}")


def _dense(file: Path, steps: list[list[list[float]]], dtype: type) -> np.ndarray:
    """(T, L, k). Raises TraceError naming the first step that has other layers or another k than the first."""
    first = [len(layer) for layer in steps[0]]
    for step, layers in enumerate(steps):
        if [len(layer) for layer in layers] != first or len(set(first)) != 1 or not first[0]:
            raise TraceError(
                f"{file}: router_data[{step}] does not have the layers and k of the first; expected {ENTRY}"
            )
    return np.array(steps, dtype)


IMPORTER = Importer(
    name="gptoss_json",
    summary="gpt-oss decode runs as published, one JSON document each",
    formats="RUN.json with router_data, or a folder of them",
    sniff=sniff,
    read=read,
)
