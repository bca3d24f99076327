"""Samples of what research code writes: CECAR's histories, DynaNDE's tables, streams layer first, lines of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from moereplay.traces.importers.contract import NO_PHASE
from moereplay.traces.schema import Request
from tests.kit.importer_formulas import (
    BITS_UNKNOWN,
    DECODE_ONLY,
    EXPERTS,
    EXPERTS_UNKNOWN,
    LAYERS,
    K,
    Sample,
    grid,
    ids,
    weight,
    weights,
)
from tests.kit.torch_pickles import save

# ---------------------------------------------------------------- CECAR: decode steps, the ids of the largest logits

STEPS = 7
ENDS = (4, -1)  #: the step of each run that generated the end of the text
PROMPT = (11, 12, 13)


def write_cecar(file: Path) -> None:
    """Two runs of one size; layer 1 is dense, the first ends early."""
    runs = range(len(ENDS))
    document = {
        "model_alias": "made-up",
        "hf_model_id": "nobody/made-up",
        "num_questions": len(ENDS),
        "batch_size": 1,
        "temperature": 1.0,
        "do_sample": False,
        "eos_token_id": 2,
        "prompt_len": [len(PROMPT)] * len(ENDS),
        "input_ids_prompt": [np.array([PROMPT])] * len(ENDS),
        "gen_ids_decode": [np.array([generated(run)]) for run in runs],
        "eos_pos_in_decode": list(ENDS),
        "routing_decode": [largest(run) for run in runs],
    }
    save(file, document)


def generated(run: int) -> list[int]:
    """The tokens that a run generated, the last of which was no input."""
    return [2 if step == ENDS[run] else 100 * run + step for step in range(STEPS)]


def largest(run: int) -> dict[str, object]:
    """(T, 1, hidden layers, k): zeros in the middle layer."""
    dense = np.zeros((STEPS, 1, K))
    chosen = np.concatenate([ids(run, STEPS)[:, :1], dense, ids(run, STEPS)[:, 1:]], 1)
    values = np.concatenate([weights(STEPS)[:, :1], dense, weights(STEPS)[:, 1:]], 1)
    idx, val = chosen[:, None].astype("<i4"), values[:, None].astype("<f2")
    return {"type": "topk", "topk": K, "idx": idx, "val": val}


def histories() -> list[Request]:
    """Both runs up to their ends."""
    steps = [end + 1 if end >= 0 else STEPS for end in ENDS]
    inputs = [np.array([PROMPT[-1], *generated(run)])[:length] for run, length in enumerate(steps)]
    return [Request(ids(run, length), 0, token_ids=inputs[run]) for run, length in enumerate(steps)]


# ---------------------------------------------------------------- DynaNDE: a table of scores per layer

ROWS = 6


def write_dynande(file: Path) -> None:
    """A row per layer and token, its scores in the columns of the chosen."""
    lines = [",".join(["layer_id", "token_id", *(f"expert_{number}" for number in range(EXPERTS))])]
    for layer in range(LAYERS):
        for token in range(ROWS):
            lines.append(",".join([str(layer), str(token), *map(str, scores(token, layer))]))
    file.write_text("".join(f"{line}\n" for line in lines))


def scores(token: int, layer: int) -> list[float]:
    """Return the score of every expert, 0 if not chosen; rank 1 has less than rank 0."""
    row = [0.0] * EXPERTS
    for rank in range(K):
        row[int(ids(0, token + 1)[token, layer, rank])] = share(token, layer, rank)
    return row


def share(token: int, layer: int, rank: int) -> float:
    """A score; never equal at both ranks."""
    return weight(token, layer, rank) / 2 if rank else weight(token, layer, rank)


# ---------------------------------------------------------------- streams, layer first: ids only, cut into chunks

CHUNK = 4
STREAMS = {"code": 10, "essay": 5}


def stream(number: int, tokens: int) -> np.ndarray:
    """(T, L, k) ids of a file; its last token was not routed at the last layer."""
    chosen = ids(number, tokens)
    chosen[-1, -1] = -1
    return chosen


def write_layers_npz(folder: Path) -> None:
    """Two streams, by name; the recorder cleared its context every four tokens."""
    folder.mkdir()
    meta = {"model": "made-up", "num_experts": EXPERTS, "n_moe_layers": LAYERS, "k": K, "chunk": CHUNK, "source": "r1"}
    for number, (name, tokens) in enumerate(STREAMS.items()):
        experts = stream(number, tokens).transpose(1, 0, 2).astype(np.int16)
        np.savez(folder / f"{name}.npz", experts=experts, meta=json.dumps(meta))


def chunks() -> list[Request]:
    """4, 4, 2 and 4, 1 tokens, all of them prompt."""
    streams = [stream(number, tokens) for number, tokens in enumerate(STREAMS.values())]
    parts = [part[start : start + CHUNK] for part in streams for start in range(0, len(part), CHUNK)]
    return [Request(part, len(part)) for part in parts]


# ---------------------------------------------------------------- lines of tokens: decoded steps, ids that ascend

LINES = 9


def write_token_lines(file: Path) -> None:
    """Steps 3 to 11 of a run."""
    chosen = np.sort(ids(0, LINES)).tolist()
    lines = [json.dumps({"tok": 3 + token, "layers": layers}) for token, layers in enumerate(chosen)]
    file.write_text("".join(f"{line}\n" for line in lines))


ALL = [
    Sample(
        "cecar",
        "cecar.pt",
        write_cecar,
        histories(),
        (
            DECODE_ONLY,
            "1 of 2 runs are cut where their text ends",
            "logits of the chosen experts only: left out",
            "layers 1 have one constant id (dense): left out",
            EXPERTS_UNKNOWN,
            BITS_UNKNOWN,
        ),
        model="nobody/made-up",
    ),
    Sample(
        "dynande",
        "dynande.csv",
        write_dynande,
        [Request(ids(0, ROWS), ROWS, weights=grid(ROWS, share))],
        (
            "tokens of texts fed to the model: every token is prompt; replay it token by token",
            "rows are taken as the tokens of one text: no batch was found in their order",
            BITS_UNKNOWN,
        ),
    ),
    Sample(
        "layers_npz",
        "layers_npz",
        write_layers_npz,
        chunks(),
        (
            "teacher-forced text: every token is prompt; replay it token by token",
            "split into requests of 4 tokens, as passed",
            BITS_UNKNOWN,
        ),
        model="made-up",
    ),
    Sample(
        "token_lines",
        "token_lines.jsonl",
        write_token_lines,
        [Request(np.sort(ids(0, LINES)), 0)],
        (
            NO_PHASE,
            "ids stand in ascending order everywhere: ranks were not recorded",
            EXPERTS_UNKNOWN,
            BITS_UNKNOWN,
        ),
    ),
]
