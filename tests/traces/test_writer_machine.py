"""A store beside a plain list of its requests: written, committed, killed, resumed, finished and grown in any order.

Whatever happened, readers see exactly the requests that were committed, and in the end the digest is that of a store
that was written in one go.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moereplay.traces.pieces import Piece
from moereplay.traces.schema import Request, TraceError
from moereplay.traces.store import open_trace, verify
from moereplay.traces.stored import partial_of
from moereplay.traces.writer import TraceWriter
from tests.kit.every import every
from tests.kit.kills import killed_at
from tests.kit.search import walked
from tests.kit.stored import BIAS, PLAIN, assert_holds, ids_only

SHARD = 16
#: What may end a session of a writer, or a step of it.
ENDS: dict[str, Callable[[TraceWriter], object]] = {
    "commit": TraceWriter.commit,
    "finish": TraceWriter.finish,
    "leave": lambda writer: writer.__exit__(None, None, None),
    "fail": lambda writer: writer.__exit__(KeyError, KeyError(), None),
}


class Writing(RuleBasedStateMachine):
    """`committed` is what readers must see; `appended` also has what the open writer holds."""

    @initialize(is_finished=st.sampled_from((False, False, True)))
    def begin(self, is_finished: bool) -> None:
        """In an empty folder, or beside a store that may grow in place."""
        self.folder, self.drawn = Path(mkdtemp()), 0
        self.path, self.about = self.folder / "a.zarr", (PLAIN, BIAS)
        self.open_writer: TraceWriter | None = None
        self.committed: list[Request] = []
        self.appended: list[Request] = []
        self.waiting = 0  #: rows that are in memory only
        if is_finished:
            self.append_and_end([3], 0, "finish", None)

    def writer(self) -> TraceWriter:
        """The open one, or one that goes on from what there is."""
        if self.open_writer is None:
            if self.path.exists():
                self.open_writer = TraceWriter.reopen(self.path, self.about[0], open_trace(self.path).digest)
            elif partial_of(self.path).exists():
                self.open_writer = TraceWriter.resume(self.path, *self.about)
            else:
                self.open_writer = TraceWriter.create(self.path, *self.about, shard_tokens=SHARD)
            assert self.open_writer.requests_done == len(self.committed)
            self.appended, self.waiting = [*self.committed], 0
        return self.open_writer

    @rule(
        lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
        cut=st.integers(0, 20),
        how=st.sampled_from(sorted(ENDS)),
        step=st.none() | st.integers(0, 24),
    )
    def append_and_end(self, lengths: list[int], cut: int, how: str, step: int | None) -> None:
        self.append(lengths, cut)
        self.end(how, step)

    def append(self, lengths: list[int], cut: int) -> None:
        """Requests, each in two pieces if the cut is inside. Readers see nothing of what is written between them."""
        for tokens in lengths:
            writer, self.drawn = self.writer(), self.drawn + 1
            request = replace(ids_only(tokens, self.drawn), nll=np.full(tokens, self.drawn, np.float32))
            if 0 < cut < tokens:
                writer.append_piece(_piece(request, 0, cut))
                self.waiting = (self.waiting + cut) * (self.waiting + cut < SHARD)
                self.readers_see_what_is_committed()
            writer.append_piece(_piece(request, cut % tokens, tokens)) if cut < tokens else writer.append(request)
            self.appended.append(request)
            self.waiting += tokens - cut * (cut < tokens)
            if self.waiting >= SHARD:
                self.waiting, self.committed = 0, self.committed if writer.grows_in_place else [*self.appended]

    def end(self, how: str, step: int | None) -> None:
        """By itself, or killed before so many changes to files: then as if it had, or had not, been called at all."""
        writer = self.writer()
        commits = how in ("commit", "finish") or (how == "leave" and not writer.grows_in_place)
        expected = self.appended if commits else self.committed
        if step is not None:
            killed = killed_at(step, self.folder, lambda: self.appended and ENDS[how](writer))
            assert killed or self.visible() == len(expected)
            assert self.visible() in (len(self.committed), len(expected))
            self.committed = self.appended[: self.visible()]
            self.forget()
        elif how == "finish" and not self.appended:
            with pytest.raises(TraceError, match="no request was appended"):
                writer.finish()
        else:
            ENDS[how](writer)
            self.committed, self.waiting = [*expected], 0
            self.open_writer = writer if how == "commit" else None
            assert self.committed or self.open_writer or not list(self.folder.iterdir())

    def forget(self) -> None:
        """As the system does with a process that was killed: the lock goes, its file stays."""
        if held := self.writer()._lock._release.detach():
            os.close(held[2][0])
        self.open_writer = None

    def visible(self) -> int:
        """Requests that readers see."""
        try:
            return open_trace(self.readable()).requests
        except TraceError:
            return 0

    def readable(self) -> Path:
        """Where readers look."""
        return self.path if self.path.exists() else partial_of(self.path)

    @invariant()
    def readers_see_what_is_committed(self) -> None:
        if not self.committed:
            with pytest.raises(TraceError):
                open_trace(self.readable())
            return
        trace = open_trace(self.readable())
        verify(trace)
        assert_holds(trace, self.committed)
        assert trace.complete == self.path.exists()

    def teardown(self) -> None:
        """In the end the digest and the files' names are those of a store that was written in one go."""
        if self.writer() and self.appended:
            self.end("finish", None)
            with TraceWriter.create(self.folder / "b.zarr", *self.about, shard_tokens=SHARD) as whole:
                for request in self.committed:
                    whole.append(request)
                assert open_trace(self.path).digest == whole.finish().digest
            assert _names(self.path) == _names(self.folder / "b.zarr")
            assert sorted(path.name for path in self.folder.iterdir()) == ["a.zarr", "b.zarr"]
        self.open_writer = None
        shutil.rmtree(self.folder)


def _piece(request: Request, first: int, last: int) -> Piece:
    ends = [last] if last == len(request.chosen) else []
    rows = {name: array[first:last] for name, array in request.arrays().items()}
    return Piece(rows, np.array(ends, np.int64), np.array([request.prompt_length] * len(ends), np.int64))


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


Writing.TestCase.settings = walked(36, 8)
test_a_store_holds_what_was_committed = Writing.TestCase


@pytest.mark.slow
@every("is_finished", (False, True))
def test_a_kill_at_any_step_of_a_commit_leaves_all_or_nothing(is_finished: bool) -> None:
    writing, step = Writing(), 0
    writing.begin(is_finished)
    while not writing.committed[is_finished:]:
        writing.append_and_end([7], 0, "finish", step)
        writing.readers_see_what_is_committed()
        step += 1
    writing.teardown()
    assert step > 20
