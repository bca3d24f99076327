"""The documented JSON lines (`traces/importers/generic.py`): an object per request, token and layer, with logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moereplay.traces.documents import json_text
from moereplay.traces.exporters.contract import Answer, Exporter, Options, Target
from moereplay.traces.exporters.lines import Block, blocks, number
from moereplay.traces.schema import Trace
from moereplay.traces.stated import state


def write(trace: Trace, options: Options, target: Target) -> Answer:
    """Ids, weights and logits if recorded, and the phase."""
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


EXPORTER = Exporter(
    name="jsonl",
    summary="an object per request, token and layer: ids, gate weights, logits, phase; sizes on the first line",
    writes="NAME.jsonl",
    write=write,
    keeps=frozenset({"chosen", "weights", "logits", "request_offsets", "prompt_lengths", "geometry"}),
)
