"""Make a trace from Python: record a running server row by row (`Recorder`), or pass arrays (`from_arrays`)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

import numpy as np

from moereplay.traces.geometry import known
from moereplay.traces.pieces import checked_bias
from moereplay.traces.schema import (
    Geometry,
    Header,
    Provenance,
    Request,
    Trace,
    TraceError,
    check_values,
    dtype_of,
    memory_trace,
    row_shape,
    shown,
)
from moereplay.traces.texts import counted
from moereplay.traces.writer import TraceWriter


class Recorder:
    """Record the routing of a running server: rows as they are computed, for concurrent requests.

    Use it as a context manager, from any thread. Rows of open requests are held in memory; a finished request is
    written to `path`. It survives a kill once 512 tokens of finished requests are committed (`TraceWriter`); `resume`
    continues a killed recording.
    """

    def __init__(self, path: str | Path, geometry: Geometry | str, *, source: str = "", resume: bool = False) -> None:
        """Start or resume a recording. `geometry` is a `Geometry` or the name of a known model.

        Raises TraceError if `path` exists, or if there is nothing to resume.
        """
        header = _header(geometry, source)
        self._geometry = header.geometry
        self._writer = TraceWriter.resume(path, header) if resume else TraceWriter.create(path, header)
        self._open: dict[Hashable, Gathering] = {}
        self._lock = Lock()

    @property
    def requests_done(self) -> int:
        """Number of requests that a killed recording keeps, in the order in which they ended."""
        return self._writer.requests_done

    def append(
        self, token: int, layer: int, ids: Any, weights: Any = None, logits: Any = None, request: Hashable = 0
    ) -> None:
        """Record the experts that one token of a request ran at one MoE layer, both counted from 0.

        ids      (k,) whole numbers, the best first; fewer if fewer were routed
        weights  (k,) their gate weights, for every row or for none
        logits   (E,) router logits before any bias or softmax, for every row or for none

        A repeated row replaces the earlier one: after a rejected draft, or for a preempted request.
        Raises TraceError naming the invalid array or position, and does not record the row.
        """
        given = {"chosen": ids, "weights": weights, "logits": logits}
        values = {name: _array(name, value) for name, value in given.items() if value is not None}
        with self._lock:
            found = self._open.get(request) or Gathering(self._geometry)
            found.put(int(token), int(layer), values)
            self._open[request] = found

    def end(self, request: Hashable = 0, *, prompt_length: int = 0, tokens: int | None = None) -> None:
        """Complete a request, whose first `prompt_length` tokens are the prompt; its name may be used again.

        `tokens` keeps only the first ones, without a draft that was rejected last. Raises TraceError if a token or a
        layer is missing; the request is then left out, and the recording continues.
        """
        with self._lock:
            found = self._open.pop(request, None)
            if found is None:
                raise TraceError(f"request {request!r} has no row to end; append its rows first")
            try:
                self._writer.append(found.request(prompt_length, tokens))
            except TraceError as wrong:
                raise TraceError(f"request {request!r}: {wrong}") from None

    def close(self) -> Trace:
        """End open requests, without a last token that lacks a layer; finish the trace and open it.

        Raises TraceError if nothing was recorded, and for the first open request that lacks a row in between. Such
        requests are left out; all others are in the finished trace.
        """
        wrong = [*filter(None, map(self._end_incomplete, list(self._open)))]
        with self._lock, self._writer:
            trace = self._writer.finish()
        if wrong:
            raise TraceError(
                f"{wrong[0]}; it is missing in {trace.path}, which has {counted(trace.requests, 'request')}"
            )
        return trace

    def _end_incomplete(self, request: Hashable) -> TraceError | None:
        """End an open request after its last complete token; return the error if that fails."""
        try:
            if tokens := self._open[request].complete_tokens():
                self.end(request, tokens=tokens)
        except TraceError as wrong:
            return wrong
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the recording; after an exception, keep the requests that have ended for `resume`."""
        if kind is None:
            self.close()
            return
        with self._lock:
            self._writer.commit()
            self._writer.__exit__(kind, error, traceback)


def _header(geometry: Geometry | str, source: str) -> Header:
    if isinstance(geometry, Geometry):
        return Header(geometry=geometry, provenance=Provenance(source=source))
    model = known(geometry)
    return Header(geometry=model.geometry, provenance=Provenance(model=model.name, source=source))


def _array(name: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as wrong:  # ragged lists; a tensor on a GPU, or with a gradient
        fix = "pass a list, or tensor.detach().float().cpu()"
        raise TraceError(f"{name} cannot be read as an array ({shown(wrong)}); {fix}") from None


# -- Rows of one request

FIRST_ROWS = 64  #: allocated at first; arrays double when they are full
NOT_ROUTED = -1


class Gathering:
    """Collects the rows of one request, a token at a layer at a time, in any order.

    The last row of a token at a layer counts: tokens of rejected drafts and preempted requests are reported again.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._row: dict[int, int] = {}  #: row of each token in the arrays, in the order of first reports
        self._reported = np.zeros((FIRST_ROWS, geometry.layers), bool)
        self._arrays: dict[str, np.ndarray] = {}

    def put(self, token: int, layer: int, values: Mapping[str, np.ndarray]) -> None:
        """Store a row: chosen (at most k,) and, for every row or for none, weights (as many) and logits (E,).

        Raises TraceError naming the invalid array or position.
        """
        self._check_place(token, layer)
        rows = {name: self._checked(name, given) for name, given in values.items()}
        if not self._arrays:
            self._arrays = {name: self._empty(name, FIRST_ROWS) for name in rows}
        if rows.keys() != self._arrays.keys():
            differing = ", ".join(sorted(rows.keys() ^ self._arrays.keys()))
            raise TraceError(f"{differing} of token {token} at layer {layer}: give it for every row or for none")
        row = self._row.setdefault(token, len(self._row))
        self._grow(row)
        for name, given in rows.items():
            self._arrays[name][row, layer] = given
        self._reported[row, layer] = True

    def request(self, prompt_length: int = 0, tokens: int | None = None) -> Request:
        """Return the request, or its first `tokens`. Raises TraceError naming a token or layer without a row."""
        order = sorted(self._row)[:tokens]
        if not order:
            raise TraceError("no token was recorded")
        if order[-1] - order[0] != len(order) - 1:
            missing = next(token for token, after in pairwise(order) if after != token + 1) + 1
            raise TraceError(f"missing token {missing} between {order[0]} and {order[-1]}: record every token")
        rows = np.array([self._row[token] for token in order])
        self._check_complete(order, rows)
        kept = {name: array[rows] for name, array in self._arrays.items()}
        return Request(kept["chosen"], prompt_length, kept.get("weights"), kept.get("logits"))

    def complete_tokens(self) -> int:
        """Return the number of tokens, without incomplete ones at the end, where a server was stopped."""
        order = sorted(self._row)
        while order and not self._reported[self._row[order[-1]]].all():
            order.pop()
        return len(order)

    def _check_place(self, token: int, layer: int) -> None:
        if not 0 <= layer < self._geometry.layers:
            raise TraceError(f"invalid layer {layer}: expected 0 to {self._geometry.layers - 1}, MoE layers only")
        if token < 0:
            raise TraceError(f"invalid token {token}: expected its position in the request, from 0")

    def _checked(self, name: str, given: np.ndarray) -> np.ndarray:
        """Return a row as stored; shorter lists of experts are padded with -1."""
        (width,) = row_shape(name, self._geometry)[1:]
        check_values(given, name, name)
        if given.ndim != 1 or not 0 < len(given) <= width or (name == "logits" and len(given) < width):
            raise TraceError(f"{name} has shape {given.shape}: expected ({width},)")
        row = np.full(width, _fill(name), dtype_of(name))
        row[: len(given)] = given
        return row

    def _empty(self, name: str, rows: int) -> np.ndarray:
        return np.full((rows, *row_shape(name, self._geometry)), _fill(name), dtype_of(name))

    def _grow(self, row: int) -> None:
        if row < len(self._reported):
            return
        self._reported = np.concatenate([self._reported, np.zeros_like(self._reported)])
        self._arrays = {
            name: np.concatenate([array, self._empty(name, len(array))]) for name, array in self._arrays.items()
        }

    def _check_complete(self, order: list[int], rows: np.ndarray) -> None:
        missing_rows = np.argwhere(~self._reported[rows])
        if len(missing_rows):
            at, layer = missing_rows[0]
            raise TraceError(f"token {order[at]} has no row at layer {layer}: record every MoE layer of every token")


def _fill(name: str) -> int:
    return NOT_ROUTED if name == "chosen" else 0


# -- Arrays


def from_arrays(
    chosen: np.ndarray,
    geometry: Geometry | str,
    *,
    lengths: Sequence[int] | None = None,
    prompt_lengths: Sequence[int] | None = None,
    weights: np.ndarray | None = None,
    logits: np.ndarray | None = None,
    lookahead: Sequence[np.ndarray] = (),
    router_bias: np.ndarray | None = None,
) -> Trace:
    """Return a trace in memory. T tokens of all requests, L MoE layers, E experts per layer, k of them per token.

    chosen          (T, L, k) whole numbers: experts of each token and layer, the best first; -1 for none
    geometry        sizes and router: a `Geometry`, or the name of a known model (`moereplay models`)
    lengths         tokens of each request; they add up to T; default one request
    prompt_lengths  tokens of each request that are its prompt, and go through the model in one pass; default 0
    weights         (T, L, k) gate weights of the chosen
    logits          (T, L, E) router logits, before any bias or softmax
    lookahead       lookahead[d - 1] is (T, L, E): logits of layer l + d as predicted at layer l
    router_bias     (L, E) bias that the router adds to scores for choosing experts, but not for weighing them

    Raises TraceError naming the array and the expected shape, or the number that is out of range.
    """
    ids = np.asarray(chosen)
    if ids.ndim != 3:
        raise TraceError(f"chosen has shape {ids.shape}: expected (tokens, layers, k)")
    header = _sizes_of(geometry, ids.shape[2], len(lookahead))
    optional = {"weights": weights, "logits": logits}
    rows: dict[str, Any] = {name: np.asarray(array) for name, array in optional.items() if array is not None}
    looks = tuple(np.asarray(look) for look in lookahead)
    lengths = [len(ids)] if lengths is None else lengths
    prompts = [0] * len(lengths) if prompt_lengths is None else prompt_lengths
    _check_lengths(
        lengths, prompts, {"chosen": ids, **rows, **{f"lookahead[{d}]": look for d, look in enumerate(looks)}}
    )
    ends = np.cumsum(lengths).tolist()
    requests = [
        Request(ids[a:b], prompt, lookahead=tuple(look[a:b] for look in looks), **{n: r[a:b] for n, r in rows.items()})
        for a, b, prompt in zip([0, *ends], ends, prompts, strict=False)
    ]
    bias = None if router_bias is None else np.asarray(router_bias)
    return memory_trace(header, requests, checked_bias(bias, header))


def _sizes_of(geometry: Geometry | str, k: int, depth: int) -> Header:
    """Return the header; k is taken from the arrays, because a known model may have been run with another k."""
    if isinstance(geometry, Geometry):
        return Header(geometry=geometry, lookahead_depth=depth)
    model = known(geometry)
    sizes = model.geometry.model_copy(update={"k": k})
    return Header(geometry=sizes, provenance=Provenance(model=model.name), lookahead_depth=depth)


def _check_lengths(lengths: Sequence[int], prompts: Sequence[int], arrays: dict[str, np.ndarray]) -> None:
    for name, rows in arrays.items():
        if len(rows) != sum(lengths):
            raise TraceError(
                f"{name} has {len(rows)} tokens: expected {sum(lengths)}, the sum of the lengths of requests"
            )
    if len(prompts) != len(lengths):
        raise TraceError(f"prompt_lengths has {len(prompts)} numbers for {counted(len(lengths), 'request')}")
    for request, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        if length < 1:
            raise TraceError(f"request {request}: invalid length {length}: expected at least one token")
        if not 0 <= prompt <= length:
            raise TraceError(f"request {request}: {prompt} prompt tokens of {length}: expected 0 to {length}")
