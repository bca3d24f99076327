"""A folder that is a data set of Hugging Face: shards of Parquet below data/, and a card with a YAML head.

It contains no prompts: neither token ids nor the name of a prompt file.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from moereplay.traces.documents import json_text
from moereplay.traces.exporters.contract import Answer, Exporter, Options, Target
from moereplay.traces.exporters.parquet import LISTS, schema_of, write_rows
from moereplay.traces.schema import Trace, shown
from moereplay.traces.texts import counted

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


def write(trace: Trace, options: Options, target: Target) -> Answer:
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
    write=write,
    keeps=frozenset({"chosen", "weights", "logits", "request_offsets", "prompt_lengths", "geometry"}),
    takes=frozenset({"licence"}),
    needs=frozenset({"licence"}),
)
