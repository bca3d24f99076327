"""The documented CSV (`traces/importers/generic.py`): a line per request, token and layer, sizes on the first line."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.traces.exporters.contract import Answer, Exporter, Options, Target
from moereplay.traces.exporters.lines import Block, blocks, number
from moereplay.traces.schema import Trace
from moereplay.traces.stated import state


def write(trace: Trace, options: Options, target: Target) -> Answer:
    """Ids, weights if recorded, and the phase."""
    with target.open() as file:
        file.write(f"# {state(trace.header)}\n{_names(trace)}\n".encode())
        for block in blocks(trace, logits=False):
            file.writelines(line.encode() for line in _lines(block))
    return Answer("moereplay import {path} --out NAME.zarr")


def _names(trace: Trace) -> str:
    ranks = range(trace.geometry.k)
    weights = [f"weight_{rank}" for rank in ranks] if "weights" in trace.arrays else []
    return ",".join(["request", "token", "layer", *(f"expert_{rank}" for rank in ranks), *weights, "phase"])


def _lines(block: Block) -> Iterator[str]:
    weights = block.weights.tolist() if block.weights is not None else None
    keys = zip(block.request.tolist(), block.token.tolist(), block.phase.tolist(), strict=True)
    for at, ((request, token, phase), layers) in enumerate(zip(keys, block.chosen.tolist(), strict=True)):
        for layer, ids in enumerate(layers):
            shares = map(number, weights[at][layer]) if weights else ()
            yield ",".join(map(str, (request, token, layer, *ids, *shares, phase))) + "\n"


EXPORTER = Exporter(
    name="csv",
    summary="a line per request, token and layer: ids, gate weights, phase; sizes on the first line",
    writes="NAME.csv",
    write=write,
    keeps=frozenset({"chosen", "weights", "request_offsets", "prompt_lengths", "geometry"}),
)
