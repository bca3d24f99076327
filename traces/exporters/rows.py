"""Read a trace as rows, one per token and layer, in blocks; write CSV, JSON lines, Parquet, and a data set of a hub."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import polars as pl
from polars.io.plugins import register_io_source

from moereplay.traces.documents import json_text
from moereplay.traces.exporters.contract import Answer, Exporter, Options, Target
from moereplay.traces.growing import token_blocks
from moereplay.traces.importers.exported import KEY, state
from moereplay.traces.schema import Trace, shown
from moereplay.traces.texts import counted

#: Times as large as an array's numbers are those that Python holds.
OBJECTS = 8


class Block(NamedTuple):
    """Some tokens, of one request or several."""

    request: np.ndarray  #: (T,)
    token: np.ndarray  #: (T,) from 0 in each request
    phase: np.ndarray  #: (T,) 0 for prompt tokens, 1 for decoded ones
    chosen: np.ndarray  #: (T, L, k)
    weights: np.ndarray | None  #: (T, L, k)
    logits: np.ndarray | None  #: (T, L, E)


def blocks(trace: Trace, first: int = 0, last: int | None = None, logits: bool = True) -> Iterator[Block]:
    """Yield tokens [first, last) in blocks; `logits` selects whether logits are read.

    Raises TraceError if damaged.
    """
    logits = logits and "logits" in trace.arrays
    width = trace.geometry.layers * (trace.geometry.experts if logits else trace.geometry.k)
    for start, stop in token_blocks(trace, width * OBJECTS):
        begin, end = max(start, first), min(stop, trace.tokens if last is None else last)
        if begin < end:
            at = np.arange(begin, end)
            request = np.searchsorted(trace.request_offsets, at, "right") - 1
            token = at - trace.request_offsets[request]
            yield Block(
                request=request,
                token=token,
                phase=(token >= trace.prompt_lengths[request]).astype(np.int64),
                chosen=trace.read("chosen", begin, end),
                weights=trace.read("weights", begin, end) if "weights" in trace.arrays else None,
                logits=trace.read("logits", begin, end) if logits else None,
            )


def number(value: float) -> float:
    """Return a float32 that is written with nine digits, which any reader rounds back to the same float32."""
    return float(f"{value:.9g}")


# ---------------------------------------------------------------- CSV


def write_csv(trace: Trace, options: Options, target: Target) -> Answer:
    """Write the documented CSV (`traces/importers/columns.py`): a line per request, token and layer, sizes on the first
    line.

    It keeps ids, weights if recorded, and the phase.
    """
    with target.open() as file:
        file.write(f"# {state(trace.header)}\n{_names(trace)}\n".encode())
        for block in blocks(trace, logits=False):
            file.writelines(line.encode() for line in _csv_lines(block))
    return Answer("moereplay import {path} --out NAME.zarr")


def _names(trace: Trace) -> str:
    ranks = range(trace.geometry.k)
    weights = [f"weight_{rank}" for rank in ranks] if "weights" in trace.arrays else []
    return ",".join(["request", "token", "layer", *(f"expert_{rank}" for rank in ranks), *weights, "phase"])


def _csv_lines(block: Block) -> Iterator[str]:
    weights = block.weights.tolist() if block.weights is not None else None
    keys = zip(block.request.tolist(), block.token.tolist(), block.phase.tolist(), strict=True)
    for at, ((request, token, phase), layers) in enumerate(zip(keys, block.chosen.tolist(), strict=True)):
        for layer, ids in enumerate(layers):
            shares = map(number, weights[at][layer]) if weights else ()
            yield ",".join(map(str, (request, token, layer, *ids, *shares, phase))) + "\n"


CSV = Exporter(
    name="csv",
    summary="a line per request, token and layer: ids, gate weights, phase; sizes on the first line",
    writes="NAME.csv",
    write=write_csv,
    keeps=frozenset({"chosen", "weights", "request_offsets", "prompt_lengths", "geometry"}),
)


# ---------------------------------------------------------------- JSON lines


def write_jsonl(trace: Trace, options: Options, target: Target) -> Answer:
    """Write the documented JSON lines (`traces/importers/columns.py`): an object per request, token and layer.

    It keeps ids, weights and logits if recorded, and the phase.
    """
    with target.open() as file:
        file.write(f"{state(trace.header)}\n".encode())
        for block in blocks(trace):
            for record in _records(block):
                file.write(f"{json_text(record, separators=(',', ':'))}\n".encode())
    return Answer("moereplay import {path} --out NAME.zarr")


def _records(block: Block) -> Iterator[dict[str, Any]]:
    for at, layers in enumerate(block.chosen.tolist()):
        where = {"request": int(block.request[at]), "token": int(block.token[at])}
        for layer, ids in enumerate(layers):
            record = {**where, "layer": layer, "experts": ids, "phase": int(block.phase[at])}
            for name, rows in (("weights", block.weights), ("logits", block.logits)):
                if rows is not None:
                    record[name] = [number(value) for value in rows[at, layer].tolist()]
            yield record


JSONL = Exporter(
    name="jsonl",
    summary="an object per request, token and layer: ids, gate weights, logits, phase; sizes on the first line",
    writes="NAME.jsonl",
    write=write_jsonl,
    keeps=frozenset({"chosen", "weights", "logits", "request_offsets", "prompt_lengths", "geometry"}),
)


# -- Parquet with a row per request, token and layer: lists of ids, gate weights and logits; geometry in the metadata.


LISTS = {"experts": pl.Int16, "weights": pl.Float32, "logits": pl.Float32}
KEYS = {"request": pl.Int64, "token": pl.Int64, "layer": pl.Int16, "phase": pl.Int8}
GROUP = 1 << 16  #: rows that a reader decodes together


def write_parquet(trace: Trace, options: Options, target: Target) -> Answer:
    """Return ids, weights and logits if recorded, and the phase."""
    with target.open() as file:
        write_rows(file, trace, 0, trace.tokens)
    return Answer("moereplay import {path} --out NAME.zarr")


def write_rows(file: BinaryIO, trace: Trace, first: int, last: int) -> None:
    """Write tokens [first, last) as one Parquet file, a block in memory at a time. Raises TraceError and OSError."""
    schema = schema_of(trace)
    failed: list[BaseException] = []

    def frames(*_: Any) -> Iterator[pl.DataFrame]:
        try:
            for block in blocks(trace, first, last):
                yield pl.DataFrame(_columns(block), schema=schema)
        except BaseException as error:  # polars would give it another name
            failed.append(error)
            raise

    try:
        lazy = register_io_source(frames, schema=schema, is_pure=True)
        lazy.sink_parquet(file, row_group_size=GROUP, metadata={KEY: state(trace.header)}, engine="streaming")
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise failed[0] if failed else OSError(str(error)) from error


def schema_of(trace: Trace) -> dict[str, Any]:
    """Return columns and their types, of a trace with or without weights and logits."""
    lists = {name: pl.List(kind) for name, kind in LISTS.items() if name == "experts" or name in trace.arrays}
    return {**KEYS, **lists}


def _columns(block: Block) -> dict[str, pl.Series]:
    tokens, layers, _ = block.chosen.shape
    keys = {name: np.repeat(getattr(block, name), layers) for name in ("request", "token", "phase")}
    lists = {"experts": block.chosen, "weights": block.weights, "logits": block.logits}
    columns = {name: pl.Series(name, keys[name]).cast(KEYS[name]) for name in keys}
    columns["layer"] = pl.Series("layer", np.tile(np.arange(layers, dtype=np.int16), tokens))
    return columns | {name: _listed(name, rows) for name, rows in lists.items() if rows is not None}


def _listed(name: str, rows: np.ndarray) -> pl.Series:
    flat = np.ascontiguousarray(rows.reshape(-1, rows.shape[-1]))
    return pl.Series(name, flat).cast(pl.List(LISTS[name]))


PARQUET = Exporter(
    name="parquet",
    summary="a row per request, token and layer: lists of ids, gate weights, logits; sizes in the metadata",
    writes="NAME.parquet",
    write=write_parquet,
    keeps=frozenset({"chosen", "weights", "logits", "request_offsets", "prompt_lengths", "geometry"}),
)


# -- A folder that is a data set of Hugging Face: shards of Parquet below data/, and a card with a YAML head.
# -- It contains no prompts: neither token ids nor the name of a prompt file.


SHARD = 1 << 16  #: tokens of a shard, roughly
SIZES = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M", 10_000_000: "1M<n<10M"}
LARGER = "n>10M"
#: Fields of the provenance that the card has.
SAID = ("model", "revision", "dtype", "importer", "decoding", "source_sha256")
CARD = """---
{head}
---

# Expert routing of {model}

Which experts each token used: {tokens} of {requests}, {layers} MoE layers, {k} of {experts} experts
per layer. No prompts and no token ids are in it.

| column | what |
|---|---|
| `request`, `token`, `layer` | counted from 0; layers are MoE layers |
| `phase` | 0 for tokens of the prompt, 1 for generated ones |
| `experts` | the chosen experts in rank order, -1 for not routed |
{optional}
The metadata of each file has the sizes of the model. `moereplay import FOLDER --out NAME.zarr` makes a trace of
this folder, which `moereplay replay` replays through expert caches.

| | |
|---|---|
{provenance}
"""
OPTIONAL = {
    "weights": "| `weights` | gate weights of those |\n",
    "logits": "| `logits` | the router's logits, raw, of all experts |\n",
}


def write_data_set(trace: Trace, options: Options, target: Target) -> Answer:
    """Return the shards, each of whole requests, and the card."""
    edges = shards(trace)
    for at, (first, last) in enumerate(edges):
        with target.open(f"data/train-{at:05}-of-{len(edges):05}.parquet") as file:
            write_rows(file, trace, first, last)
    with target.open("README.md") as file:
        file.write(card(trace, options.licence).encode())
    return Answer("hf upload USER/NAME {path} --repo-type dataset", ("prompts and token ids are not in it",))


def shards(trace: Trace) -> list[tuple[int, int]]:
    """Return ranges of tokens: of the requests that begin within the same SHARD tokens."""
    starts = np.asarray(trace.request_offsets[:-1])
    fresh = np.flatnonzero(np.diff(starts // SHARD)) + 1
    return list(pairwise([0, *starts[fresh].tolist(), trace.tokens]))


def card(trace: Trace, licence: str) -> str:
    """Return README.md: a YAML head for the hub, then text for readers."""
    geometry, provenance = trace.geometry, trace.header.provenance
    said = {name: getattr(provenance, name) for name in SAID}
    rows = [f"| {name} | {_cell(value)} |" for name, value in said.items() if value]
    return CARD.format(
        head="\n".join(_head(trace, licence)),
        model=_cell(provenance.model),
        tokens=counted(trace.tokens, "token"),
        requests=counted(trace.requests, "request"),
        layers=geometry.layers,
        k=geometry.k,
        experts=geometry.experts,
        optional="".join(text for name, text in OPTIONAL.items() if name in trace.arrays),
        provenance="\n".join([*rows, f"| trace digest | {_cell(trace.digest)} |"]),
    )


def _head(trace: Trace, licence: str) -> list[str]:
    """Return the lines of YAML; untrusted strings are quoted as JSON, which YAML accepts."""
    rows = trace.tokens * trace.geometry.layers
    size = next((size for most, size in SIZES.items() if rows < most), LARGER)
    features = [line for name, kind in schema_of(trace).items() for line in _feature(name, str(kind).lower())]
    return [
        f"license: {licence}",
        f"pretty_name: {json_text(f'Expert routing of {shown(trace.header.provenance.model)}')}",
        "tags:",
        *("- mixture-of-experts", "- routing-trace", "- moereplay"),
        "size_categories:",
        f"- {size}",
        "configs:",
        *("- config_name: default", "  data_files:", "  - split: train", "    path: data/train-*.parquet"),
        "dataset_info:",
        "  features:",
        *features,
        "  splits:",
        "  - name: train",
        f"    num_examples: {rows}",
    ]


def _feature(name: str, kind: str) -> list[str]:
    is_list = name in LISTS
    return [f"  - name: {name}", f"    {'sequence' if is_list else 'dtype'}: {kind.removeprefix('list(').rstrip(')')}"]


def _cell(text: str) -> str:
    """Return an untrusted string as one line of code, so that neither Markdown nor HTML interprets it."""
    return f"`{shown(text, 200).replace('`', '').replace('|', '')}`"


HF = Exporter(
    name="hf",
    summary="a data set for the Hugging Face hub: shards of Parquet and a card; never prompts or token ids",
    writes="FOLDER/",
    write=write_data_set,
    keeps=frozenset({"chosen", "weights", "logits", "request_offsets", "prompt_lengths", "geometry"}),
    takes=frozenset({"licence"}),
    needs=frozenset({"licence"}),
)
