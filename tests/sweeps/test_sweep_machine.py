"""A sweep in two folders beside a plain set of what each holds: run in parts, killed, damaged, mended and merged.

However the work was cut, the merged part is that of one undisturbed run, byte for byte; of a damaged part every reader
says the same line, and nothing is changed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from moereplay.results.errors import ResultError
from moereplay.results.parts import PROVENANCE, Part
from moereplay.results.stored import errors, load
from moereplay.sweeps.jobs import Batch, Job, compute
from moereplay.sweeps.parts import merge
from moereplay.sweeps.run import Sweep, left_to_do, planned
from moereplay.sweeps.store import Folder
from tests.kit.kills import killed_at
from tests.kit.search import walked
from tests.kit.sweeping import experiment

ABOUT = {"sweep_version": 1, "host": "here", "traces": {"a": "b"}}
FEW = """
traces = ["tiny.zarr"]
[grid]
capacity = ["20%", "40%"]
eviction = ["lru", "fifo"]
prefetch = ["none", "top_k"]
"""


@cache
def sweep() -> Sweep:
    """8 configurations and 2 bounds."""
    return planned(experiment(Path(mkdtemp()), FEW))


@cache
def part_of(jobs: tuple[Job, ...]) -> Part:
    return compute(Batch(0, jobs, "reference", True)).part


@cache
def undisturbed(identities: frozenset[str]) -> tuple[str, dict[str, bytes]]:
    """The merged part of one run: its name and its files."""
    folder = Path(mkdtemp())
    Folder(folder / "run").store(part_of(tuple(job for job in sweep().jobs if job.identity in identities)), ABOUT)
    where = Path(merge([Folder(folder / "run")], Folder(folder / "merged")).where)
    return where.name, _files(where)


class Dying(Folder):
    """A folder whose writer is killed at a step."""

    step = 0

    def store(self, part: Part, provenance: Mapping[str, Any]) -> None:
        killed_at(self.step, self.path, lambda: Folder(self.path).store(part, provenance))


def _flip(part: Path, file: str, at: int) -> None:
    data = bytearray((part / file).read_bytes())
    data[at % len(data)] ^= 1 << at % 8
    (part / file).write_bytes(data)


def _edit(part: Path, at: int, **changes: object) -> None:
    document = json.loads((part / PROVENANCE).read_text())
    (part / PROVENANCE).write_text(json.dumps(document | changes))


ROWS = "a bit of other rows"
ANY = "is damaged|invalid part|contains results of|is missing|has version|is not listed"
#: What happens to a part, of which a number is drawn, and what is said.
DAMAGES: dict[str, tuple[Callable[[Path, int], object], str]] = {
    "a bit of a table": (lambda part, at: _flip(part, "configurations.parquet", at), "configurations.parquet is damag"),
    ROWS: (lambda part, at: _flip(part, "layers.parquet", at), "layers.parquet is damaged; remove .* and replay"),
    "a bit of the provenance": (lambda part, at: _flip(part, PROVENANCE, at), ANY),
    "an edit": (lambda part, at: _edit(part, at, host="there"), f"{PROVENANCE} is damaged; remove .* and replay again"),
    "a newer version": (lambda part, at: _edit(part, at, sweep_version=2), "has version 2, newer than 1; upgrade"),
    "a table less": (lambda part, at: (part / "layers.parquet").unlink(), "layers.parquet is missing"),
    "a table more": (lambda part, at: (part / "x.parquet").touch(), "x.parquet is not listed in the part's provenance"),
    "another name": (lambda part, at: part.rename(part.with_name(f"part-{at:016x}")), "contains results of part-"),
}


class Sweeping(RuleBasedStateMachine):
    """`holds` says which jobs each folder holds, by the names of its parts."""

    @initialize()
    def two_empty_folders(self) -> None:
        self.folder = Path(mkdtemp())
        self.holds: dict[str, dict[str, frozenset[str]]] = {"a": {}, "b": {}}
        self.is_merged = False

    def done(self, *places: str) -> frozenset[str]:
        return frozenset(job for place in places for jobs in self.holds[place].values() for job in jobs)

    @rule(place=st.sampled_from("ab"), count=st.integers(1, 6), last=st.booleans(), step=st.none() | st.integers(0, 12))
    def run_some(self, place: str, count: int, last: bool, step: int | None) -> None:
        """Every remaining part is complete, and the scratch of its writer is removed."""
        folder = Folder(self.folder / place)
        folder.prepare()
        assert not (folder.path / "tmp").exists() or not list((folder.path / "tmp").iterdir())
        left = left_to_do(sweep(), folder, sweep().jobs)
        assert left == [job for job in sweep().jobs if job.identity not in self.done(place)]
        jobs = tuple(left[-count:] if last else left[:count])
        if not jobs:
            return
        part = part_of(jobs)
        if step is None:
            folder.store(part, ABOUT)
            folder.store(part, ABOUT)  # another writer of the same work leaves it
        dies = step is not None and killed_at(step, self.folder, lambda: folder.store(part, ABOUT))
        if part.name in folder.names():
            self.holds[place][part.name] = frozenset(job.identity for job in jobs)
        assert folder.names() == sorted(self.holds[place])
        assert dies or part.name in self.holds[place]

    @rule(places=st.permutations("abb"), step=st.none() | st.integers(0, 12))
    def merge_them(self, places: list[str], step: int | None) -> None:
        """In any order, however often one is named. Killed, it leaves nothing or all."""
        given = [place for place in places if self.holds[place]]
        if not given:
            return
        out = Dying(self.folder / "out") if step is not None else Folder(self.folder / "out")
        Dying.step = step or 0
        made = merge([Folder(self.folder / place) for place in given], out)
        expected, files = undisturbed(self.done(*given))
        assert Path(made.where).name == expected
        assert out.names() in ([expected], [] if step is not None else [expected])
        assert not out.names() or self.is_merged or _files(Path(made.where)) == files
        if out.names() and step is not None:  # who goes on, goes on with it
            shutil.rmtree(self.folder / given[0])
            (self.folder / "out").rename(self.folder / given[0])
            self.is_merged = True  #: the provenance says so from now on
            self.holds[given[0]] = {expected: self.done(*given)}
        shutil.rmtree(self.folder / "out", ignore_errors=True)

    @precondition(lambda self: self.done("a", "b"))
    @rule(data=st.data(), at=st.integers(0, 1 << 16), remove=st.booleans())
    def damage_a_part(self, data: st.DataObject, at: int, remove: bool) -> None:
        """Every reader says what is wrong with it, in one line, until it is restored or removed and replayed again."""
        there = [(place, name) for place in "ab" for name in sorted(self.holds[place])]
        place, name = data.draw(st.sampled_from(there))
        part, whole = self.folder / place / name, self.folder / "whole"
        if not (part / "layers.parquet").exists():  # a part of bounds
            return
        for how, (change, said) in DAMAGES.items():
            shutil.copytree(part, whole)
            change(part, at)
            before = _files(self.folder)
            for read in self.readers(place)[: 2 if how == ROWS else 4]:  # the others do not read all tables
                with pytest.raises(ResultError, match=said) as refused:
                    read()
                assert "\n" not in str(refused.value)
            assert _files(self.folder) == before
            shutil.rmtree(part if part.exists() else part.with_name(f"part-{at:016x}"))
            whole.rename(part)
        if remove:
            shutil.rmtree(part)
            del self.holds[place][name]

    def readers(self, place: str) -> list[Callable[[], object]]:
        folder = self.folder / place
        return [
            lambda: merge([Folder(folder)], Folder(self.folder / "refused")),
            lambda: left_to_do(sweep(), Folder(folder), sweep().jobs),
            lambda: load(folder),
            lambda: errors(folder),
        ]

    def teardown(self) -> None:
        """Shards that are completed are the whole sweep."""
        for place in "ab":
            self.run_some(place, len(sweep().jobs), False, None)
        self.merge_them(["a", "b", "b"], None)
        assert self.done("a") == {job.identity for job in sweep().jobs}
        shutil.rmtree(self.folder)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


Sweeping.TestCase.settings = walked(36, 8)
test_a_sweep_however_it_is_cut_is_one_undisturbed_run = Sweeping.TestCase
