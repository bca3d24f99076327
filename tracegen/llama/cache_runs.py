"""Run a trace's tokens in llama.cpp with its expert cache at several sizes, in processes of its own."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.llama.process import Engine
from moereplay.traces.schema import Trace

HERE = "127.0.0.1"
SECONDS_TO_START = 60
NO_TOKENS = "the trace has no token ids; record the GGUF file with `moereplay record` for a trace that has them"


class CacheRun(NamedTuple):
    """One run at one size of the cache."""

    size: int  #: bytes asked for
    said: tuple[str, ...]  #: llama.cpp's lines about its cache
    ms: float | None  #: of a token behind a prompt, the mean; None without any


def requests_of(trace: Trace) -> list[list[Any]]:
    """Return [tokens, how many of them are the prompt] of each request. Raises RecordError without token ids."""
    if "token_ids" not in trace.arrays:
        raise RecordError(NO_TOKENS)
    ranges = pairwise(trace.request_offsets.tolist())
    ids = [trace.read("token_ids", first, last).tolist() for first, last in ranges]
    return [[tokens, prompt] for tokens, prompt in zip(ids, trace.prompt_lengths.tolist(), strict=True)]


def cache_runs(
    library: Path, model: Path, requests: Sequence[Any], sizes: Sequence[int], threads: int, repeats: int
) -> Iterator[CacheRun]:
    """Run all requests at each size, `repeats` times over all sizes. Raises RecordError."""
    longest = -(-max(len(tokens) for tokens, _ in requests) // 256) * 256
    with ExitStack() as running:
        engine = running.enter_context(Engine(library))
        said, _ = engine.ask("cache")  # what comes back was made by other people's code, and is text or numbers
        endpoint = "" if said["device"] else _served(running.enter_context(Engine(library)), threads)
        about, _ = engine.ask("connect", endpoint=endpoint, path=str(model.absolute()))
        if max(max(tokens) for tokens, _ in requests) >= int(about["vocabulary"]):
            raise RecordError(f"{model.name} has {about['vocabulary']:,} tokens; the trace has larger ids")
        for _ in range(repeats):
            for size in sizes:
                said, _ = engine.ask("run", requests=requests, size=size, longest=longest, threads=threads)
                ms = None if said["ms"] is None else float(said["ms"])
                yield CacheRun(size, tuple(map(str, said["said"])), ms)


def _served(server: Engine, threads: int) -> str:
    """Start a server on a free port of this machine; return its address once it answers. Raises RecordError."""
    with socket.socket() as free:
        free.bind((HERE, 0))
        port = free.getsockname()[1]
    server.ask("cache")
    server.tell("serve", endpoint=f"{HERE}:{port}", threads=threads)
    until = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < until:
        server.check()
        try:
            socket.create_connection((HERE, port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return f"{HERE}:{port}"
    raise RecordError(f"llama.cpp's RPC server does not answer at {HERE}:{port}")
