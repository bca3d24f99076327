"""The process that runs llama.cpp: it answers its parent's requests, one at a time, until the parent exits.

A request is a line of JSON on standard input; an answer is a line of JSON, followed by the bytes of the arrays that the
line lists. Files and libraries are untrusted: the process writes no file and has a memory limit.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.llama.binding import AT_ONCE, Cached, CachedModel, Library, Model
from moereplay.traces.documents import from_json, json_text

Answer = tuple[dict[str, Any], dict[str, np.ndarray]]
SHARE_OF_MEMORY = 0.9  #: share of this machine's memory, for data not mapped from the file


def limit() -> None:
    """Take away what reading a file needs not: writing files, core dumps, more than most of the memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_DATA: int(memory * SHARE_OF_MEMORY)}
    for name, most in limits.items():
        with suppress(OSError, ValueError):  # a lower limit is set already, or the system has none
            resource.setrlimit(name, (most, most))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory ends, the recording's parent stays
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with its parent


class Session:
    """Answers questions about one model."""

    def __init__(self) -> None:
        self._library: Library | None = None
        self._model: Model | None = None
        self._routers: Routers | None = None
        self._cached: Cached | None = None
        self._cached_model: CachedModel | None = None

    def answer(self, asked: dict[str, Any]) -> Answer:
        """Answer one question. Raises RecordError."""
        return getattr(self, f"_{asked.pop('ask')}")(**asked)

    def _library_of(self, path: str) -> Answer:
        self._library = Library(Path(path))
        return {"build": self._library.build}, {}

    def _load(self, path: str) -> Answer:
        assert self._library
        self._model = model = Model(self._library, Path(path))
        about = {"vocabulary": model.vocabulary, "longest": model.longest, "opening": model.opening}
        return about | {"template": model.template is not None}, {}

    def _tokens(self, text: str, special: bool) -> Answer:
        assert self._model
        return {}, {"ids": np.array(self._model.tokens(text, special), np.int32)}

    def _chat(self, text: str) -> Answer:
        assert self._model
        return {}, {"ids": np.array(self._model.tokens(self._model.chat(text), True), np.int32)}

    def _context(self, longest: int, threads: int, exact: bool) -> Answer:
        assert self._model
        assert self._library
        self._routers = Routers(self._library.name, self._library.values)
        self._model.make_context(longest, threads, exact, self._routers.on_node)
        return {}, {}

    def _request(
        self, ids: list[int], first: int, new: int, temperature: float, top_p: float, top_k: int, seed: int
    ) -> Answer:
        """Run `first` tokens in parts of AT_ONCE, the others one by one, then up to `new` of the model's own."""
        assert self._model
        self._model.forget()
        draw, done, parts, surprise, last = np.random.Generator(np.random.PCG64(seed)), [], [], [], None
        ahead = [ids[at : min(at + AT_ONCE, first)] for at in range(0, first, AT_ONCE)] + [
            [each] for each in ids[first:]
        ]
        while ahead:
            tokens = ahead.pop(0)
            logits, routed = self._passed(tokens, len(done))
            surprise.append(nll(last, logits, tokens))
            parts.append(routed)
            done, last = done + tokens, logits[-1].copy()
            made = len(done) - len(ids)  # new tokens that went through the model; the last new one does not
            if not ahead and made < new - 1:
                token = pick(last, temperature, top_p, top_k, draw)
                ahead = [] if self._model.ends(token) else [[token]]
        rows = {
            kind: np.concatenate([getattr(part, kind) for part in parts]) for kind in ("chosen", "weights", "logits")
        }
        rows |= {"token_ids": np.array(done, np.int32), "nll": np.concatenate(surprise)}
        return {"layers": parts[0].layers}, rows

    def _cache(self) -> Answer:
        """Return the device that the library's expert cache would have; empty without one."""
        assert self._library
        self._cached = Cached(self._library)
        return {"device": self._cached.device}, {}

    def _serve(self, endpoint: str, threads: int) -> Answer:
        """Be that device for another process; returns when the server has failed."""
        assert self._library
        Cached(self._library).serve(endpoint, threads)
        raise RecordError(f"llama.cpp's RPC server ended: {self._library.last_words}")

    def _connect(self, endpoint: str, path: str) -> Answer:
        """Load a file for the cache, on the server at `endpoint` if there is one."""
        assert self._cached
        if endpoint:
            self._cached.connect(endpoint)
        self._cached_model = self._cached.load(Path(path))
        return {"device": self._cached.device, "vocabulary": self._cached_model.vocabulary}, {}

    def _run(self, requests: list[list[Any]], size: int, longest: int, threads: int) -> Answer:
        assert self._cached_model
        return self._cached_model.run(requests, size, longest, threads), {}

    def _passed(self, tokens: list[int], start: int) -> Any:
        assert self._model
        assert self._routers
        logits = self._model.decode(tokens, start)
        if not np.isfinite(logits[-1]).all():
            raise RecordError("the model's logits are not numbers (NaN); the file may be damaged")
        return logits, self._routers.take(len(tokens))


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the questions end."""
    session = Session()
    for line in questions:
        arrays: dict[str, np.ndarray] = {}
        try:
            said, arrays = session.answer(from_json(line))
        except RecordError as wrong:
            said = {"error": str(wrong)}
        except MemoryError:
            said = {"error": "llama.cpp's process is out of memory"}
        listed = {name: [values.dtype.str, list(values.shape)] for name, values in arrays.items()}
        answers.write(json_text(said | {"arrays": listed}).encode() + b"\n")
        for values in arrays.values():
            answers.write(np.ascontiguousarray(values).tobytes())
        answers.flush()


# -- The next token from a row of logits, and the nll of given ones; in numpy, from a seed.


def pick(logits: np.ndarray, temperature: float, top_p: float, top_k: int, draw: np.random.Generator) -> int:
    """Return a token from logits (V,): the likeliest at temperature 0, else one drawn within `top_k` and `top_p`."""
    if not temperature:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    scaled = logits[order].astype(np.float64) / temperature
    chances = np.exp(scaled - scaled[0])
    chances /= chances.sum()
    if top_p < 1:  # the fewest whose total reaches top_p
        kept = int(np.searchsorted(chances.cumsum(), top_p)) + 1
        order, chances = order[:kept], chances[:kept] / chances[:kept].sum()
    return int(order[min(int(np.searchsorted(chances.cumsum(), draw.random(), side="right")), len(order) - 1)])


def nll(last: np.ndarray | None, logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """Return (T,) f32 nats of tokens: the first from `last` (V,), 0 without one, the others from logits (T, V)."""
    found = np.zeros(len(tokens), np.float32)
    for at, token in enumerate(tokens):
        row = logits[at - 1] if at else last
        if row is not None:
            most = row.max()
            found[at] = np.log(np.exp((row - most).astype(np.float64)).sum()) + float(most) - float(row[token])
    return found


# -- The routers in llama.cpp's graph of a pass: nodes `ffn_moe_NAME-LAYER` become rows of logits, choices and weights.

PREFIX = b"ffn_moe_"
#: Nodes that are read. If there are several for logits or weights, the model uses the last computed one.
KINDS = {
    b"logits": "logits",
    b"logits_biased": "logits",
    b"probs": "scores",
    b"topk": "chosen",
    b"weights": "weights",
    b"weights_softmax": "weights",
    b"weights_norm": "weights",
    b"weights_scaled": "weights",
}
#: Where it exists, the scores are the logits with the gate's bias: a softmax of the chosen alone follows.
OF_THE_CHOSEN = b"weights_softmax"


class Pass(NamedTuple):
    """Routers of T tokens: L layers, E experts, k chosen."""

    layers: list[int]  #: the model's own numbers
    chosen: np.ndarray  #: (T, L, k) int32, best first
    weights: np.ndarray  #: (T, L, k) f32 as the experts get them
    logits: np.ndarray  #: (T, L, E) f32


class Routers:
    """Copies the routers of a pass while it runs; `name` and `values` read a node."""

    def __init__(self, name: Callable[[int], bytes], values: Callable[[int], np.ndarray]) -> None:
        self._name, self._values = name, values
        self._rows: dict[tuple[str, int], np.ndarray] = {}
        self._error: Exception | None = None

    def on_node(self, tensor: int, ask: bool) -> bool:
        """Before a node, return whether to stop after it; after it, copy its data. False would end the pass."""
        try:
            kind, layer = _parsed(self._name(tensor))
            if kind is None:
                return not ask
            if not ask:
                self._keep(kind, layer, self._values(tensor))
        except Exception as wrong:  # must not cross C; raised after the pass
            self._error = wrong
        return True

    def _keep(self, kind: bytes, layer: int, values: np.ndarray) -> None:
        what = KINDS[kind]
        width = self._rows["chosen", layer].shape[1] if what == "weights" else values.shape[-1]
        self._rows[what, layer] = values.reshape(-1, width)
        if kind == OF_THE_CHOSEN:
            self._rows["logits", layer] = self._rows["scores", layer]

    def take(self, tokens: int) -> Pass:
        """Return the data of the last pass (`tokens` tokens). Raises RecordError if a layer lacks a node or tokens."""
        rows, self._rows = self._rows, {}
        error, self._error = self._error, None
        if error:
            raise error if isinstance(error, RecordError) else RecordError(f"a router cannot be read: {error!r}")
        layers = sorted({layer for _, layer in rows})
        if not layers:
            raise RecordError("llama.cpp's graph of this model has no router: expected a Mixture of Experts")
        for kind, layer in ((kind, layer) for kind in ("logits", "chosen", "weights") for layer in layers):
            if (kind, layer) not in rows:
                raise RecordError(f"llama.cpp's graph of this model has no {kind} of the router in layer {layer}")
            if len(rows[kind, layer]) != tokens:
                found = len(rows[kind, layer])
                raise RecordError(f"layer {layer} routes {found} of {tokens} tokens; such a model cannot be recorded")
        found = {kind: [rows[kind, layer] for layer in layers] for kind in ("chosen", "weights", "logits")}
        if any(len({part.shape for part in parts}) > 1 for parts in found.values()):
            raise RecordError("layers have routers of different widths: expected the same in all layers")
        return Pass(layers, **{kind: np.stack(parts, 1) for kind, parts in found.items()})


def _parsed(name: bytes) -> tuple[bytes | None, int]:
    """Return the kind and layer of a router's node; None for other nodes, as `ffn_moe_probs-3 (reshaped)`."""
    kind, dash, layer = name.removeprefix(PREFIX).rpartition(b"-")
    if not name.startswith(PREFIX) or not dash or kind not in KINDS or not layer.isdigit():
        return None, 0
    return kind, int(layer)


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with answers
    limit()
    serve(sys.stdin.buffer, channel)
