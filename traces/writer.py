"""Write a trace store; a killed writer loses no committed request.

Layout: one array per name of `traces/schema.py`, token axis first, plus `request_offsets`, `prompt_lengths` and
`router_bias`; sharded files, each inner chunk blosc-zstd and then crc32c (blosc alone lets flipped bits through).
Protocol: rows go to `X.zarr.partial`. A commit extends the arrays, writes whole shards, and finally replaces the
group's zarr.json, whose `committed` tells readers what is there; finishing renames the folder. A finished store grows
in place by one commit. A store has one writer, which holds the lock of `traces/lock.py` until it is closed.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from moereplay.traces.documents import json_text
from moereplay.traces.files import clear_abandoned, leaving_no_folders, refuse_inside_trace, scratch_beside
from moereplay.traces.lock import Lock
from moereplay.traces.pieces import Piece, check_piece, checked_bias, same_bias
from moereplay.traces.schema import LOOKAHEAD, Header, Provenance, Request, Trace, TraceError, check_request
from moereplay.traces.store import blocks, open_trace
from moereplay.traces.stored import (
    BIAS,
    OFFSETS,
    PARTIAL,
    PROMPTS,
    SHARD_TOKENS,
    Attributes,
    Column,
    committed_rows,
    create_column,
    metadata_digest,
    partial_of,
    read_attributes,
    reopen_column,
    with_longer_files,
)

REMOVALS, SECONDS_BETWEEN_REMOVALS = 40, 0.05
TEMPORARY = f"zarr.json{PARTIAL}"
ELSEWHERE = "choose another path"


class TraceWriter:
    """Append requests to `X.zarr.partial`; `finish` renames it to `X.zarr`. Use it as a context manager.

    Leaving the block on an exception keeps the committed requests for `resume`, or removes a store without any.
    """

    def __init__(self, path: Path, attributes: Attributes, router_bias: np.ndarray | None, lock: Lock) -> None:
        """Use `create`, `resume` or `reopen` instead."""
        self.path = path
        self._lock = lock
        self.partial = partial_of(path)
        self._attributes = attributes
        self._bias = router_bias
        self._columns: dict[str, Column] = {}
        self._appended = attributes.committed
        self._begun = 0  #: rows of the incomplete last request
        self._finished = False
        self.grows_in_place = False
        self.resumable = True

    @classmethod
    def create(
        cls,
        path: str | Path,
        header: Header,
        router_bias: np.ndarray | None = None,
        shard_tokens: int = SHARD_TOKENS,
        resumable: bool = True,
    ) -> TraceWriter:
        """Start a store with `shard_tokens` (a multiple of 8) per file. Raises TraceError if it exists, even partially.

        With `resumable=False` an unfinished store is removed, for commands that cannot resume.
        """
        path = Path(path)
        _refuse_existing(path)
        with _locked(path) as lock:
            if partial_of(path).exists():
                fix = "rerun with --resume, or remove it" if resumable else f"remove it, or {ELSEWHERE}"
                raise TraceError(f"{partial_of(path)} exists, an unfinished recording; {fix}")
            attributes = Attributes(header=_settled(header), shard_tokens=shard_tokens)
            return cls._start(path, attributes, router_bias, lock, resumable)

    @classmethod
    def resume(cls, path: str | Path, header: Header, router_bias: np.ndarray | None = None) -> TraceWriter:
        """Continue `X.zarr.partial` after its committed requests.

        Raises TraceError if it is damaged, another run's, or being written by another process.
        """
        path = Path(path)
        _refuse_existing(path)
        if not partial_of(path).exists():
            raise TraceError(f"{partial_of(path)} does not exist, cannot resume; start without --resume")
        with _locked(path) as lock:
            return cls._continued(path, _settled(header), router_bias, lock)

    @classmethod
    def reopen(cls, path: str | Path, header: Header, digest: str) -> TraceWriter:
        """Continue a finished store in place; `finish` makes all appended requests visible in one step.

        `header` then replaces the stored one. Before that, and after a kill, readers see the old trace, because
        they ignore uncommitted rows. Raises TraceError if it is damaged, has another digest or is being written.
        """
        path = Path(path)
        with _locked(path) as lock:
            stored = read_attributes(path)
            if stored.digest != digest:
                raise TraceError(f"{path} was changed by another process; run the command again")
            trace = open_trace(path)
            writer = cls(path, stored, trace.router_bias, lock)
            writer.partial, writer.grows_in_place = path, True
            writer._reopen_columns(trace, "restore the trace from a copy")
            writer._attributes = stored.model_copy(update={"header": _settled(header)})
        return writer

    @classmethod
    def _continued(cls, path: Path, header: Header, router_bias: np.ndarray | None, lock: Lock) -> TraceWriter:
        partial = partial_of(path)
        if {entry.name for entry in partial.iterdir()} <= {TEMPORARY}:
            return cls._start(path, Attributes(header=header, shard_tokens=SHARD_TOKENS), router_bias, lock)
        stored = read_attributes(partial)
        if not stored.committed.requests:
            _remove(partial)
            return cls._start(path, Attributes(header=header, shard_tokens=stored.shard_tokens), router_bias, lock)
        writer = cls(path, stored, checked_bias(router_bias, header), lock)
        writer._restore(open_trace(partial), header)
        return writer

    @classmethod
    def _start(
        cls, path: Path, attributes: Attributes, router_bias: np.ndarray | None, lock: Lock, resumable: bool = True
    ) -> TraceWriter:
        writer = cls(path, attributes, checked_bias(router_bias, attributes.header), lock)
        if not resumable:
            clear_abandoned(path.parent)
            writer.partial, writer.resumable = scratch_beside(path), False
        try:
            with writer._disk_errors():
                writer.partial.mkdir(parents=True, exist_ok=True)
                writer._write_attributes(attributes)
        except TraceError:
            _remove(writer.partial)
            raise
        return writer

    @property
    def requests_done(self) -> int:
        """Number of committed requests, after which a killed writer resumes."""
        return self._attributes.committed.requests

    def append(self, request: Request) -> None:
        """Add a request; commit once a shard of rows is buffered. Raises TraceError for an invalid request."""
        self._check_open()
        arrays = check_request(request, self._attributes.header, self._appended.requests)
        lengths = np.array([len(request.chosen)], np.int64)
        self._extend(Piece(arrays, lengths, np.array([request.prompt_length], np.int64)))

    def append_piece(self, piece: Piece) -> None:
        """Add rows of many requests, or of a part of one, which is committed after its last row.

        Raises TraceError for invalid rows, and then adds none.
        """
        self._check_open()
        arrays = check_piece(piece, self._attributes.header, self._appended.requests, self._begun)
        self._extend(piece._replace(arrays=arrays))

    def _check_open(self) -> None:
        if self._finished:
            raise TraceError(f"{self.path} is finished; write request {self._appended.requests} to a new store")

    def _extend(self, piece: Piece) -> None:
        self._check_names(piece.arrays, self._appended.requests)
        if not self._columns:
            self._create_columns(piece.arrays)
        for name, rows in piece.arrays.items():
            self._columns[name].extend(rows)
        self._begun += piece.tokens
        if len(piece.lengths):
            ends = self._appended.tokens + np.cumsum(piece.lengths, dtype=np.int64)
            self._columns[OFFSETS].extend(ends)
            self._columns[PROMPTS].extend(piece.prompts)
            self._appended = self._appended.with_requests(len(ends), int(ends[-1]), piece.rejected)
            self._begun = 0
        if self._columns["chosen"].waiting >= self._attributes.shard_tokens:
            self._write_rows()

    def _write_rows(self) -> None:
        """Write buffered rows; commit them unless a request is incomplete or the store grows in place."""
        if not (self._begun or self.grows_in_place):
            self.commit()
            return
        with self._disk_errors():
            for column in self._columns.values():
                column.write()

    def commit(self) -> None:
        """Make every appended request survive a kill. Raises TraceError if a write fails; may be retried."""
        if self._begun:
            raise TraceError(f"{self.path}: request {self._appended.requests} is incomplete; append its other rows")
        if self._appended == self._attributes.committed:
            return
        with self._disk_errors():
            for column in self._columns.values():
                column.write()
            digests = {name: column.hasher.hexdigest() for name, column in self._columns.items()}
            grown = self._attributes.model_copy(update={"committed": self._appended, "arrays": digests})
            self._write_attributes(grown)
        self._attributes = grown

    def finish(self) -> Trace:
        """Commit, rename to the final path and open it. Raises TraceError if nothing was appended."""
        if not self._appended.requests:
            raise TraceError(f"{self.path}: no request was appended; a trace needs at least one")
        self.commit()
        if not self.grows_in_place:
            with self._disk_errors():
                self.partial.rename(self.path)
        self._finished = True
        self._lock.release()
        return open_trace(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self.grows_in_place:
                self._cut_back()
            elif kind is None and not self._finished:
                self.commit()
            if not (self.requests_done and self.resumable):
                _remove(self.partial)
        finally:
            self._lock.release()

    def discard(self) -> None:
        """Remove an unfinished store, or the rows appended to a finished one."""
        self._cut_back() if self.grows_in_place else _remove(self.partial)

    def _cut_back(self) -> None:
        """Remove uncommitted rows; if that fails they stay, and readers ignore them."""
        if not self._finished:
            with suppress(OSError, TraceError):
                stored = read_attributes(self.path)  # an interrupt may have come just after the last commit
                for name, column in self._columns.items():
                    column.cut(committed_rows(name, stored))

    def _check_names(self, arrays: Mapping[str, np.ndarray], index: int) -> None:
        depth = sum(name.startswith(LOOKAHEAD) for name in arrays)
        if depth != self._attributes.header.lookahead_depth:
            expected = self._attributes.header.lookahead_depth
            raise TraceError(
                f"request {index}: {depth} lookahead arrays: expected {expected}, the lookahead_depth of the header"
            )
        first = self._columns.keys() - {OFFSETS, PROMPTS, BIAS}
        if first and first != arrays.keys():
            differing = ", ".join(sorted(first ^ arrays.keys()))
            raise TraceError(f"request {index}: {differing} must be given for every request or for none")

    def _create_columns(self, arrays: Mapping[str, np.ndarray]) -> None:
        widest = max(rows[:1].nbytes for rows in arrays.values())
        self._attributes = with_longer_files(self._attributes, len(arrays["chosen"]), widest)
        names = [*arrays, OFFSETS, PROMPTS, *([] if self._bias is None else [BIAS])]
        with self._disk_errors():
            self._columns = {name: create_column(self.partial, name, self._attributes) for name in names}
        self._columns[OFFSETS].extend(np.zeros(1, np.int64))
        if self._bias is not None:
            self._columns[BIAS].extend(self._bias)

    def _restore(self, trace: Trace, header: Header) -> None:
        if found := _first_difference(trace.header.model_dump(mode="json"), header.model_dump(mode="json"), "header"):
            raise TraceError(
                f"{self.partial} was begun with another header: {found}; resume with the same, or remove it"
            )
        if not same_bias(trace.router_bias, self._bias):
            raise TraceError(f"{self.partial}: {BIAS} differs from the one given; resume with the same model")
        self._reopen_columns(trace, "remove it and rerun")

    def _reopen_columns(self, trace: Trace, fix: str) -> None:
        with self._disk_errors():
            for leftover in self.partial.rglob(f"*{PARTIAL}"):
                leftover.unlink()
            for name, digest in trace.array_digests.items():
                column = reopen_column(self.partial, name, blocks(trace, name))
                if column.hasher.hexdigest() != digest:
                    raise TraceError(f"{self.partial}: {name} does not match its recorded sha256; {fix}")
                self._columns[name] = column

    def _write_attributes(self, attributes: Attributes) -> None:
        document = attributes.model_dump(mode="json", exclude={"digest"})
        group = {"attributes": document, "zarr_format": 3, "node_type": "group"}
        document["digest"] = metadata_digest(self.partial, group)
        temporary = self.partial / TEMPORARY
        temporary.write_text(json_text(group, indent=2) + "\n")
        temporary.replace(self.partial / "zarr.json")

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as refused:
            fix = ELSEWHERE
            if self.grows_in_place:
                fix = "the trace is unchanged; free disk space and run the command again"
            elif not self.resumable:
                fix = f"nothing was written: free disk space, or {ELSEWHERE}"
            elif self.requests_done:
                fix = f"committed rows are kept in {self.partial.name}, rerun with --resume to continue"
            raise TraceError(_cannot_write(self.partial if self.resumable else self.path, refused, fix)) from refused


def _remove(folder: Path) -> None:
    """Remove a folder, repeatedly: after a failed write other threads of zarr may still be writing into it."""
    for _ in range(REMOVALS):
        if not folder.exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(SECONDS_BETWEEN_REMOVALS)


def write_trace(
    path: str | Path,
    header: Header,
    requests: Iterable[Request],
    router_bias: np.ndarray | None = None,
    resume: bool = False,
    resumable: bool = True,
) -> Trace:
    """Write all requests and open the result; with `resume`, requests that an unfinished store holds are skipped.

    Commands without `--resume` pass `resumable=False`: the trace appears completely or not at all. Raises TraceError if
    the path exists, a request is invalid or a write fails.
    """
    with (
        leaving_no_folders(Path(path).absolute().parent),
        begun(path, header, router_bias, resume, resumable) as writer,
    ):
        for request in itertools.islice(requests, writer.requests_done, None):
            writer.append(request)
        return writer.finish()


def begun(
    path: str | Path, header: Header, router_bias: np.ndarray | None, resume: bool, resumable: bool = True
) -> TraceWriter:
    """Return a writer of a new store, or with `resume` of the unfinished one if it exists. Raises TraceError."""
    if resume and partial_of(Path(path)).exists():
        return TraceWriter.resume(path, header, router_bias)
    return TraceWriter.create(path, header, router_bias, resumable=resumable)


def _settled(header: Header) -> Header:
    """Return the header with settled texts (`traces/texts.py`); `model_copy` does not validate them."""
    return header.model_copy(update={"provenance": Provenance.model_validate(header.provenance.model_dump())})


@contextmanager
def _locked(path: Path) -> Iterator[Lock]:
    """Hold the lock of a store; release it if the block fails. Raises TraceError if another process holds it."""
    try:
        refuse_inside_trace(path)
        lock = Lock(partial_of(path))
    except OSError as refused:
        raise TraceError(_cannot_write(partial_of(path), refused, ELSEWHERE)) from refused
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


def _cannot_write(partial: Path, refused: OSError, fix: str) -> str:
    return f"cannot write {partial}: {refused.strerror or refused}; {fix}"


def _refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise TraceError(f"{path} exists; choose another path or remove it")


def _first_difference(stored: object, given: object, name: str) -> str | None:
    if not isinstance(stored, dict) or not isinstance(given, dict):
        return None if stored == given else f"{name} is {stored!r} in the store, {given!r} now"
    for key in sorted(stored.keys() | given.keys()):
        found = _first_difference(stored.get(key), given.get(key), f"{name}.{key}")
        if found:
            return found
    return None
