"""Files of many requests in the formats of this package, as long as a test wants them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from tests.kit.long_files import LAYERS, PROMPT, TOKENS, Lines, by_token, chosen, words


def by_pass() -> Iterator[tuple[int, int]]:
    """Token and layer, the prompt layer by layer, as engines compute it."""
    yield from ((token, layer) for layer in range(LAYERS) for token in range(PROMPT))
    yield from ((token, layer) for token in range(PROMPT, TOKENS) for layer in range(LAYERS))


def logger(requests: int) -> Lines:
    """Write the format of a vLLM logger."""
    for request in range(requests):
        for token, layer in by_token():
            ids = chosen(request, token, layer)
            yield json.dumps({"req_id": f"r{request}", "token_idx": token, "layer": layer, "topk_ids": ids})


def positions(requests: int) -> Lines:
    """llama-moe-trace of llama.cpp's forks."""
    for request in range(requests):
        yield from (
            f"{token - PROMPT},{layer},{words(chosen(request, token, layer), ',')}" for token, layer in by_pass()
        )


def log(requests: int) -> Lines:
    """A row per expert, without tokens."""
    yield "layer,expert"
    for request in range(requests):
        for token, layer in by_pass():
            yield from (f"{layer},{each}" for each in chosen(request, token, layer))


def log_lists(requests: int) -> Lines:
    """A row per token, without tokens."""
    yield "layer_id,expert_ids"
    for request in range(requests):
        yield from (f"{layer},{words(chosen(request, token, layer), ' ')}" for token, layer in by_pass())


def colibri(requests: int) -> Lines:
    """colibri's stream."""
    call, before = -1, (0, -1)
    for request in range(requests):
        for token, layer in by_pass():
            row = token if token < PROMPT else 0
            call, before = call + (row == 0 or layer != before[1]), (row, layer)
            first, second = chosen(request, token, layer)
            yield f"{call} {row} {layer} {first}:0.5000 {second}:0.2500"


def ranks(requests: int) -> Lines:
    """moe-trace of a fork, a row per expert: one request as long as so many."""
    yield "phase,token,layer,rank,expert"
    for request in range(requests):
        for token, layer in by_token():
            at = request * TOKENS + token
            phase = "prefill" if at < PROMPT else "decode"
            yield from (
                f"{phase},{at},{layer},{rank},{each}" for rank, each in enumerate(chosen(request, token, layer))
            )


def lab(requests: int) -> Lines:
    """moe-cache-lab's, one request."""
    yield json.dumps({"format": "moe-cache-lab.routing-jsonl", "format_version": 1, "model_id": "m"})
    for request in range(requests):
        for token, layer in by_token():
            at, ids = request * TOKENS + token, chosen(request, token, layer)
            where = {"phase": "prompt" if at < PROMPT else "generated", "token_position": at, "layer": layer}
            yield json.dumps({"record_type": "routing_selection", **where, "selected_experts": ids})


def steps(requests: int) -> Lines:
    """A line per token, one request."""
    for request in range(requests):
        for token in range(TOKENS):
            layers = [chosen(request, token, layer) for layer in range(LAYERS)]
            yield json.dumps({"tok": request * TOKENS + token, "layers": layers})


#: Files whose requests stand one after the other, by name.
MANY: dict[str, Callable[[int], Lines]] = {
    "logger.jsonl": logger,
    "positions.csv": positions,
    "log.csv": log,
    "lists.csv": log_lists,
    "colibri.route": colibri,
}
#: Files that are one request, however long.
ONE: dict[str, Callable[[int], Lines]] = {"one_ranks.csv": ranks, "lab.jsonl": lab, "steps.jsonl": steps}
