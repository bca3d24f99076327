"""Read a trace as rows, one per token and layer, in blocks; write the documented CSV and JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from moereplay.traces.documents import json_text
from moereplay.traces.exporters.contract import Answer, Exporter, Options, Target
from moereplay.traces.growing import token_blocks
from moereplay.traces.importers.exported import state
from moereplay.traces.schema import Trace

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
            yield _block(trace, begin, end, logits)


def _block(trace: Trace, begin: int, end: int, logits: bool) -> Block:
    at = np.arange(begin, end)
    request = np.searchsorted(trace.request_offsets, at, "right") - 1
    token = at - trace.request_offsets[request]
    return Block(
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
