"""A library beside a plain table of its names: published, killed, damaged, mended, removed and fetched in any order.

Every name gives the trace that was published under it, or one line that says what is wrong, and no fetch leaves half.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moereplay.traces.combine import content_digest
from moereplay.traces.files import clear_abandoned
from moereplay.traces.library import CARD, INDEX, fetch, library_of, publish
from moereplay.traces.schema import Trace, TraceError
from moereplay.traces.store import open_trace, verify
from moereplay.traces.writer import write_trace
from tests.kit.kills import killed_at
from tests.kit.search import walked
from tests.kit.stored import PLAIN, ids_only

NAMES = ("x", "y")


@cache
def traces() -> list[Trace]:
    """Two of one model."""
    return [write_trace(Path(mkdtemp()) / "a.zarr", PLAIN, [ids_only(9, seed)]) for seed in range(2)]


def _flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at % len(data)] ^= 1 << at % 8
    file.write_bytes(data)


#: What happens to a file of a published trace, of which a number is drawn, and what `fetch` says.
DAMAGES: dict[str, tuple[Callable[[Path, int], object], str]] = {
    "a bit": (_flip, "bytes that differ from the published .* download it again"),
    "its end": (lambda file, at: file.write_bytes(file.read_bytes()[:-1]), "bytes that differ from the published"),
    "no file": (lambda file, at: file.unlink(), "is in the index but missing; download the library again"),
    "no trace": (lambda file, at: shutil.rmtree(file.parents[1] / file.parent.name), "is in the index but missing"),
}


class Publishing(RuleBasedStateMachine):
    """`made` says which trace each name's folder holds, `listed` the licence under which it is in the index."""

    @initialize()
    def no_library(self) -> None:
        self.folder = Path(mkdtemp())
        self.library, self.got = self.folder / "lib", self.folder / "got.zarr"
        self.made: dict[str, int] = {}
        self.listed: dict[str, str] = {}

    @rule(
        name=st.sampled_from(NAMES),
        which=st.integers(0, 1),
        licence=st.sampled_from(("MIT", "MIT", "CC-BY-4.0")),
        step=st.none() | st.integers(0, 8) | st.integers(9, 60),
    )
    def publish(self, name: str, which: int, licence: str, step: int | None) -> None:
        """Another under a name is refused. The same completes what was killed, and does not change what is complete."""
        before, work = _files(self.folder), partial(publish, traces()[which], self.library, name, licence)
        clear_abandoned.cache_clear()
        if self.made.get(name, which) != which or self.listed.get(name, licence) != licence:
            with pytest.raises(TraceError, match="choose another --name"):
                work()
            assert _files(self.folder) == before
        elif step is not None and killed_at(step, self.folder, work):
            self.made |= {name: which} if (self.library / f"{name}.zarr").exists() else {}
            self.listed |= {name: licence} if f'"name": "{name}"' in self.index() else {}
        else:
            work()
            self.made[name], self.listed[name] = which, licence
            after = _files(self.folder)
            work()
            assert _files(self.folder) == after
            assert all(f"| {listed} |" in (self.library / CARD).read_text() for listed in self.listed)

    def index(self) -> str:
        return (self.library / INDEX).read_text() if (self.library / INDEX).exists() else ""

    @invariant()
    def the_index_is_whole(self) -> None:
        """Without one, a library is the traces that lie there."""
        if self.library.exists():
            found = {entry.name: entry.licence for entry in library_of(str(self.library)).index().traces}
            assert found == (self.listed if self.index() else dict.fromkeys(self.made, ""))

    @rule(name=st.sampled_from(NAMES), step=st.none() | st.integers(0, 40))
    def fetch(self, name: str, step: int | None) -> None:
        if self.made and name in (self.listed if self.index() else self.made):
            clear_abandoned.cache_clear()
            if step is not None:
                killed_at(step, self.folder, self.fetched(name))
            if not self.got.exists():
                self.fetched(name)()
            verify(open_trace(self.got))
            assert content_digest(open_trace(self.got)) == content_digest(traces()[self.made[name]])
            shutil.rmtree(self.got)
        elif self.library.exists():
            with pytest.raises(TraceError, match=f"has no trace '{name}'|has no traces"):
                self.fetched(name)()

    def fetched(self, name: str) -> Callable[[], Trace]:
        return lambda: fetch(library_of(str(self.library)), name, self.got)

    @precondition(lambda self: self.listed)
    @rule(data=st.data(), at=st.integers(0, 1 << 16))
    def damage(self, data: st.DataObject, at: int) -> None:
        """Nothing is left of what cannot be fetched. The index may say the same as before."""
        name = data.draw(st.sampled_from(sorted(self.listed)))
        folder, whole = self.library / f"{name}.zarr", self.folder / "whole"
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for change, said in DAMAGES.values():
            shutil.copytree(self.library, whole)
            change(files[at % len(files)], at)
            self.refused(name, said)
            shutil.rmtree(self.library)
            whole.rename(self.library)
        text = (self.library / INDEX).read_bytes()
        _flip(self.library / INDEX, at)
        if b"sha256" in text[max(0, at % len(text) - 40) : at % len(text)]:
            self.refused(name, ".")
        (self.library / INDEX).write_bytes(text)

    def refused(self, name: str, said: str) -> None:
        before = _files(self.folder)
        with pytest.raises(TraceError, match=said) as refused:
            self.fetched(name)()
        assert "\n" not in str(refused.value)
        assert _files(self.folder) == before

    def teardown(self) -> None:
        """Whatever was begun can be completed."""
        for name in NAMES:
            self.publish(name, self.made.get(name, 0), self.listed.get(name, "MIT"), None)
            self.fetch(name, None)
        assert sorted(path.name for path in self.library.iterdir()) == [CARD, INDEX, "x.zarr", "y.zarr"]
        shutil.rmtree(self.folder)


def _files(folder: Path) -> dict[str, bytes]:
    """But for what killed processes left, which the next one removes."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if ".tmp" not in name and ".lock" not in name}


Publishing.TestCase.settings = walked(36, 8)
test_a_name_gives_what_was_published_or_one_line = Publishing.TestCase


@pytest.mark.slow
def test_a_publication_that_is_killed_at_any_step_is_completed_by_the_same_call() -> None:
    """While rows are written, before the index, before the card; beside a trace that is there."""
    publishing, step, steps = Publishing(), 0, 0
    publishing.no_library()
    publishing.publish("x", 0, "MIT", None)
    while "y" not in publishing.listed or step < 9:
        before = dict(publishing.made)
        publishing.publish("y", 1, "MIT", step)
        publishing.the_index_is_whole()
        step, steps = step + 1 if publishing.made == before else 0, steps + 1
    publishing.teardown()
    assert steps > 40
