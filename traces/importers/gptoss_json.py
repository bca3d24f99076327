"""gpt-oss decode runs as published by the fingerprinting collection: one JSON document per run.

`router_data[t]` = {"token_P": {"layer_l": {"selected_experts": [k ids], "selected_probs": [k]}}}, P the absolute
position of the input token. Prompt rows were not recorded, so every request starts at its first decoded token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for, prompt_tokens
from traces.importers.sources import files_of, read_json
from traces.schema import Request, Router, TraceError

MARK = b'"router_data"'
ENTRY = '{"token_P": {"layer_0": {"selected_experts", "selected_probs"}, ...}}'
NOTE = "decode steps only: rows of the prompts were not recorded"


def sniff(path: Path) -> bool:
    """JSON documents, alone or in a folder, that all hold router_data."""
    files = files_of(path, ".json")
    return bool(files) and all(MARK in file.read_bytes() for file in files)


def read(path: Path, options: Options) -> Foreign:
    """One request per document, by file name. Raises TraceError naming the file and the entry that is wrong."""
    files = files_of(path, ".json")
    if not files:
        raise TraceError(f"{path}: no .json files; expected runs with router_data")
    ids, _ = _run(files[0])
    shape = Shape(ids.shape[1], ids.shape[2], int(ids.max()), router=Router(family="topk_softmax"))
    origin = Origin(IMPORTER.name, path, files, decoding="recorded decode steps")
    return Foreign(header_for(shape, options, origin, [NOTE]), _requests(files, options))


def _requests(files: list[Path], options: Options) -> Iterator[Request]:
    for file in files:
        ids, probs = _run(file)
        yield Request(ids, prompt_tokens(options, len(ids), 0), weights=probs)


def _run(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights of one run, (T, L, k) each."""
    document = read_json(file)
    entries = document.get("router_data") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise TraceError(f"{file}: router_data is missing or empty; expected a list of {ENTRY}")
    try:
        steps = [_step(entry) for entry in entries]
        ids = np.array([[layer["selected_experts"] for layer in layers] for _, layers in steps])
        probs = np.array([[layer["selected_probs"] for layer in layers] for _, layers in steps], np.float32)
    except (KeyError, TypeError, ValueError, AttributeError) as wrong:
        raise TraceError(f"{file}: router_data is not regular ({wrong}); expected every entry as {ENTRY}") from wrong
    _check(file, [position for position, _ in steps], ids, probs)
    return ids, probs


def _step(entry: dict[str, dict[str, Any]]) -> tuple[int, list[dict[str, list[float]]]]:
    """Position of one step, and its layers in order."""
    ((token, layers),) = entry.items()
    return int(token.removeprefix("token_")), [layers[f"layer_{layer}"] for layer in range(len(layers))]


def _check(file: Path, positions: list[int], ids: np.ndarray, probs: np.ndarray) -> None:
    gaps = np.flatnonzero(np.diff(positions) != 1)
    if len(gaps):
        step = int(gaps[0]) + 1
        raise TraceError(f"{file}: router_data[{step}] is token {positions[step]}; expected {positions[step - 1] + 1}")
    if ids.ndim != 3 or ids.dtype.kind != "i" or probs.shape != ids.shape:
        raise TraceError(f"{file}: router_data: ids {ids.dtype}{ids.shape}, probs {probs.shape}; expected k per layer")


IMPORTER = Importer(
    name="gptoss_json",
    summary="gpt-oss decode runs as published, one JSON document each",
    formats="RUN.json with router_data, or a folder of them",
    sniff=sniff,
    read=read,
)
