"""Files of many requests in every format that is read line by line, as long as a test wants them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

TOKENS, LAYERS, K, EXPERTS = 48, 2, 2, 8
PROMPT = 8  #: tokens of each request
Lines = Iterator[str]


def chosen(request: int, token: int, layer: int) -> list[int]:
    """Two experts that follow from the place."""
    first = (3 * request + 5 * token + layer) % EXPERTS
    return [first, (first + 1 + (request + token) % (EXPERTS - 1)) % EXPERTS]


def by_token() -> Iterator[tuple[int, int]]:
    """Token and layer, token by token."""
    return ((token, layer) for token in range(TOKENS) for layer in range(LAYERS))


def by_pass() -> Iterator[tuple[int, int]]:
    """Token and layer, the prompt layer by layer, as engines compute it."""
    yield from ((token, layer) for layer in range(LAYERS) for token in range(PROMPT))
    yield from ((token, layer) for token in range(PROMPT, TOKENS) for layer in range(LAYERS))


def words(ids: list[int], between: str) -> str:
    """Experts as text."""
    return between.join(map(str, ids))


def csv(requests: int) -> Lines:
    """The plain format."""
    yield "request,token,layer,expert_0,expert_1,weight_0,weight_1,phase"
    for request in range(requests):
        for token, layer in by_token():
            ids = words(chosen(request, token, layer), ",")
            yield f"{request},{token},{layer},{ids},0.5,0.25,{int(token >= PROMPT)}"


def jsonl(requests: int) -> Lines:
    """Write the same rows as JSON lines."""
    for request in range(requests):
        for token, layer in by_token():
            ids = chosen(request, token, layer)
            yield json.dumps({"request": request, "token": token, "layer": layer, "experts": ids})


def tsv(requests: int) -> Lines:
    """Requests of any name, lists in cells."""
    yield "request\ttoken\tlayer\texperts"
    for request in range(requests):
        for token, layer in by_token():
            yield f"chat {request}\t{token}\t{layer}\t{words(chosen(request, token, layer), ' ')}"


def tsv_ranks(requests: int) -> Lines:
    """A row per expert, requests that nothing but the falling token shows."""
    yield "token\tlayer\texperts"
    for request in range(requests):
        for token, layer in by_token():
            yield from (f"{token}\t{layer}\t{each}" for each in chosen(request, token, layer))


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


def route(requests: int) -> Lines:
    """BigMoeOnEdge's, a turn each."""
    sizes = [f"# layer={layer} expert_bytes=1000 dense_bytes=1" for layer in range(LAYERS)]
    yield from ["# route_trace v1", f"# model=m arch=a n_layer={LAYERS} n_expert={EXPERTS} n_expert_used={K}", *sizes]
    yield "turn,phase,step,layer,slot,expert,weight"
    for request in range(requests):
        for token, layer in by_token():
            for slot, each in enumerate(chosen(request, token, layer)):
                yield f"{request},{int(token >= PROMPT)},{token},{layer},{slot},{each},0.5"


def marked(requests: int) -> Lines:
    """Lines of an engine's log, each request with its end."""
    for request in range(requests):
        yield f"@moe-begin r{request} {PROMPT}"
        yield from (
            f"@moe r{request} {at} {layer} {words(chosen(request, at, layer), ',')}" for at, layer in by_token()
        )
        yield f"@moe-end r{request}"


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
    "plain.csv": csv,
    "plain.jsonl": jsonl,
    "lists.tsv": tsv,
    "ranks.tsv": tsv_ranks,
    "logger.jsonl": logger,
    "positions.csv": positions,
    "log.csv": log,
    "lists.csv": log_lists,
    "colibri.route": colibri,
    "route.csv": route,
    "marked.log": marked,
}
#: Files that are one request, however long.
ONE: dict[str, Callable[[int], Lines]] = {"one_ranks.csv": ranks, "lab.jsonl": lab, "steps.jsonl": steps}


def written(folder: Path, name: str, requests: int) -> Path:
    """A file of so many requests."""
    path = folder / f"{requests}.{name}"
    path.write_text("".join(f"{line}\n" for line in (MANY | ONE)[name](requests)))
    return path
