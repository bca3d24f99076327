"""Loads of experts for KTransformers (kt-kernel in SGLang), which keeps the most used ones on the GPU.

A file of `torch.save`, {"logical_count": int64 (1, layers of the model, E)}: with `--kt-expert-placement-strategy
frequency --init-expert-location FILE.pt` it makes its masks of GPU experts from it: for `--kt-num-gpu-experts N` the
N x layers experts of the largest counts (kvcache-ai/sglang, kt_ep_wrapper.py). Files of other names are ignored there.
"""

from __future__ import annotations

import numpy as np

from moereplay.traces.exporters import torch_file
from moereplay.traces.exporters.contract import Answer, Exporter, Options, Target
from moereplay.traces.exporters.scores import dense_layers, scores
from moereplay.traces.geometry import experts_per_layer
from moereplay.traces.schema import Trace

TYPED = (
    "python -m sglang.launch_server --model-path MODEL --kt-weight-path MODEL --kt-num-gpu-experts {count} "
    "--kt-expert-placement-strategy frequency --init-expert-location {{path}}"
)


def write(trace: Trace, options: Options, target: Target) -> Answer:
    """Counted uses, or the user's ranking as counts."""
    before, said = dense_layers(trace, options)
    counts, held = scores(trace, options), experts_per_layer(trace.geometry, options.cache_bytes or 0)
    with target.open() as file:
        torch_file.write(file, "logical_count", np.pad(counts, ((before, 0), (0, 0)))[None])
    total = held * trace.geometry.layers
    share = np.sort(counts, axis=None)[::-1][:total].sum() / max(1, counts.sum())
    note = f"{held} experts per layer, {total:,} in all: the most used anywhere, which have {share:.1%} of the counts"
    return Answer(TYPED.format(count=held), (note, *said))


EXPORTER = Exporter(
    name="ktransformers",
    summary="counts for kt-kernel's `--kt-expert-placement-strategy frequency`: masks of the experts on the GPU",
    writes="NAME.pt",
    write=write,
    keeps=frozenset(),
    takes=frozenset({"cache_bytes", "ranking", "dense_layers"}),
    needs=frozenset({"cache_bytes"}),
)
