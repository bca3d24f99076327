"""Samples of what inference engines write: SGLang's recorder and responses, vLLM's responses."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.schema import Request
from tests.kit.importer_formulas import BITS_UNKNOWN, EXPERTS, EXPERTS_UNKNOWN, LAYERS, K, Sample, ids
from tests.kit.torch_pickles import save

# ---------------------------------------------------------------- SGLang's recorder: passes of two ranks

WIDTH = 8  #: of its buffer, whatever k is
DENSE = 1  #: layers without experts before the others
PHYSICAL = (3, 1, 4, 0, 5, 2, 7, 6, 3, 0)  #: logical expert of each physical one: experts 3 and 0 have two copies
#: rank -> (request, prompt tokens, tokens); those of a rank are prefilled together, the second in two chunks
RANKS = {0: ((0, 3, 5), (1, 4, 6)), 1: ((2, 2, 3),)}


def token_id(request: int, token: int) -> int:
    """The input token at a position."""
    return 100 * request + token


def write_sglang_recorder(folder: Path) -> None:
    """Two ranks of data-parallel attention, one file each."""
    folder.mkdir()
    mapping = np.array([PHYSICAL] * (DENSE + LAYERS))
    for rank, requests in RANKS.items():
        records = [record(number, rank, each) for number, each in enumerate(schedule(requests))]
        document = {"records": records, "last_physical_to_logical_map": mapping}
        save(folder / f"expert_distribution_recorder_1.5_{rank}.pt", document)


def schedule(requests: tuple[tuple[int, int, int], ...]) -> list[tuple[str, list[tuple[int, int, int]]]]:
    """Passes as (mode, parts of requests: number, first token, last + 1): a chunk of each, the rest, then decode."""
    halves = [(number, 0, prompt // 2 + 1) for number, prompt, _ in requests]
    rests = [(number, prompt // 2 + 1, prompt) for number, prompt, _ in requests if prompt // 2 + 1 < prompt]
    passes = [("extend", halves), ("extend", rests), ("idle", [])]
    for step in range(max(tokens - prompt for _, prompt, tokens in requests)):
        running = [(number, prompt + step) for number, prompt, tokens in requests if prompt + step < tokens]
        passes.append(("decode", [(number, at, at + 1) for number, at in running]))
    return passes


def record(number: int, rank: int, each: tuple[str, list[tuple[int, int, int]]]) -> dict[str, Any]:
    """One pass, as the recorder keeps it."""
    mode, parts = each
    tokens = [(request, token) for request, start, stop in parts for token in range(start, stop)]
    return {
        "forward_pass_id": number,
        "rank": rank,
        "gatherer_key": "primary",
        "input_ids": [token_id(*token) for token in tokens],
        "positions": [token for _, token in tokens],
        "extend_seq_lens": [stop - start for _, start, stop in parts] if mode == "extend" else None,
        "forward_mode": ["", "extend", "decode", "mixed", "idle"].index(mode),
        "topk_ids_of_layer": physical(tokens),
        "misc_objects": [],
    }


def physical(tokens: list[tuple[int, int]]) -> np.ndarray:
    """(layers, N, 8) int32: physical ids, of the two copies the later one at odd tokens; -1 elsewhere."""
    found = np.full((DENSE + LAYERS, len(tokens), WIDTH), -1, np.int32)
    for at, (request, token) in enumerate(tokens):
        for layer in range(LAYERS):
            for rank in range(K):
                copies = [
                    place for place, expert in enumerate(PHYSICAL) if expert == int(rows(request)[token, layer, rank])
                ]
                found[DENSE + layer, at, rank] = copies[-(token % 2)] if len(copies) > 1 else copies[0]
    return found


def rows(request: int) -> np.ndarray:
    """(T, L, k) of a request."""
    tokens = {number: count for each in RANKS.values() for number, _, count in each}
    return ids(request, tokens[request])


def recorded() -> list[Request]:
    """The three requests."""
    return [
        Request(ids(number, tokens), prompt, token_ids=np.array([token_id(number, token) for token in range(tokens)]))
        for each in RANKS.values()
        for number, prompt, tokens in each
    ]


# ---------------------------------------------------------------- responses of SGLang: base64 over all hidden layers

ANSWERS = ((0, 4, 6), (1, 3, 9))  #: request, prompt tokens, tokens that were computed: one fewer than there are


def all_layers(request: int, tokens: int) -> np.ndarray:
    """(T, hidden layers, k): zeros where a layer is dense."""
    return np.concatenate([np.zeros((tokens, DENSE, K), int), ids(request, tokens)], 1)


def write_sglang_response(file: Path) -> None:
    """A line per response."""
    lines = []
    for request, prompt, tokens in ANSWERS:
        packed = base64.b64encode(all_layers(request, tokens).astype("<i4").tobytes()).decode()
        meta = {"prompt_tokens": prompt, "completion_tokens": tokens + 1 - prompt, "routed_experts": packed}
        lines.append(json.dumps({"text": "made up", "meta_info": meta}))
    file.write_text("".join(f"{line}\n" for line in lines))


# ---------------------------------------------------------------- responses of vLLM: lists, an npy in base64, null

CHOICES = ((3, 5), (4, 2))  #: of one prompt: request, generated tokens that were computed
PROMPT, CACHED = 4, 2  #: tokens of the prompt, and of these the first that lay in the prefix cache


def write_vllm_response(folder: Path) -> None:
    """A response with a prompt of its own and two choices and a preempted one, and one of the form without it."""
    folder.mkdir()
    choices = [{"index": at, "routed_experts": generated(*each).tolist()} for at, each in enumerate(CHOICES)]
    choices.append({"index": 2, "routed_experts": None})
    usage = {"prompt_tokens": PROMPT, "completion_tokens": 9}
    split = {"model": "made-up", "prompt_routed_experts": prompt_rows().tolist(), "choices": choices, "usage": usage}
    (folder / "a.json").write_text(json.dumps(split) + "\n")
    stream = io.BytesIO()
    np.save(stream, ids(5, 7).astype(np.int16))
    whole = {"choices": [{"routed_experts": base64.b64encode(stream.getvalue()).decode()}]}
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    (folder / "b.json").write_text(json.dumps({"model": "made-up", **whole, "usage": usage}) + "\n")


def prompt_rows() -> np.ndarray:
    """(T, L, k) of the prompt: the cached tokens were not computed."""
    found = ids(2, PROMPT)
    found[:CACHED] = -1
    return found


def generated(request: int, tokens: int) -> np.ndarray:
    """(T, L, k) behind the prompt."""
    return ids(request, PROMPT + tokens)[PROMPT:]


def answered() -> list[Request]:
    """The first choice behind the cached tokens, the second from the prompt's last token on, the response of one."""
    first, second = (np.concatenate([prompt_rows(), generated(*each)]) for each in CHOICES)
    return [Request(first[CACHED:], PROMPT - CACHED), Request(second[PROMPT - 1 :], 1), Request(ids(5, 7), 5)]


LEFT_OUT = "layers 0 have one constant id (dense): left out"
ENGINES = [
    Sample(
        "sglang_recorder",
        "sglang_recorder",
        write_sglang_recorder,
        recorded(),
        (
            "requests were not recorded: tokens are assigned by their positions, in batch order",
            "copies of experts are mapped to the model's own by last_physical_to_logical_map, as it was at the end",
            LEFT_OUT,
            "ids are padded from 2 to 8 per token; the padding is left out",
            BITS_UNKNOWN,
        ),
    ),
    Sample(
        "sglang_response",
        "sglang_response.jsonl",
        write_sglang_response,
        [Request(ids(request, tokens), prompt) for request, prompt, tokens in ANSWERS],
        (
            "assumed: k = 2, the largest at which no row of 6 ids per token repeats an expert; pass --model "
            "NAME to state it",
            LEFT_OUT,
            EXPERTS_UNKNOWN,
            BITS_UNKNOWN,
        ),
    ),
    Sample(
        "vllm_response",
        "vllm_response",
        write_vllm_response,
        answered(),
        (
            "1 choices have no routed_experts (preempted, aborted, or not requested): left out",
            "3 prompt tokens of later choices were computed for the first one: left out; each choice begins at the "
            "prompt's last token",
            "2 prompt tokens have no experts in any layer (computed by another server, or cached): left out, so that "
            "the request begins after them",
            EXPERTS_UNKNOWN,
            BITS_UNKNOWN,
        ),
        model="made-up",
    ),
]
assert max(PHYSICAL) + 1 == EXPERTS
