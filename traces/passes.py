"""The schedule of passes: which tokens go through the model together. It is laid over a trace, not stored in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traces.schema import Trace, TraceError
from traces.spelling import whole

PREFILL, DECODE = 0, 1


@dataclass(frozen=True)
class Passes:
    """Forward passes in run order; pass p covers tokens [start[p], stop[p]) of one request."""

    start: np.ndarray  #: (P,) int64
    stop: np.ndarray  #: (P,) int64
    request: np.ndarray  #: (P,) int64
    phase: np.ndarray  #: (P,) int8, 0 prefill, 1 decode

    def __len__(self) -> int:
        return len(self.start)


def parse_passes(text: str) -> int:
    """Prompt tokens per pass: 0 for `recorded` (all of them), 1 for `token`, N for `chunk:N`. Raises TraceError."""
    if text == "recorded":
        return 0
    if text == "token":
        return 1
    kind, _, size = text.partition(":")
    if kind == "chunk" and (tokens := whole(size)):
        return tokens
    raise TraceError(f"passes {text!r} is unknown; use recorded, token or chunk:N with N of at least 1")


def schedule(trace: Trace, passes: str) -> Passes:
    """Lay `passes` over the trace: the prompt in pieces of that size, then one token per pass."""
    size = parse_passes(passes)
    starts, requests, phases = [], [], []
    for request in range(trace.requests):
        first, last = int(trace.request_offsets[request]), int(trace.request_offsets[request + 1])
        prompt = int(trace.prompt_lengths[request])
        prefill = np.arange(first, first + prompt, size or max(prompt, 1))
        decode = np.arange(first + prompt, last)
        starts += [prefill, decode]
        requests.append(np.full(len(prefill) + len(decode), request))
        phases += [np.full(len(prefill), PREFILL), np.full(len(decode), DECODE)]
    start = np.concatenate(starts).astype(np.int64)
    stop = np.append(start[1:], trace.tokens).astype(np.int64)
    return Passes(start, stop, np.concatenate(requests).astype(np.int64), np.concatenate(phases).astype(np.int8))
