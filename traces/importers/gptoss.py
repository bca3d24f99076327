"""Decode runs of gpt-oss-20b as the fingerprinting collection publishes them: one npz of all, or a document each."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.importers import archive
from moereplay.traces.importers.contract import DECODE_ONLY, Foreign, Importer, Options, Origin, Shape, header_for
from moereplay.traces.importers.rows import fits
from moereplay.traces.importers.sources import files_of
from moereplay.traces.importers.text import holds, read_json
from moereplay.traces.schema import VALUES, Request, Router, TraceError, check_values, shown

GPTOSS_ARRAYS = frozenset({"ids", "probs", "offsets"})


def sniff_npz(path: Path) -> bool:
    """Return True for one npz, alone or in a folder, that holds ids, probs and offsets."""
    files = files_of(path, ".npz")
    return len(files) == 1 and archive.members(files[0]) >= GPTOSS_ARRAYS


def read_npz(path: Path, options: Options) -> Foreign:
    """Read decode-only gpt-oss routing as one npz: many runs end to end.

    Arrays: `ids` (N, L, k) expert ids in rank order, `probs` (N, L, k) softmax over the chosen, `offsets` (R + 1,)
    first row of each run, optional `pos0` (R,) prompt length of each run. A sibling `NAME.meta.json` may list the
    runs (`n_prompt_tokens`, `n_decode_steps`); it is checked against the arrays. Prompt rows were not recorded, so
    every request starts at its first decoded token. Files of token texts in the folder are ignored.

    Return a request per run, weights = probs. Raises TraceError if the arrays or the list of runs disagree.
    """
    archives = files_of(path, ".npz")
    if len(archives) != 1:
        raise TraceError(f"{path}: {len(archives)} npz files: expected one with {', '.join(sorted(GPTOSS_ARRAYS))}")
    file = archives[0]
    ids = archive.expert_ids(file, "ids")
    probs, offsets = archive.arrays(file, "probs", "offsets")
    if probs.shape != ids.shape:
        raise TraceError(f"{file}: probs has shape {probs.shape}: expected that of ids, {ids.shape}")
    check_values(probs, "weights", f"{file}: probs")
    fine = offsets.ndim == 1 and len(offsets) > 1 and offsets.dtype.kind in "iu"
    fine = fine and offsets.min() == offsets[0] == 0 and offsets.max() == offsets[-1] == len(ids)
    if not fine or (np.diff(offsets.astype(np.int64)) < 1).any():
        raise TraceError(f"{file}: offsets do not divide {len(ids)} rows into runs: expected 0 rising to {len(ids)}")
    listing = file.with_suffix(".meta.json")
    files = [file, listing] if listing.exists() else [file]
    if listing.exists():
        _check_listing(file, listing, offsets)
    shape = Shape(ids.shape[1], ids.shape[2], int(ids.max()), router=Router(family="topk_softmax"))
    origin = Origin(GPTOSS_NPZ.name, path, files, decoding="recorded decode steps")
    runs = (
        Request(ids[start:stop], options.prompt_of(stop - start, 0), weights=probs[start:stop])
        for start, stop in pairwise(offsets.tolist())
    )
    return Foreign(header_for(shape, options, origin, [DECODE_ONLY]), runs)


def _check_listing(file: Path, listing: Path, offsets: np.ndarray) -> None:
    runs = read_json(listing)
    steps = np.diff(offsets.astype(np.int64)).tolist()
    if not isinstance(runs, list) or len(runs) != len(steps):
        raise TraceError(f"{listing}: expected a list of the {len(steps)} runs of {file.name}")
    stated = {"n_decode_steps": ("number of decode steps", steps)}
    if "pos0" in archive.members(file):
        (prompts,) = archive.arrays(file, "pos0")
        if prompts.shape != (len(steps),) or prompts.dtype.kind not in "iu":
            kind = f"{prompts.dtype}{prompts.shape}"
            raise TraceError(f"{file}: invalid pos0 {kind}: expected an integer for each of {len(steps)} runs")
        stated["n_prompt_tokens"] = ("prompt length", prompts.tolist())
    for index, run in enumerate(runs):
        for key, (what, numbers) in stated.items():
            if not isinstance(run, dict) or run.get(key, numbers[index]) != numbers[index]:
                raise TraceError(
                    f"{listing}: run {index} has another {what}: expected {numbers[index]}, as in {file.name}"
                )


GPTOSS_NPZ = Importer(
    name="gptoss_npz",
    summary="gpt-oss decode runs in one npz, with gate weights",
    formats="NAME.npz with ids, probs, offsets (and NAME.meta.json), or its folder",
    sniff=sniff_npz,
    read=read_npz,
)


# ---------------------------------------------------------------- a JSON document per run

MARK = '"router_data"'
ENTRY = '{"token_P": {"layer_0": {"selected_experts", "selected_probs"}, ...}}'


def sniff_json(path: Path) -> bool:
    """Return True for JSON documents, alone or in a folder, that all hold router_data."""
    files = files_of(path, ".json")
    return bool(files) and all(holds(file, MARK) for file in files)


def read_json_runs(path: Path, options: Options) -> Foreign:
    """Read gpt-oss decode runs as the fingerprinting collection publishes them: one JSON document per run.

    `router_data[t]` = {"token_P": {"layer_l": {"selected_experts": [k ids], "selected_probs": [k]}}}, P the
    absolute position of the input token. Prompt rows were not recorded, so every request starts at its first
    decoded token.

    One request per document, by file name. Raises TraceError naming the file and the entry that is wrong.
    """
    files = files_of(path, ".json")
    if not files:
        raise TraceError(f"{path}: missing .json files: expected runs with router_data")
    ids, _ = _run(files[0])
    others = [] if options.geometry else files[1:]  # whose ids say how many experts there are, if nothing else does
    highest = max(int(ids.max()), *(int(_run(file)[0].max()) for file in others), -1)
    shape = Shape(ids.shape[1], ids.shape[2], highest, router=Router(family="topk_softmax"))
    origin = Origin(GPTOSS_JSON.name, path, files, decoding="recorded decode steps")
    runs = (Request(ids, options.prompt_of(len(ids), 0), weights=probs) for ids, probs in map(_run, files))
    return Foreign(header_for(shape, options, origin, [DECODE_ONLY]), runs)


def _run(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and weights of one run, (T, L, k) each. Raises TraceError naming the entry that is wrong."""
    document = read_json(file)
    entries = document.get("router_data") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise TraceError(f"{file}: missing or empty router_data: expected a list of {ENTRY}")
    positions, ids, probs = [], [], []
    for step, entry in enumerate(entries):
        try:
            ((token, named),) = entry.items()
            position, layers = int(token.removeprefix("token_")), [named[f"layer_{at}"] for at in range(len(named))]
            ids.append([_numbers(layer["selected_experts"], "chosen") for layer in layers])
            probs.append([_numbers(layer["selected_probs"], "weights") for layer in layers])
        except (KeyError, TypeError, ValueError, AttributeError) as wrong:
            place = f"{file}: router_data[{step}] is not regular ({shown(wrong, 160)})"
            raise TraceError(f"{place}: expected {ENTRY} everywhere") from None
        positions.append(position)
    for step, (before, position) in enumerate(pairwise(positions), 1):
        if position != before + 1:
            raise TraceError(f"{file}: router_data[{step}] is token {shown(position)}: expected {shown(before + 1)}")
    return _dense(file, ids, np.int64), _dense(file, probs, np.float32)


def _numbers(cells: Any, name: str) -> list[float]:
    """Return a list of valid values of the trace's array `name`. Raises ValueError naming an invalid one."""
    for cell in cells:
        if not fits(cell, VALUES[name]):
            raise ValueError(f"{shown(cell)} is not {VALUES[name].expected}")
    return cells


def _dense(file: Path, steps: list[list[list[float]]], dtype: type) -> np.ndarray:
    """Return (T, L, k). Raises TraceError naming the first step that has other layers or another k than the first."""
    first = [len(layer) for layer in steps[0]]
    for step, layers in enumerate(steps):
        if [len(layer) for layer in layers] != first or len(set(first)) != 1 or not first[0]:
            raise TraceError(f"{file}: router_data[{step}] has other layers or k than the first: expected {ENTRY}")
    return np.array(steps, dtype)


GPTOSS_JSON = Importer(
    name="gptoss_json",
    summary="gpt-oss decode runs as published, one JSON document each",
    formats="RUN.json with router_data, or a folder of them",
    sniff=sniff_json,
    read=read_json_runs,
)
