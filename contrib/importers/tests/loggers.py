"""Samples of what engines and loggers write line by line: llama.cpp and its forks, colibri, moe-cache-lab, vLLM.

Layouts are those of the writers' sources, which the importers' own pages cite; the numbers are the formulas'.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from moereplay.traces.importers.contract import NO_PHASE
from moereplay.traces.schema import Request
from tests.kit.importer_formulas import (
    BITS_UNKNOWN,
    EXPERTS,
    LAYERS,
    Sample,
    expert,
    ids,
    weights,
)
from tests.kit.importer_formulas import K as RANKS

#: (prompt tokens, decode steps) of each request of a log.
WORKLOADS = ((3, 2), (2, 3))
FIRST = 1  #: the model's number of its first MoE layer: layer 0 is dense
NUMBERED = "layers 1..2 of the file are MoE layers 0..1"
BASIS = "layers 0..1; experts = 8 as the largest id + 1"

Cell = tuple[int, int, int, list[int]]  #: request, token, layer, experts


def passes(request: int, pruned: bool = True) -> Iterator[list[Cell]]:
    """Yield tokens of each forward pass, layer by layer; `pruned`: the last layer only for the last prompt token."""
    prompt, steps = WORKLOADS[request]
    for first, last in [(0, prompt), *((prompt + step, prompt + step + 1) for step in range(steps))]:
        cells = [(token, layer) for layer in range(LAYERS) for token in range(first, last)]
        kept = [(t, layer) for t, layer in cells if not pruned or layer < LAYERS - 1 or t == last - 1]
        yield [(request, t, layer, chosen(request, t, layer)) for t, layer in kept]


def chosen(request: int, token: int, layer: int) -> list[int]:
    """The experts of a token at a layer, by rank."""
    return [expert(request, token, layer, rank) for rank in range(RANKS)]


def logged(request: int, pruned: bool = True, weighed: bool = False) -> Request:
    """The request that a log of these passes is."""
    prompt, steps = WORKLOADS[request]
    found = ids(request, prompt + steps)
    if pruned:
        found[: prompt - 1, -1] = -1
    return Request(found, prompt, weights(prompt + steps) if weighed else None)


def every(pruned: bool = True) -> Iterator[Cell]:
    """The rows of both requests, in the order of computation."""
    return (cell for request in range(len(WORKLOADS)) for each in passes(request, pruned) for cell in each)


def _text(file: Path, lines: list[str]) -> None:
    file.write_text("".join(f"{line}\n" for line in lines))


# ---------------------------------------------------------------- llama.cpp and its forks


def write_positions(file: Path) -> None:
    """Two workloads end to end."""
    rows = [f"{t - WORKLOADS[r][0]},{FIRST + layer},{','.join(map(str, e))}" for r, t, layer, e in every()]
    _text(file, rows)


def write_ranks(file: Path) -> None:
    """One sequence."""
    cells = [cell for each in passes(1) for cell in each]
    rows = [
        f"{'prefill' if t < WORKLOADS[1][0] else 'decode'},{t},{FIRST + layer},{rank},{one}"
        for _, t, layer, e in cells
        for rank, one in enumerate(e)
    ]
    _text(file, ["phase,token,layer,rank,expert", *rows])


def write_layer_log(file: Path) -> None:
    """A row per expert."""
    _text(file, ["layer,expert", *(f"{layer},{one}" for _, _, layer, e in every() for one in e)])


def write_layer_lists(file: Path) -> None:
    """A row per token, ids between blanks."""
    _text(file, ["layer_id,expert_ids", *(f"{FIRST + layer},{' '.join(map(str, e))}" for _, _, layer, e in every())])


CHUNKS = (8, 8, 9)  #: tokens between two clearings of the context


def write_records(file: Path) -> None:
    """A record per layer and chunk; outputs of all tokens are asked for, so that no layer is pruned."""
    parts = []
    for request, tokens in enumerate(CHUNKS):
        for layer in range(LAYERS):
            rows = [one for token in range(tokens) for one in chosen(request, token, layer)]
            parts.append(struct.pack(f"<iii{len(rows)}i", layer, tokens, RANKS, *rows))
    file.write_bytes(b"".join(parts))


# ---------------------------------------------------------------- colibri


def write_colibri(file: Path) -> None:
    """A call per MoE layer and pass, a row per token of it."""
    lines, call = [], 0
    for request in range(len(WORKLOADS)):
        gates = weights(sum(WORKLOADS[request]))
        for each in passes(request, pruned=False):
            for layer in range(LAYERS):
                for row, (_, t, _, e) in enumerate(cell for cell in each if cell[2] == layer):
                    choices = " ".join(f"{one}:{gate:.4f}" for one, gate in zip(e, gates[t, layer], strict=True))
                    lines.append(f"{call} {row} {FIRST + layer} {choices}")
                call += 1
    _text(file, lines)


# ---------------------------------------------------------------- JSON lines


def write_cache_lab(file: Path) -> None:
    """Version 1: the prompt layer by layer, what is generated token by token."""
    metadata = {
        "record_type": "metadata",
        "format": "moe-cache-lab.routing-jsonl",
        "format_version": 1,
        "model_id": "made-up",
        "num_experts": EXPERTS,
        "experts_per_token": RANKS,
        "model_revision": None,
    }
    prompt, steps = WORKLOADS[0]
    order = [(t, layer) for layer in range(LAYERS) for t in range(prompt)]
    order += [(t, layer) for t in range(prompt, prompt + steps) for layer in range(LAYERS)]
    gates = weights(prompt + steps)
    rows = [
        {
            "record_type": "routing_selection",
            "phase": "prompt" if t < prompt else "generated",
            "token_position": t,
            "layer": FIRST + layer,
            "selected_experts": chosen(0, t, layer),
            "selected_probabilities": gates[t, layer].tolist(),
            "token_id": 100 + t,
        }
        for t, layer in order
    ]
    _text(file, [json.dumps(row) for row in (metadata, *rows)])


def generated() -> Request:
    """The first workload with its token ids."""
    prompt, steps = WORKLOADS[0]
    tokens = prompt + steps
    return Request(ids(0, tokens), prompt, weights(tokens), token_ids=100 + np.arange(tokens))


LENGTHS = (9, 4)  #: tokens of requests of the loggers below


def _token_lines(row: Callable[[int, int, int], dict[str, object]]) -> list[str]:
    places = [(r, t, layer) for r, tokens in enumerate(LENGTHS) for t in range(tokens) for layer in range(LAYERS)]
    return [json.dumps(row(*place)) for place in places]


def write_lattice(file: Path) -> None:
    """Without request ids: the token falls back."""

    def row(request: int, token: int, layer: int) -> dict[str, object]:
        gates = weights(token + 1)[token, layer].tolist()
        return {
            "layer_idx": layer,
            "token_idx": token,
            "selected_ids": chosen(request, token, layer),
            "gate_weights": gates,
        }

    _text(file, _token_lines(row))


def write_speculative(file: Path) -> None:
    """With the number of a problem."""

    def row(request: int, token: int, layer: int) -> dict[str, object]:
        place = {"dataset": "made-up", "problem_id": 5 + request, "layer": layer, "token_idx": token}
        gates = weights(token + 1)[token, layer].tolist()
        return place | {"experts": chosen(request, token, layer), "gating_probs": gates}

    _text(file, _token_lines(row))


def write_engine_log(file: Path) -> None:
    """After a line about the run; every request has the same id, and its tokens count from 0."""
    meta = {"type": "meta", "model_id": "made-up", "vllm_version": "0.x", "layers_logged": [0, 1], "top_k": RANKS}

    def row(token: int, layer: int, experts: list[int], gates: list[float]) -> dict[str, object]:
        place = {"type": "route", "req_id": "default", "token_idx": token, "layer": layer}
        return place | {"topk_ids": experts, "topk_weights": gates}

    lines = _token_lines(lambda r, t, layer: row(t, layer, chosen(r, t, layer), weights(t + 1)[t, layer].tolist()))
    _text(file, [json.dumps(meta), *lines])


def from_loggers() -> list[Request]:
    """Return the expected content of all three."""
    return [Request(ids(request, tokens), 0, weights(tokens)) for request, tokens in enumerate(LENGTHS)]


# ---------------------------------------------------------------- MoE-Beyond

TEXTS = (9, 5)  #: tokens of each prompt


def write_moe_beyond(folder: Path) -> None:
    """A file per prompt, layer by layer, with a token that is a comma and one that is a quote."""
    folder.mkdir()
    for request, tokens in enumerate(TEXTS):
        words = ['","', '""""', *(f"t{token}" for token in range(2, tokens))]
        rows = [
            f'{FIRST + layer},0,{words[token]},"{chosen(request, token, layer)}"'
            for layer in range(LAYERS)
            for token in range(tokens)
        ]
        _text(folder / f"prompt_{request}_data.csv", ["Layer ID,Batch Number,Token,Activated Expert IDs", *rows])


COMPUTED = "rows are in the order of computation, pass by pass"
BEGUN = "2 requests, each a prompt (passes of several tokens) and its decode steps"
PRUNED = [logged(0), logged(1)]
LOGGED = f"2 requests; k = 2; {BASIS}"

ALL = [
    Sample(
        "llama_positions",
        "llama_positions.csv",
        write_positions,
        PRUNED,
        (
            "assumed: columns are position, layer, then k = 2 experts; positions below 0 belong to the prompt; "
            f"2 requests, starting where a layer's position does not rise; {NUMBERED}; {BASIS}",
            BITS_UNKNOWN,
        ),
    ),
    Sample(
        "llama_ranks",
        "llama_ranks.csv",
        write_ranks,
        PRUNED[1:],
        (f"assumed: one request, a row per expert; {NUMBERED}; k = 2; {BASIS}", BITS_UNKNOWN),
    ),
    Sample(
        "layer_log",
        "layer_log.csv",
        write_layer_log,
        PRUNED,
        (f"assumed: {COMPUTED}; {BEGUN}; k = 2, the largest divisor of all runs; {BASIS}", BITS_UNKNOWN),
    ),
    Sample(
        "layer_log",
        "layer_lists.csv",
        write_layer_lists,
        PRUNED,
        (f"assumed: {COMPUTED}; {BEGUN}; {NUMBERED}; k = 2; {BASIS}", BITS_UNKNOWN),
    ),
    Sample(
        "llama_records",
        "llama_records.bin",
        write_records,
        [Request(ids(request, tokens), tokens) for request, tokens in enumerate(CHUNKS)],
        (
            "assumed: a record is a layer of one pass; 3 requests, one per pass of several tokens, because the "
            f"context is cleared before each; k = 2; {BASIS}",
            BITS_UNKNOWN,
        ),
    ),
    Sample(
        "colibri_route",
        "colibri.route",
        write_colibri,
        [logged(request, pruned=False, weighed=True) for request in range(len(WORKLOADS))],
        (
            "assumed: one sequence at a time, not a batch; 2 requests, each a prompt (calls of several rows) and its "
            f"decode steps; {NUMBERED}; {BASIS}",
            "gate weights have four digits, as the recorder writes them",
            BITS_UNKNOWN,
        ),
    ),
    Sample(
        "cache_lab",
        "cache_lab.jsonl",
        write_cache_lab,
        [generated()],
        (f"assumed: {NUMBERED}", BITS_UNKNOWN),
        model="made-up",
    ),
    *(
        Sample(
            "named_jsonl",
            name,
            write,
            from_loggers(),
            (f"assumed: written by {who}, {LOGGED}", NO_PHASE, BITS_UNKNOWN),
            model=model,
        )
        for name, write, who, model in (
            ("lattice.jsonl", write_lattice, "lattice", "unknown"),
            ("speculative.jsonl", write_speculative, "speculative-moe", "unknown"),
            ("engine_log.jsonl", write_engine_log, "a logger of vLLM", "made-up"),
        )
    ),
    Sample(
        "moe_beyond",
        "moe_beyond",
        write_moe_beyond,
        [Request(ids(request, tokens), tokens) for request, tokens in enumerate(TEXTS)],
        (
            f"assumed: rows of a layer stand in the order of its tokens; {NUMBERED}; k = 2; {BASIS}",
            "a whole prompt at a time: every token is prompt",
            BITS_UNKNOWN,
        ),
    ),
]
