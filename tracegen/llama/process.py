"""Run llama.cpp in a separate process: send requests, receive answers; raise its last output as an error."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from select import select
from threading import Thread
from typing import Any, NamedTuple, Self

import numpy as np

from moereplay.tracegen.errors import RecordError
from moereplay.traces.documents import DocumentError, from_json, json_text
from moereplay.traces.schema import Trace

PROGRAM = "moereplay.tracegen.llama.child"
MOST_LINE = 1 << 20  #: bytes of an answer's first line
MOST_ARRAY = 1 << 36  #: bytes of an array: above what any recording of one request has
#: Arrays of an answer, and their dtypes.
EXPECTED = {"ids": "<i4", "chosen": "<i4", "token_ids": "<i4", "weights": "<f4", "logits": "<f4", "nll": "<f4"}
MEMORY = "use shorter prompts (--truncate), a smaller --window or a smaller file, then --resume"


class Engine:
    """A running llama.cpp. Inside `with`; its methods raise RecordError, also when the process has ended."""

    def __init__(self, library: Path) -> None:
        paths = os.pathsep.join(filter(None, sys.path))  # this program, wherever it was found
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C is this process's, which then ends that one
        )
        self._printed: deque[str] = deque(maxlen=4)
        self._reading = Thread(target=self._listen, daemon=True)
        self._reading.start()
        self._library, self._asked = library, ""
        self.build: dict[str, str] = {}

    def __enter__(self) -> Self:
        try:
            said, _ = self.ask("library_of", path=str(self._library))
        except BaseException:
            self.close()
            raise
        self.build = {str(name): str(text) for name, text in said["build"].items()}
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                try:
                    stream.close()
                except OSError:  # a question that it did not read
                    continue
        self._reading.join(timeout=5)
        if self._process.stderr and not self._reading.is_alive():
            self._process.stderr.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def tell(self, question: str, **values: Any) -> None:
        """Put a question whose answer is not waited for."""
        assert self._process.stdin
        self._asked = question
        try:
            self._process.stdin.write(json_text({"ask": question} | values).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None

    def check(self) -> None:
        """Raise RecordError if an earlier request to the child failed."""
        if self._process.poll() is not None:
            raise self._ended()
        assert self._process.stdout
        if select([self._process.stdout], [], [], 0)[0]:
            raise RecordError(str(self._line().get("error", "llama.cpp's process answers unasked"))[:1000])

    def ask(self, question: str, **values: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the answer to a question, and its arrays."""
        self.tell(question, **values)
        said = self._line()
        if "error" in said:
            raise RecordError(str(said["error"])[:1000])
        listed = said.get("arrays")
        return said, {name: self._array(name, *about) for name, about in (listed or {}).items()}

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline(MOST_LINE)
        if not line.endswith(b"\n"):
            raise self._ended()
        try:
            said = from_json(line)
        except DocumentError:
            raise RecordError("invalid answer of llama.cpp's process; the file may be damaged") from None
        if not isinstance(said, dict):
            raise RecordError("invalid answer of llama.cpp's process; the file may be damaged")
        return said

    def _array(self, name: str, dtype: str, shape: list[int]) -> np.ndarray:
        """Read an array. Its file may have taken over that process: nothing is believed."""
        assert self._process.stdout
        whole = isinstance(shape, list) and all(isinstance(each, int) and 0 <= each < 1 << 31 for each in shape)
        if EXPECTED.get(name) != dtype or not whole or len(shape) > 3 or 4 * np.prod(shape, dtype=float) > MOST_ARRAY:
            raise RecordError("llama.cpp's process returned an unexpected array; the file may be damaged")
        values: Any = np.empty(shape, dtype)
        view = memoryview(values.reshape(-1)).cast("B")
        at = 0
        while at < len(view):
            got = self._process.stdout.readinto(view[at:])  # type: ignore[attr-defined]
            if not got:
                raise self._ended()
            at += got
        return values

    def _listen(self) -> None:
        """Keep the last lines that the process prints, each cut."""
        assert self._process.stderr
        while line := self._process.stderr.readline(4096):
            if text := line.decode(errors="replace").strip():
                self._printed.append(text[:200])

    def _ended(self) -> RecordError:
        """Return how the process ended, in words."""
        code = self._process.wait()
        self._reading.join(timeout=5)
        said = f": {' '.join(self._printed)[-300:]}" if self._printed else ""
        if code == -signal.SIGKILL:
            return RecordError(f"llama.cpp's process was killed; if memory ran out, {MEMORY}")
        if code < 0:
            crashed = f"crashed ({signal.Signals(-code).name})"
            if self._asked == "library_of":
                return RecordError(f"{self._library} {crashed} while it was loaded; is the file whole?{said}")
            return RecordError(f"llama.cpp {crashed}{said}")
        return RecordError(f"llama.cpp's process ended ({code}){said}")


class Tokenizer:
    """The model's tokenizer, in the form that `tracegen.tokens` calls."""

    def __init__(self, engine: Engine, opening: int | None, template: bool) -> None:
        self._engine, self.bos_token_id = engine, opening
        self.chat_template = "of the file" if template else None

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = False) -> dict[str, list[int]]:
        """Return the ids of a text."""
        _, arrays = self._engine.ask("tokens", text=text, special=add_special_tokens)
        return {"input_ids": arrays["ids"].tolist()}

    def get_chat_template(self) -> str:
        """Return nothing, because llama.cpp applies templates itself."""
        return ""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
        """Return the ids of one user message in the model's template."""
        _, arrays = self._engine.ask("chat", text=messages[0]["content"])
        return {"input_ids": arrays["ids"].tolist()}


# -- Run a trace's tokens in llama.cpp with its expert cache at several sizes, in processes of its own.

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
