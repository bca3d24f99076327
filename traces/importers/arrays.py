"""Ids of any program in one array of numpy, alone or in an archive: (tokens, layers, k)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moereplay.traces.importers import answers, archive, router_logits
from moereplay.traces.importers.answers import padding_of
from moereplay.traces.importers.contract import LAYERS_FIRST, Foreign, Importer, Options, Origin, header_for
from moereplay.traces.schema import Request, TraceError, check_values, shown
from moereplay.traces.texts import counted

SUFFIXES = (".npy", ".npz")
TOKENS = ("token", "tokens", "token_ids", "input_ids")  #: names of arrays of input tokens beside the ids


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
