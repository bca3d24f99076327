"""Shared by tests of stored traces: headers, requests of random rows, and comparison with the written rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from moereplay.traces.schema import Geometry, Header, Provenance, Request, Trace
from moereplay.traces.values import DRAFT, of_rejected
from moereplay.traces.writer import TraceWriter

LAYERS, EXPERTS, K = 3, 8, 2
GEOMETRY = Geometry(layers=LAYERS, experts=EXPERTS, k=K, expert_bytes=(100, 200, 300), bytes_by_bits={4: (25, 50, 75)})
HEADER = Header(geometry=GEOMETRY, provenance=Provenance(model="toy", seed=7, notes=("made up",)), lookahead_depth=2)
PLAIN = Header(geometry=GEOMETRY)
BIAS = np.linspace(-1, 1, LAYERS * EXPERTS, dtype=np.float32).reshape(LAYERS, EXPERTS)


def ids_only(tokens: int, seed: int = 0) -> Request:
    """Experts at random, half of the tokens a prompt."""
    rng = np.random.Generator(np.random.PCG64(seed))
    chosen = rng.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :K]
    return Request(chosen=chosen, prompt_length=tokens // 2)


def everything(tokens: int, seed: int = 0) -> Request:
    """Every array that a trace may hold, at random."""
    rng = np.random.Generator(np.random.PCG64(seed))
    logits, *lookahead = rng.standard_normal((3, tokens, LAYERS, EXPERTS), np.float32)
    return Request(
        chosen=logits.argsort(-1)[..., ::-1][..., :K],
        prompt_length=1,
        weights=rng.random((tokens, LAYERS, K), np.float32),
        logits=logits,
        lookahead=tuple(lookahead),
        token_ids=rng.integers(0, 50_000, tokens),
        nll=rng.random(tokens, np.float32),
        residency=rng.integers(-1, 3, (tokens, LAYERS, K)),
    )


def assert_holds(trace: Trace, requests: list[Request]) -> None:
    """Every array equals the appended ones, laid end to end."""
    given = [request.arrays() for request in requests]
    assert trace.requests == len(requests)
    assert {*trace.arrays, *(f"{DRAFT}{name}" for name in trace.rejected)} == given[0].keys()
    for name in given[0]:
        first, last = (trace.tokens, trace.rows) if name.startswith(DRAFT) else (0, trace.tokens)
        found = trace.read(name.removeprefix(DRAFT), first, last)
        np.testing.assert_array_equal(found, np.concatenate([arrays[name] for arrays in given]))


def commit_some(path: Path, requests: list[Request], header: Header = PLAIN, bias: np.ndarray | None = None) -> None:
    """A partial, as a writer leaves it that was stopped after these requests."""
    with TraceWriter.create(path, header, bias, shard_tokens=16) as writer:
        for request in requests:
            writer.append(request)


def written(path: Path, trace: Trace) -> Path:
    """The trace as a folder."""
    with TraceWriter.create(path, trace.header, trace.router_bias) as writer:
        for request in range(trace.requests):
            writer.append(trace.request(request))
        writer.finish()
    return path


def drafted(request: Request, seed: int = 0) -> Request:
    """The request with a record of drafts: passes of up to 3 drafts, rows of the rejected ones at random."""
    rng = np.random.Generator(np.random.PCG64(seed))
    tokens, at = len(request.chosen), request.prompt_length
    drafts, wrong = np.zeros(tokens, np.int16), 0
    while at < tokens:
        right, rejected = min(int(rng.integers(3)), tokens - 1 - at), int(rng.integers(3))
        drafts[at], drafts[at + 1 : at + 1 + right] = right + rejected, -1
        at, wrong = at + 1 + right, wrong + rejected
    given = replace(request, drafts=drafts, rejected={}).given()
    rejected = {name: given[name][rng.integers(tokens, size=wrong)] for name in of_rejected(given)}
    return replace(request, drafts=drafts, rejected=rejected)
