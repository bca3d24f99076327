"""Formats that other packages read: entry points of the group `moereplay.importers`, and those of ours by their marks.

An entry point's name is that of the format, its value `module:CONSTANT` an `Importer` of the same name. Plug-ins are
tried after the built-in formats and before those that take files of many forms. A name of a built-in format is not
replaced. A plug-in that cannot be loaded is named in one line, and breaks no other format.

`contrib/importers` of the repository, the package moereplay-importers, is such a plug-in. `CONTRIBUTED` says what its
files begin with, so that an import without it can say what to install.
"""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import NamedTuple

from moereplay.traces.files import install_contrib
from moereplay.traces.importers import BUILT_IN, CATCH_ALLS, archive
from moereplay.traces.importers.contract import Importer
from moereplay.traces.importers.sources import TORCH_SUFFIXES, files_of
from moereplay.traces.importers.text import start_of, suffix_of
from moereplay.traces.importers.torch_file import mentions
from moereplay.traces.plugins import plugins, using
from moereplay.traces.schema import TraceError

GROUP = "moereplay.importers"


def plug_ins() -> dict[str, EntryPoint]:
    """Return the entry points of installed packages by the names of their formats, in the order of these."""
    return {name: point for name, point in plugins(GROUP).items() if name not in (*BUILT_IN, *CATCH_ALLS)}


def load(name: str) -> Importer:
    """Return the importer of a plug-in. Raises TraceError naming the package if it cannot be loaded."""
    point = plug_ins()[name]
    with using(point, TraceError):
        importer = point.load()
        if not isinstance(importer, Importer) or importer.name != name:
            raise TraceError(f"invalid {point.value}: expected an Importer of this name")
    return importer


# ---------------------------------------------------------------- formats of moereplay-importers

LOOKED_AT = 1 << 20  #: bytes of a text in which a mark is looked for
LONGEST_MAGIC = 16  #: bytes with which binary files begin


class Contributed(NamedTuple):
    """A format of moereplay-importers and the marks of its files; every mark that is given must be there."""

    name: str
    writer: str
    suffixes: tuple[str, ...] = ()  #: of the file, or of the files of a folder; any file without them
    start: bytes = b""  #: pattern of the first bytes
    keys: tuple[str, ...] = ()  #: arrays of an npz, words of a torch file, keys on one of the first two lines
    named: str = ""  #: pattern of the names of files in a folder or its trace/, without the suffix


CONTRIBUTED = (
    Contributed(
        "cecar",
        "CECAR",
        (".pt", ".pth"),
        keys=("routing_decode", "gen_ids_decode", "input_ids_prompt", "eos_pos_in_decode"),
    ),
    Contributed("dynande", "DynaNDE", (".csv",), rb"layer_id,token_id,expert_0"),
    Contributed("dynande", "DynaNDE", (".pt", ".pth"), keys=("samples", "indices", "scores")),
    Contributed("layers_npz", "a llama.cpp recorder of text, layer first", (".npz",), keys=("experts", "meta")),
    Contributed(
        "layer_files",
        "a recorder with a file per layer",
        (".npz", ".npy"),
        named=r"(?:layers?|blocks?|blk|l|moe)[._-]?\d{1,4}",
    ),
    Contributed("routing_atlas", "the author of a routing atlas", (".json",), rb'[\s\S]*"executed_topk"'),
    Contributed(
        "layer_rows",
        "imp, as rows [layer, expert, ...]",
        (".json",),
        rb'\s*(?:\{[^\[\]{}]{0,4000}"(?:trace|entries|data)"\s*:\s*)?\[\s*\[?\s*\d{1,6}\s*,\s*-?\d{1,6}\s*[,\]]',
    ),
    Contributed("token_lines", "warp or OLMoE's recorder", (".jsonl",), rb'\s*\{\s*"tok"\s*:\s*\d+\s*,\s*"layers"\s*:'),
    Contributed("llama_positions", "llama-moe-trace", (), rb"-?\d{1,9},\d{1,5},\d{1,5}(,\d{1,5})*\r?\n"),
    Contributed("llama_ranks", "moe-trace of a llama.cpp fork", (), rb"phase,token,layer,rank,expert\r?\n"),
    Contributed(
        "llama_records",
        "an offline moe-trace of llama.cpp",
        (".bin",),
        rb"(?s:..\x00\x00...\x00.[\x00-\x04]\x00\x00)",  # int32 layer, tokens and k
    ),
    Contributed("router_binaries", "mbolt or fitz-tec", (), rb"MBLT|RTRACE01"),
    Contributed("layer_log", "a llama.cpp that logs layers and ids", (), rb"(layer,expert|layer_id,expert_ids)\r?\n"),
    Contributed("colibri_route", "colibri", (), rb"\d{1,15} \d{1,15} \d{1,6} \d{1,6}:\d{1,6}\.\d{1,6}( |\r?\n)"),
    Contributed(
        "onnx_routing",
        "ONNX Runtime",
        (),
        rb"[\s\S]*moe_routing \{|prompt_index,prompt,inference_index,[^\r\n]*selected_expert_ids",
    ),
    Contributed(
        "cache_lab", "moe-cache-lab", (".jsonl",), rb'\s*\{[^\n]*"format"\s*:\s*"moe-cache-lab\.routing-jsonl"'
    ),
    Contributed("named_jsonl", "lattice", (".jsonl",), keys=("token_idx", "layer_idx", "selected_ids")),
    Contributed("named_jsonl", "speculative-moe", (".jsonl",), keys=("token_idx", "layer", "experts", "gating_probs")),
    Contributed("named_jsonl", "a logger of vLLM", (".jsonl",), keys=("token_idx", "layer", "topk_ids")),
    Contributed("named_jsonl", "moe-policylang", (".jsonl",), keys=("t", "l", "e")),
    Contributed("moe_beyond", "MoE-Beyond", (".csv",), rb"Layer ID,Batch Number,Token,Activated Expert IDs"),
)


def contributed() -> list[str]:
    """Return the names of the formats of moereplay-importers."""
    return sorted({row.name for row in CONTRIBUTED})


def refuse_contributed(path: Path) -> None:
    """Raises TraceError for the marks of a format of moereplay-importers that is not installed."""
    for row in CONTRIBUTED:
        if row.name not in plug_ins() and _has_marks(path, row):
            fix = f"run `{install_contrib('importers')}`"
            raise TraceError(f"{path}: format {row.name}, written by {row.writer}, needs a plug-in: {fix}")


def _has_marks(path: Path, row: Contributed) -> bool:
    if row.named:
        folders = (path, path / "trace") if path.is_dir() else ()
        files = [file for folder in folders for suffix in row.suffixes for file in files_of(folder, suffix)]
        return bool(files) and all(re.fullmatch(row.named, file.stem, re.IGNORECASE) for file in files)
    files = [file for suffix in row.suffixes for file in files_of(path, suffix)]
    files = files or ([path] if not row.suffixes and path.is_file() else [])
    return bool(files) and all(_begins(file, row) for file in files)


def _begins(file: Path, row: Contributed) -> bool:
    suffix = suffix_of(file)
    if suffix == ".npz":
        return archive.members(file) >= set(row.keys)
    if suffix in TORCH_SUFFIXES:
        return mentions(file, *row.keys)
    text = start_of(file, LOOKED_AT)
    if row.keys:
        return any(all(f'"{key}"'.encode() in line for key in row.keys) for line in text.split(b"\n", 2)[:2])
    with file.open("rb") as stream:
        return any(re.match(row.start, start) for start in (text, stream.read(LONGEST_MAGIC)))
