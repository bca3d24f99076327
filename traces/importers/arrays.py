"""An array of expert ids (tokens, layers, k), in an npy file or an npz archive: one request, ids in rank order.

An archive with several such arrays, or with gate weights of the same shape, is read with `--columns
experts=NAME,weights=NAME`. Nothing says which tokens are prompt; `--prompt-length` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moereplay.traces.importers import archive, router_logits, vllm_response
from moereplay.traces.importers.computed import padding_of
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
from moereplay.traces.schema import Request, TraceError, check_values, shown

SUFFIXES = (".npy", ".npz")
UNNAMED = "no phase recorded: every token counts as decoded"


def sniff(path: Path) -> bool:
    """An npy file, or an npz archive of one array; of several, --columns says which. Not what other importers read."""
    if not path.is_file() or router_logits.sniff(path) or vllm_response.sniff(path):
        return False
    return path.suffix == ".npy" or (path.suffix == ".npz" and len(archive.members(path)) == 1)


def read(path: Path, options: Options) -> Foreign:
    """One request. Raises TraceError for arrays that hold no ids."""
    if not path.is_file() or path.suffix not in SUFFIXES:
        raise TraceError(f"{path}: expected a file ending in {' or '.join(SUFFIXES)}")
    ids, weights, said = _arrays(path, options)
    padded = padding_of(ids)
    ids, weights = ids[: len(ids) - padded], None if weights is None else weights[: len(ids) - padded]
    tokens, layers, k = ids.shape
    _check_axes(path, ids, options)
    shape = counted(ids, layers, options)
    how = f"axes are (token, layer, rank), {tokens:,} tokens, k = {k}; one request"
    notes = [assumed([*said, how], shape, options), UNNAMED]
    notes += [f"{padded} rows at the end are padding, with the same ids in all layers: left out"] * bool(padded)
    header = header_for(shape, options, Origin(IMPORTER.name, path, [path]), notes)
    return Foreign(header, _requests(ids, weights, options))


def _arrays(path: Path, options: Options) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
    """Ids, weights if they are named, and what was assumed."""
    asked = options.columns or {}
    if others := [field for field in asked if field not in ("experts", "weights")]:
        raise TraceError(f"{path}: --columns {others[0]}= means nothing of arrays; name experts and weights only")
    if path.suffix == ".npy":
        if asked:
            raise TraceError(f"{path}: one array without a name; leave --columns out")
        return archive.checked_ids(archive.lone(path), str(path)), None, []
    experts = asked["experts"][0] if "experts" in asked else _only(path)
    ids = archive.expert_ids(path, experts)
    weights = _weights(path, asked["weights"][0], ids) if "weights" in asked else None
    return ids, weights, [f"array {shown(experts)} has the experts"]


def _only(path: Path) -> str:
    """The only array of an archive. Raises TraceError if there are several."""
    found = sorted(archive.members(path))
    if len(found) != 1:
        listed = shown(", ".join(found), 200) or "none"
        raise TraceError(f"{path}: its arrays are {listed}; name that of the ids with --columns experts=NAME")
    return found[0]


def _weights(path: Path, name: str, ids: np.ndarray) -> np.ndarray:
    (weights,) = archive.arrays(path, name)
    if weights.shape != ids.shape:
        raise TraceError(f"{path}: {name} has shape {weights.shape}; expected {ids.shape}, as the experts")
    check_values(weights, "weights", f"{path}: {name}")
    return weights


def _check_axes(path: Path, ids: np.ndarray, options: Options) -> None:
    """Raises TraceError for an array that has the layers first."""
    layers = options.geometry.layers if options.geometry else None
    if layers == ids.shape[0] != ids.shape[1]:
        fix = "expected (tokens, layers, k); save it with array.transpose(1, 0, 2)"
        raise TraceError(f"{path}: shape {ids.shape} begins with the {layers} layers of {options.model}; {fix}")


def _requests(ids: np.ndarray, weights: np.ndarray | None, options: Options) -> Iterator[Request]:
    yield Request(ids, prompt_tokens(options, len(ids), 0), weights=weights)


IMPORTER = Importer(
    name="arrays",
    summary="an array of ids of any program: (tokens, layers, k)",
    formats="FILE.npy, or FILE.npz with one array, or with --columns experts=NAME[,weights=NAME]",
    sniff=sniff,
    read=read,
    columns=True,
)
