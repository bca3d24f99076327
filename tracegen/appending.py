"""Append requests to a trace one by one: progress, commits at most a minute apart, clean-up after a stop. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moereplay.tracegen.plan import partial_of
from moereplay.tracegen.tokens import Work
from moereplay.traces.schema import Header, Request
from moereplay.traces.writer import TraceWriter

SECONDS_BETWEEN_COMMITS = 60.0


class Progress(NamedTuple):
    """Progress of a recording; tokens and seconds are of this run, without the requests of an earlier one."""

    done: int
    total: int
    skipped: int  #: requests recorded by an earlier run, part of `done`
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of this run so far."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float:
        """Estimate from the requests of this run; 0 before the first."""
        made = self.done - self.skipped
        return self.seconds / made * (self.total - self.done) if made else 0.0


def appended(
    writer: TraceWriter,
    run: Callable[[int, np.ndarray], Request],
    work: Work,
    progress: Callable[[Progress], None],
    seconds: float,
) -> None:
    """Append every missing request, recorded by `run`; commit at least every `seconds`."""
    skipped, total, tokens = writer.requests_done, len(work.sequences), 0
    began = committed = time.monotonic()
    progress(Progress(skipped, total, skipped, 0, 0.0))
    for number in range(skipped, total):
        try:
            request = run(number, work.sequences[number])
        except BaseException:
            writer.commit()  # appended requests are complete even if this one was stopped, also by Ctrl-C
            raise
        writer.append(request)
        tokens += len(request.chosen)
        now = time.monotonic()
        if now - committed > seconds:
            writer.commit()
            committed = now
        progress(Progress(number + 1, total, skipped, tokens, now - began))


def opened_writer(out: Path, header: Header, bias: np.ndarray | None, resume: bool) -> TraceWriter:
    """Return a writer of a new trace, or with `resume` of an unfinished one. Raises TraceError."""
    if resume and partial_of(out).exists():
        return TraceWriter.resume(out, header, bias)
    return TraceWriter.create(out, header, bias)
