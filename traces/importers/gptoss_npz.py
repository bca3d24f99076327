"""Decode-only gpt-oss routing as one npz: many runs end to end.

Arrays: `ids` (N, L, k) expert ids in rank order, `probs` (N, L, k) softmax over the chosen, `offsets` (R + 1,) first
row of each run, optional `pos0` (R,) prompt length of each run. A sibling `NAME.meta.json` may list the runs
(`n_prompt_tokens`, `n_decode_steps`); it is checked against the arrays. Prompt rows were not recorded, so every
request starts at its first decoded token. Token texts beside the file are not ids and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moereplay.traces.importers import archive
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for, prompt_tokens
from moereplay.traces.importers.sources import files_of
from moereplay.traces.importers.text import read_json
from moereplay.traces.schema import Request, Router, TraceError, check_values

ARRAYS = frozenset({"ids", "probs", "offsets"})
NOTE = "decode steps only: rows of the prompts were not recorded"


def sniff(path: Path) -> bool:
    """One npz, alone or in a folder, that holds ids, probs and offsets."""
    files = files_of(path, ".npz")
    return len(files) == 1 and archive.members(files[0]) >= ARRAYS


def read(path: Path, options: Options) -> Foreign:
    """Requests of a run each, weights = probs. Raises TraceError if the arrays or the list of runs disagree."""
    file = _only_archive(path)
    ids = archive.expert_ids(file, "ids")
    probs, offsets = archive.arrays(file, "probs", "offsets")
    offsets = _checked(file, ids, probs, offsets)
    listing = file.with_suffix(".meta.json")
    files = [file, listing] if listing.exists() else [file]
    if listing.exists():
        _check_listing(file, listing, offsets)
    shape = Shape(ids.shape[1], ids.shape[2], int(ids.max()), router=Router(family="topk_softmax"))
    origin = Origin(IMPORTER.name, path, files, decoding="recorded decode steps")
    return Foreign(header_for(shape, options, origin, [NOTE]), _requests(ids, probs, offsets, options))


def _only_archive(path: Path) -> Path:
    files = files_of(path, ".npz")
    if len(files) != 1:
        raise TraceError(f"{path}: {len(files)} npz files; expected one with {', '.join(sorted(ARRAYS))}")
    return files[0]


def _checked(file: Path, ids: np.ndarray, probs: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The offsets as int64."""
    if probs.shape != ids.shape:
        raise TraceError(f"{file}: probs has shape {probs.shape}; expected that of ids, {ids.shape}")
    check_values(probs, "weights", f"{file}: probs")
    rows = len(ids)
    fine = offsets.ndim == 1 and len(offsets) > 1 and offsets.dtype.kind in "iu"
    fine = fine and offsets.min() == offsets[0] == 0 and offsets.max() == offsets[-1] == rows
    if not fine or (np.diff(offsets.astype(np.int64)) < 1).any():
        raise TraceError(f"{file}: offsets do not divide {rows} rows into runs; expected 0 rising to {rows}")
    return offsets.astype(np.int64)


def _check_listing(file: Path, listing: Path, offsets: np.ndarray) -> None:
    runs = read_json(listing)
    steps = np.diff(offsets).tolist()
    if not isinstance(runs, list) or len(runs) != len(steps):
        raise TraceError(f"{listing}: expected a list of the {len(steps)} runs of {file.name}")
    prompts = _prompts(file, len(steps)) if "pos0" in archive.members(file) else [None] * len(steps)
    for index, run in enumerate(runs):
        if not isinstance(run, dict) or run.get("n_decode_steps", steps[index]) != steps[index]:
            raise TraceError(f"{listing}: run {index} does not have the {steps[index]} decode steps of {file.name}")
        if prompts[index] is not None and run.get("n_prompt_tokens", prompts[index]) != prompts[index]:
            raise TraceError(f"{listing}: run {index} does not have the prompt length {prompts[index]} of {file.name}")


def _prompts(file: Path, runs: int) -> list[int]:
    (prompts,) = archive.arrays(file, "pos0")
    if prompts.shape != (runs,) or prompts.dtype.kind not in "iu":
        raise TraceError(
            f"{file}: pos0 is {prompts.dtype}{prompts.shape}; expected a whole number for each of {runs} runs"
        )
    return prompts.tolist()


def _requests(ids: np.ndarray, probs: np.ndarray, offsets: np.ndarray, options: Options) -> Iterator[Request]:
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        yield Request(ids[start:stop], prompt_tokens(options, stop - start, 0), weights=probs[start:stop])


IMPORTER = Importer(
    name="gptoss_npz",
    summary="gpt-oss decode runs in one npz, with gate weights",
    formats="NAME.npz with ids, probs, offsets (and NAME.meta.json), or its folder",
    sniff=sniff,
    read=read,
)
