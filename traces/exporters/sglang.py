"""Loads of experts for SGLang's `--init-expert-location FILE.json`, from which it places and replicates them on GPUs.

{"logical_count": [[[...]]]}, (1, layers of the model, E): SGLang balances the counts itself (expert_location.py,
init_by_eplb), so the numbers of GPUs and redundant experts are options of SGLang. Dense layers have counts of 0.
"""

from __future__ import annotations

import numpy as np

from moereplay.traces.documents import json_text
from moereplay.traces.exporters.contract import Answer, Exporter, Options, Target, dense_layers
from moereplay.traces.schema import Trace
from moereplay.traces.summary import uses


def write(trace: Trace, options: Options, target: Target) -> Answer:
    """Write how often each expert was chosen."""
    before, said = dense_layers(trace, options)
    counts = np.pad(uses(trace), ((before, 0), (0, 0)))
    with target.open() as file:
        file.write(f"{json_text({'logical_count': [counts.tolist()]})}\n".encode())
    typed = "python -m sglang.launch_server --model-path MODEL --ep-size N --init-expert-location {path}"
    return Answer(typed, said)


SGLANG = Exporter(
    name="sglang",
    summary="`logical_count` for `--init-expert-location`: SGLang places experts on its GPUs by these loads",
    writes="NAME.json",
    write=write,
    keeps=frozenset(),
    takes=frozenset({"dense_layers"}),
)
