"""Samples of traces that were found published or described: ONNX Runtime, DeepSeek-V4.1, imp, mbolt, fitz-tec, atlases.

Layouts are those of the writers' sources, which the importers' own pages cite; the numbers are the formulas'.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from moereplay_importers.router_binaries import LEAST

from contrib.importers.tests.loggers import WORKLOADS, logged, passes
from moereplay.traces.importers.contract import NO_PHASE, Options
from moereplay.traces.schema import Request
from tests.kit.importer_formulas import BITS_UNKNOWN, BYTES, EXPERTS, LAYERS, Sample, expert, grid, ids, weight, weights
from tests.kit.importer_formulas import K as RANKS

BASIS = "layers 0..1; experts = 8 as the largest id + 1"
TEXTS = (3, 4)  #: tokens of each text
NODES = [(10 * (layer + 1), f"/model/layers.{layer}/moe/QMoE") for layer in range(LAYERS)]


def _text(file: Path, lines: list[str]) -> None:
    file.write_text("".join(f"{line}\n" for line in lines))


# ---------------------------------------------------------------- ONNX Runtime


def write_onnx_log(file: Path) -> None:
    """Two prompts between marks, a line of another kind, and the footer."""
    lines, records = ["session: 3 nodes on CPU"], 0
    for request in range(len(WORKLOADS)):
        lines.append(f"[qmoe_prompt_runner] {request + 1}/{len(WORKLOADS)} prompt_start")
        for each in passes(request, pruned=False):
            for layer, (index, name) in enumerate(NODES):
                cells = [cell for cell in each if cell[2] == layer]
                event = {"node_index": index, "node_type": "QMoE", "node_name": name, "num_rows": len(cells)}
                event["top_k"] = RANKS
                event["expert_ids"] = [one for cell in cells for one in cell[3]]
                event["router_weights"] = [weight(cell[1], layer, rank) for cell in cells for rank in range(RANKS)]
                lines.append(f"10:00:00 [I:onnxruntime:, moe.cc:1 Log] moe_routing {json.dumps(event)}")
                records += 1
        lines.append(f"[qmoe_prompt_runner] {request + 1}/{len(WORKLOADS)} prompt_end")
    footer = {"prompts": 2, "prompt_runs": 2, "routing_records": records}
    _text(file, [*lines, f"moe_routing_complete {json.dumps(footer)}"])


def write_onnx_table(file: Path) -> None:
    """The last row of every pass."""
    names = "prompt_index,prompt,inference_index,node_index,node_type,node_name,num_rows,top_k,selected_expert_ids,rank"
    lines = [names]
    for request in range(len(WORKLOADS)):
        for at, each in enumerate(passes(request), 1):
            for layer, (index, name) in enumerate(NODES):
                rows = [cell for cell in each if cell[2] == layer]
                chosen = json.dumps(rows[-1][3])
                lines.append(f'{request + 1},"say, hi",{at},{index},QMoE,{name},{len(rows)},{RANKS},"{chosen}",0')
    _text(file, lines)


def last_rows(request: int) -> Request:
    """Return the rows of a request in the table: the last token of its prompt, and the decode steps."""
    prompt, steps = WORKLOADS[request]
    return Request(ids(request, prompt + steps)[prompt - 1 :], 0)


# ---------------------------------------------------------------- a file per layer


def write_layer_files(folder: Path) -> None:
    """Two texts one after the other, an npz per layer below trace/, and meta.json above."""
    (folder / "trace").mkdir(parents=True)
    found = np.concatenate([ids(text, tokens) for text, tokens in enumerate(TEXTS)])
    mass = np.concatenate([weights(tokens) for tokens in TEXTS]).astype(np.float16)
    for layer in range(LAYERS):
        arrays = {
            "indices": found[:, layer].astype(np.int16),
            "weights": mass[:, layer],
            "scores": np.zeros(0, np.float16),
        }
        np.savez(folder / "trace" / f"layer{layer}.npz", **arrays, token=np.arange(len(found), dtype=np.int32))
    texts = [{"id": f"t{at}", "category": "code", "n": tokens} for at, tokens in enumerate(TEXTS)]
    (folder / "meta.json").write_text(json.dumps({"n_seqs": 2, "n_tokens": len(found), "seqs": texts}))


def texts(first: int = 0) -> list[Request]:
    """Both texts, with their tokens."""
    starts = np.cumsum([0, *TEXTS])
    return [
        Request(ids(at, n), n, weights(n), token_ids=np.arange(starts[at], starts[at + 1]))
        for at, n in enumerate(TEXTS)
    ]


# ---------------------------------------------------------------- JSON documents


def write_layer_rows(file: Path) -> None:
    """Decode steps under `trace`."""
    rows = [[layer, *row] for token in ids(0, 9).tolist() for layer, row in enumerate(token)]
    file.write_text(json.dumps({"top_k": RANKS, "trace": rows}))


def write_flat_rows(file: Path) -> None:
    """Write the same rows without brackets."""
    rows = [[layer, *row] for token in ids(0, 9).tolist() for layer, row in enumerate(token)]
    file.write_text(json.dumps([number for row in rows for number in row]))


def write_atlas(file: Path) -> None:
    """Two prompts, layers from 3 on, scores that are no weights."""
    found = np.concatenate([ids(text, tokens) for text, tokens in enumerate(TEXTS)])
    layers = {
        str(3 + layer): {"executed_topk": found[:, layer].tolist(), "executed_scores": [[0.9, 0.8]] * len(found)}
        for layer in range(LAYERS)
    }
    starts = np.cumsum([0, *TEXTS]).tolist()
    prompts = [{"row_start": starts[at], "row_end": starts[at + 1], "category": "math"} for at in range(len(TEXTS))]
    document = {"schema": "glm52-routing-trace-export/v2", "routing": {"k": RANKS}, "layers": layers}
    file.write_text(json.dumps(document | {"conditional": {"prompts": prompts}}))


# ---------------------------------------------------------------- binaries


def write_mbolt(file: Path) -> None:
    """Both requests, the last layer of a prompt for its last token alone."""
    parts = [struct.pack("<4sii", b"MBLT", 1, EXPERTS)]
    for request in range(len(WORKLOADS)):
        for each in passes(request):
            for layer in range(LAYERS):
                rows = [one for cell in each if cell[2] == layer for one in cell[3]]
                parts.append(struct.pack(f"<iii{len(rows)}i", layer, RANKS, len(rows) // RANKS, *rows))
    file.write_bytes(b"".join(parts))


def share(token: int, layer: int, expert_id: int) -> float:
    """A probability that float32 holds exactly; those of the chosen are the largest, in rank order."""
    ranks = {expert(0, token, layer, rank): rank for rank in range(RANKS)}
    return (0.5, 0.25)[ranks[expert_id]] if expert_id in ranks else (1 + expert_id % 2) / 64


def write_fitz(file: Path) -> None:
    """Four tokens."""
    parts = [struct.pack("<8sii", b"RTRACE01", EXPERTS, 0)]
    for token in range(4):
        for layer in range(LAYERS):
            shares = [share(token, layer, each) for each in range(EXPERTS)]
            parts.append(struct.pack(f"<ii{EXPERTS}f", token, layer, *shares))
    file.write_bytes(b"".join(parts))


def fitz() -> Request:
    """The request, with the logarithms of its probabilities."""
    shares = grid(4, share, EXPERTS).astype(np.float32)
    return Request(ids(0, 4), 0, None, np.log(np.maximum(shares, LEAST)))


# ---------------------------------------------------------------- moe-policylang


def write_policylang(file: Path) -> None:
    """A line that describes the run, and both requests."""
    header = {"model_name": "made-up", "num_layers": LAYERS, "num_experts": EXPERTS, "top_k": RANKS, "num_entries": 20}
    lines = [json.dumps(header)]
    for request, (prompt, steps) in enumerate(WORKLOADS):
        for token in range(prompt + steps):
            for layer in range(LAYERS):
                row: dict[str, object] = {"p": request, "t": token, "l": layer}
                row["e"] = [expert(request, token, layer, rank) for rank in range(RANKS)]
                row["s"] = [weight(token, layer, rank) for rank in range(RANKS)]
                row["ph"] = "prefill" if token < prompt else "decode"
                lines.append(json.dumps(row))
    _text(file, lines)


def whole(weighed: bool = True) -> list[Request]:
    """Both requests, every layer of every token."""
    return [logged(request, pruned=False, weighed=weighed) for request in range(len(WORKLOADS))]


ONE = "one sequence at a time, not a batch"
DECODE_STEPS = "decode steps only: prompts and request boundaries were not recorded"
WHOLE = "every token is prompt; replay it token by token"

ALL = [
    Sample(
        "onnx_routing",
        "onnx_routing.log",
        write_onnx_log,
        whole(),
        (
            f"assumed: {ONE}; 2 requests, as marked; 2 nodes are layers, in the order of their first lines; "
            f"k = 2; {BASIS}",
            BITS_UNKNOWN,
        ),
    ),
    Sample(
        "onnx_routing",
        "onnx_inference.csv",
        write_onnx_table,
        [last_rows(0), last_rows(1)],
        (
            "assumed: column prompt_index is the request; column inference_index is the token; "
            "column node_index is the layer; column selected_expert_ids has the experts; "
            f"layers 10, 20 of the file are MoE layers 0..1; k = 2; {BASIS}",
            "the CSV has only the last row of every pass, so only the last token of a prompt; the log has all rows",
            NO_PHASE,
            BITS_UNKNOWN,
        ),
    ),
    Sample(
        "layer_files",
        "layer_files",
        write_layer_files,
        texts(),
        (
            f"assumed: a file per layer, 7 tokens, k = 2; 2 requests, as stated in meta.json; {BASIS}",
            f"whole texts, layer by layer: {WHOLE}",
            BITS_UNKNOWN,
        ),
    ),
    *(
        Sample(
            "layer_rows",
            name,
            write,
            [Request(ids(0, 9), 0)],
            (f"assumed: {said}k = 2; one request; {BASIS}", DECODE_STEPS, BITS_UNKNOWN),
        )
        for name, write, said in (
            ("layer_rows.json", write_layer_rows, ""),
            ("flat_rows.json", write_flat_rows, "a flat list of rows of 3 numbers; "),
        )
    ),
    Sample(
        "routing_atlas",
        "atlas.json",
        write_atlas,
        [Request(ids(at, n), n) for at, n in enumerate(TEXTS)],
        (
            "assumed: rows are tokens, k = 2; 2 requests, split by the row ranges of prompts; "
            f"layers 3..4 of the file are MoE layers 0..1; {BASIS}",
            f"whole prompts: {WHOLE}",
            "executed_scores are selection scores with the router's bias, not gate weights: left out",
            BITS_UNKNOWN,
        ),
    ),
    Sample(
        "router_binaries",
        "mbolt.bin",
        write_mbolt,
        [logged(0), logged(1)],
        (
            f"assumed: {ONE}; 2 requests, each a prompt (passes of several tokens) and its decode steps; k = 2; "
            "layers 0..1; experts = 8 as its header states",
            BITS_UNKNOWN,
        ),
    ),
    Sample(
        "router_binaries",
        "fitz.rtrace",
        write_fitz,
        [fitz()],
        (
            "assumed: 1 request, starting where the token number decreases; layers 0..1; experts = 8 as its "
            "header states",
            "k = 2 experts per token are chosen from the logits by order of size; no gate weights, because "
            "the router is unknown",
            "logits are the logarithms of the recorded softmax: exact up to a constant per token and layer",
            NO_PHASE,
            BITS_UNKNOWN,
        ),
        options=Options(expert_bytes=BYTES, shape=(LAYERS, RANKS)),
    ),
    Sample(
        "named_jsonl",
        "policylang.jsonl",
        write_policylang,
        whole(),
        (
            "assumed: written by moe-policylang, whose weights are the softmax of the chosen as it is, 2 requests; "
            "k = 2; layers 0..1; experts = 8 as line 1 says",
            BITS_UNKNOWN,
        ),
        model="made-up",
    ),
]
