"""Record the routing of a running server: rows as they are computed, of many requests at once, become a trace."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

import numpy as np

from moereplay.traces.gathering import Gathering
from moereplay.traces.geometry import known
from moereplay.traces.schema import Geometry, Header, Provenance, Trace, TraceError, shown
from moereplay.traces.writer import TraceWriter


class Recorder:
    """Rows of open requests are held in memory; a request that has ended goes to `path`. Use as a context manager.

    Any thread may call it. A request that has ended survives a kill once 512 tokens of ended requests have come
    together (`TraceWriter`); a killed recording is continued with `resume`.
    """

    def __init__(self, path: str | Path, geometry: Geometry | str, *, source: str = "", resume: bool = False) -> None:
        """`geometry` is a `Geometry` or the name of a known model. Raises TraceError if `path` exists."""
        header = _header(geometry, source)
        self._geometry = header.geometry
        self._writer = TraceWriter.resume(path, header) if resume else TraceWriter.create(path, header)
        self._open: dict[Hashable, Gathering] = {}
        self._lock = Lock()

    @property
    def requests_done(self) -> int:
        """Requests that a killed recording keeps, in the order in which they ended."""
        return self._writer.requests_done

    def append(
        self, token: int, layer: int, ids: Any, weights: Any = None, logits: Any = None, request: Hashable = 0
    ) -> None:
        """The experts that one token of a request ran at one MoE layer, both counted from 0.

        ids      (k,) whole numbers, the best first; fewer where fewer were routed
        weights  (k,) gate weights of them, for every row or for none
        logits   (E,) router logits before any bias or softmax, for every row or for none

        A row that is given again replaces the former: a rejected draft, or a request that was preempted.
        Raises TraceError naming what does not fit; the row is not recorded then.
        """
        given = {"chosen": ids, "weights": weights, "logits": logits}
        values = {name: _array(name, value) for name, value in given.items() if value is not None}
        with self._lock:
            found = self._open.get(request) or Gathering(self._geometry)
            found.put(int(token), int(layer), values)
            self._open[request] = found

    def end(self, request: Hashable = 0, *, prompt_length: int = 0, tokens: int | None = None) -> None:
        """A request is complete, `prompt_length` of its tokens the prompt; its name may be used again.

        `tokens` keeps so many of it, without a draft that was rejected last. Raises TraceError if a token or a layer is
        missing; the request is given up then, and the recording goes on.
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
        """End what is open, without a last token that lacks a layer; finish and open the trace.

        Raises TraceError if nothing was recorded, and for the first open request that lacks a row in between: those are
        left out, all others are in the finished trace.
        """
        wrong = [*filter(None, map(self._given_up, list(self._open)))]
        with self._lock, self._writer:
            trace = self._writer.finish()
        if wrong:
            raise TraceError(f"{wrong[0]}; it is left out of {trace.path}, which has {trace.requests} requests")
        return trace

    def _given_up(self, request: Hashable) -> TraceError | None:
        """End an open request as far as it goes; why it cannot be, if so."""
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
        """Without an error, `close`; with one, requests that have ended are kept for `resume`."""
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
