"""A file per layer: `layer3.npz` with ids (tokens, k) and perhaps weights and tokens, or `layer3.npy` with ids alone.

    trace/layer0.npz: indices (T, k), weights (T, k), token (T,)
    meta.json: {"seqs": [{"id": "a", "n": 120}, ...]}

`meta.json`, in the same folder or the one above, lists the tokens of each text in order; a text is then a
request, all of it prompt, because such recorders run whole texts through one layer after another. Without it there is
one request of decoded tokens. Scores of a gate that adds a bias are not gate weights and are left out. Source of the
npz: 0xBakeer/deepseek-v41-flash-spark, tools/expert_trace.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.importers import archive
from moereplay.traces.importers.arrays import TOKENS
from moereplay.traces.importers.by_request import renumbering
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, header_for
from moereplay.traces.importers.rows import fits
from moereplay.traces.importers.sources import files_of
from moereplay.traces.importers.table import COUNT
from moereplay.traces.importers.text import read_json
from moereplay.traces.schema import Request, TraceError, check_values, shown
from moereplay.traces.texts import counted

NAME = re.compile(r"(?:layers?|blocks?|blk|l|moe)[._-]?(\d{1,4})", re.ASCII | re.IGNORECASE)
IDS = ("indices", "experts", "expert_ids", "topk_ids", "topk_indices", "selected_experts", "chosen", "ids")
WEIGHTS = ("weights", "topk_weights", "gate_weights", "router_weights")
META = "meta.json"
FORCED = "whole texts, layer by layer: every token is prompt; replay it token by token"
FORM = f"layerN.npz with one of {', '.join(IDS)} (tokens, k)"


def sniff(path: Path) -> bool:
    """Return True for a folder of npz or npy files that are named by layers, or its trace/."""
    files = _files(path)
    return bool(files) and all(_ids_in(file) for file in files.values())


def read(path: Path, options: Options) -> Foreign:
    """Return a request per text. Raises TraceError naming the file whose tokens or k are not the first's."""
    files = _files(path)
    if not files:
        raise TraceError(f"{path}: missing files named by layer: expected a folder of {FORM}")
    numbers, paths = np.array(list(files)), list(files.values())
    ids = np.stack([_array(file, _ids_in(file), 2, "iu") for file in _alike(paths)], 1)
    check_values(ids, "chosen", str(path))
    above = (path.resolve().parent / META,) if path.name == "trace" else ()
    meta = next((each for each in (path / META, paths[0].parent / META, *above) if each.is_file()), None)
    ends = [0, len(ids)] if meta is None else _ends(meta, len(ids))
    shape = options.counted(ids, len(paths))
    said = [f"a file per layer, {counted(len(ids), 'token')}, k = {ids.shape[2]}", *renumbering(numbers)]
    said += [f"{counted(len(ends) - 1, 'request')}, as stated in {META}" if meta else "one request"]
    gaps = sorted(set(range(int(numbers[0]), int(numbers[-1]))) - set(files))
    notes = [options.assumed(said, shape), *([FORCED] if meta else options.phase_note())]
    notes += [f"no file of layers {', '.join(map(str, gaps[:8]))}: left out"] if gaps else []
    origin = Origin(LAYER_FILES.name, path, paths, beside=(meta,) if meta else ())
    return Foreign(header_for(shape, options, origin, notes), _requests(paths, ids, ends, meta is not None, options))


def _requests(paths: list[Path], ids: np.ndarray, ends: list[int], whole: bool, options: Options) -> Iterator[Request]:
    weights = _weights(paths, ids.shape)
    tokens = _tokens(paths[0], len(ids))
    for first, last in pairwise(ends):
        prompt = options.prompt_of(last - first, last - first if whole else 0)
        own = None if weights is None else weights[first:last]
        yield Request(ids[first:last], prompt, own, token_ids=None if tokens is None else tokens[first:last])


def _files(path: Path) -> dict[int, Path]:
    """Return files by the number of their layer, in its order; none if the others of the folder have other names."""
    if not path.is_dir():
        return {}
    found = [file for each in (path, path / "trace") for suffix in (".npz", ".npy") for file in files_of(each, suffix)]
    named = [(int(name[1]), file) for file in found if (name := NAME.fullmatch(file.stem))]
    return dict(sorted(named)) if len({number for number, _ in named}) == len(found) else {}


def _ids_in(file: Path) -> str:
    """Return the array of ids in a file, empty if there is none; of an npy the name is of no use."""
    if file.suffix == ".npy":
        shape, kind = archive.described(file)
        return "array" if len(shape) == 2 and kind in "iu" else ""
    members = archive.members(file)
    return "" if members & {"meta", "offsets"} else next((name for name in IDS if name in members), "")


def _alike(paths: list[Path]) -> Iterator[Path]:
    """Yield the files. Raises TraceError naming the first whose ids have another shape than the first file's."""
    wanted: tuple[int, ...] = ()
    for file in paths:
        found = _array(file, _ids_in(file), 2, "iu").shape
        wanted = wanted or found
        if found != wanted:
            raise TraceError(f"{file}: invalid ids {found}: expected {wanted} (tokens, k), as in {paths[0].name}")
        yield file


def _array(file: Path, name: str, axes: int, kinds: str) -> np.ndarray:
    if not name:
        raise TraceError(f"{file}: missing array of ids: expected {FORM}")
    found = archive.lone(file) if file.suffix == ".npy" else archive.arrays(file, name)[0]
    if found.ndim != axes or found.dtype.kind not in kinds or not found.size:
        raise TraceError(f"{file}: invalid {name} {shown(found.dtype)}{found.shape}: expected {FORM}")
    return found


def _weights(paths: list[Path], shape: tuple[int, ...]) -> np.ndarray | None:
    """Return (T, L, k) if every file has weights of the shape of its ids."""
    named = [next((name for name in WEIGHTS if name in _members(file)), "") for file in paths]
    if not all(named):
        return None
    found = [_array(file, name, 2, "f") for file, name in zip(paths, named, strict=True)]
    for file, name, each in zip(paths, named, found, strict=True):
        if each.shape != (shape[0], shape[2]):
            raise TraceError(f"{file}: {name} has shape {each.shape}: expected {(shape[0], shape[2])}, as the ids")
        check_values(each, "weights", f"{file}: {name}")
    return np.stack(found, 1).astype(np.float32)


def _tokens(file: Path, count: int) -> np.ndarray | None:
    """Return (T,) the input tokens, if the file has them."""
    name = next((name for name in TOKENS if name in _members(file)), "")
    if not name:
        return None
    found = _array(file, name, 1, "iu")
    check_values(found, "token_ids", f"{file}: {name}")
    if len(found) != count:
        raise TraceError(f"{file}: {name} has {len(found):,} tokens: expected {count:,}, as the ids")
    return found


def _members(file: Path) -> frozenset[str]:
    return archive.members(file) if file.suffix == ".npz" else frozenset()


def _ends(meta: Path, tokens: int) -> list[int]:
    """Return the offsets of texts, and the end of the last. Raises TraceError if they do not have so many tokens."""
    document = read_json(meta)
    texts: Any = document.get("seqs", document.get("lengths")) if isinstance(document, dict) else None
    given = texts if isinstance(texts, list) else []
    lengths: list[Any] = [each.get("n") if isinstance(each, dict) else each for each in given]
    if not lengths or not all(fits(each, COUNT._replace(least=1)) for each in lengths):
        raise TraceError(f'{meta}: missing lengths of texts: expected {{"seqs": [{{"n": tokens}}, ...]}}')
    if sum(lengths) != tokens:
        raise TraceError(f"{meta}: its texts have {sum(lengths):,} tokens; the layer files have {tokens:,}")
    return [0, *np.cumsum(lengths).tolist()]


LAYER_FILES = Importer(
    name="layer_files",
    summary="an npz or npy per layer, as of DeepSeek-V4.1 traced layer by layer: ids, weights, tokens",
    formats="a folder (or its trace/) of layerN.npz with indices (tokens, k), or layerN.npy; and meta.json",
    sniff=sniff,
    read=read,
)
