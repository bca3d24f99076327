"""A routing profile for `--moe-cache-profile` of thecodacus' llama.cpp: what its llama-moe-trace writes.

A line `position,layer,expert,expert,...` per token and layer, no header (github.com/thecodacus/llama.cpp,
moe-trace.cpp). Positions of a prompt are negative and end at -1, decoded ones count from 0, and start again with each
request. Layers are those of the model, dense ones counted. What was not routed has no line.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moereplay.traces.exporters.contract import Answer, Exporter, Options, Target
from moereplay.traces.exporters.lines import Block, blocks
from moereplay.traces.exporters.scores import dense_layers
from moereplay.traces.schema import Trace


def write(trace: Trace, options: Options, target: Target) -> Answer:
    """Every token at every layer."""
    before, said = dense_layers(trace, options)
    with target.open() as file:
        for block in blocks(trace, logits=False):
            file.writelines(line.encode() for line in _lines(block, trace.prompt_lengths, before))
    return Answer("llama-server -m MODEL.gguf --moe-cache-profile {path} --moe-cache-slots N", said)


def _lines(block: Block, prompts: np.ndarray, before: int) -> Iterator[str]:
    positions = (block.token - prompts[block.request]).tolist()
    for position, layers in zip(positions, block.chosen.tolist(), strict=True):
        for layer, ids in enumerate(layers, before):
            routed = [expert for expert in ids if expert >= 0]
            if routed:
                yield ",".join(map(str, (position, layer, *routed))) + "\n"


EXPORTER = Exporter(
    name="llama.cpp-profile",
    summary="position,layer,experts for `--moe-cache-profile` of thecodacus/llama.cpp, as its own recorder writes",
    writes="NAME.csv",
    write=write,
    keeps=frozenset({"chosen", "prompt_lengths", "request_offsets"}),
    takes=frozenset({"dense_layers"}),
)
