"""Files of many requests in every built-in format that is read line by line, as long as a test wants them."""

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


#: Files whose requests stand one after the other, by name.
MANY: dict[str, Callable[[int], Lines]] = {
    "plain.csv": csv,
    "plain.jsonl": jsonl,
    "lists.tsv": tsv,
    "ranks.tsv": tsv_ranks,
    "route.csv": route,
    "marked.log": marked,
}


def written(folder: Path, name: str, requests: int, files: dict[str, Callable[[int], Lines]] = MANY) -> Path:
    """A file of so many requests."""
    path = folder / f"{requests}.{name}"
    path.write_text("".join(f"{line}\n" for line in files[name](requests)))
    return path
