"""Decisions written down before the run: what a replay decided, in its order, whenever the machine is ready for it.

Where nothing is prefetched, the order in which things end does not change what is decided, so that nothing need be
decided in the run itself. Whether that was so is found out afterwards: the engine is asked again, with what ended in
the order in which it did, and must decide the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from simulator.decisions import NO_COPY, Begun, Decisions
from simulator.errors import ConfigError
from simulator.interface import FinishedRun
from simulator.reference.machine import Machine
from simulator.reference.placement import Unobserved
from simulator.steps import run

OF_LINK = ("evict", "transfer")  #: what the link does; compute does the rest


class TimingMattersError(ConfigError):
    """The engine would have decided otherwise, because of what ended when."""


class Entry(NamedTuple):
    """What begins together on one resource, once the other one has ended so many."""

    begun: tuple[Begun, ...]
    after: int


class Ended(NamedTuple):
    """Something that has ended in a run."""

    y: int | None  #: copy that has landed; None of compute
    now: int
    elapsed: int


class Kept(NamedTuple):
    """A decision, and after how many computations it was made; None if a transfer has let it be made."""

    begun: Begun
    computed: int | None


class Recorder:
    """Decisions as they are made, kept in their order."""

    def __init__(self, decisions: Decisions) -> None:
        """Those of `decisions`."""
        self._decisions, self._computed = decisions, 0
        self.kept: list[Kept] = []

    @property
    def is_over(self) -> bool:
        """Whether the decider has nothing left to begin."""
        return self._decisions.is_over

    @property
    def is_called_up(self) -> bool:
        """Whether the decider waits for `resumed`."""
        return self._decisions.is_called_up

    def begin(self, now: int) -> Sequence[Begun]:
        """Record what begins first."""
        return self._keep(self._decisions.begin(now), 0)

    def computed(self, now: int, elapsed: int) -> Sequence[Begun]:
        """Record what begins when compute has ended something."""
        self._computed += 1
        return self._keep(self._decisions.computed(now, elapsed), self._computed)

    def landed(self, y: int, now: int, elapsed: int) -> Sequence[Begun]:
        """Record what begins when copy y has landed."""
        return self._keep(self._decisions.landed(y, now, elapsed), None)

    def resumed(self, now: int) -> Sequence[Begun]:
        """Record what begins when the decider is resumed."""
        return self._keep(self._decisions.resumed(now), None)

    def abandoned(self, y: int, elapsed: int) -> None:
        """Pass on that a transfer was given up; nothing begins."""
        self._decisions.abandoned(y, elapsed)

    def note_end(self, line: int, now: int) -> None:
        """Pass on when a line of the log ended, in nanoseconds."""
        self._decisions.note_end(line, now)

    def close(self) -> FinishedRun:
        """The counters of the decider."""
        return self._decisions.close()

    def _keep(self, begun: Sequence[Begun], computed: int | None) -> Sequence[Begun]:
        self.kept += [Kept(each, computed) for each in begun]
        return begun


class Script:
    """`Decisions` that are known: a list for compute and one for the link."""

    def __init__(self, kept: Sequence[Kept], engine: Callable[[], Decisions]) -> None:
        """`kept` by a `Recorder`; `engine` makes who is asked afterwards."""
        self.kept = kept
        self._compute, self._link = entries(kept)
        self._engine = engine
        self._computed = self._landed = self._began = 0
        self._computing = self._moving = False
        self._ended: list[Ended] = []
        self._ends: dict[int, int] = {}  # by line of the recorded log
        self._abandoned: list[tuple[int, int]] = []

    is_called_up = False  #: compute goes on in the step in which its expert has landed

    @property
    def is_over(self) -> bool:
        """Whether compute has nothing left to do."""
        return self._computed == len(self._compute)

    def begin(self, now: int) -> Sequence[Begun]:
        """What begins first."""
        self._began = now
        return self._due()

    def computed(self, now: int, elapsed: int) -> Sequence[Begun]:
        """What compute and link begin next, where it is due."""
        self._ended.append(Ended(None, now, elapsed))
        self._computed, self._computing = self._computed + 1, False
        return self._due()

    def landed(self, y: int, now: int, elapsed: int) -> Sequence[Begun]:
        """What compute and link begin next, where it is due."""
        self._ended.append(Ended(y, now, elapsed))
        self._landed, self._moving = self._landed + 1, False
        return self._due()

    def resumed(self, now: int) -> Sequence[Begun]:
        """Raises AssertionError: it is never called up."""
        raise AssertionError("a script calls nobody up")

    def abandoned(self, y: int, elapsed: int) -> None:
        """To be passed to the engine when it is asked again."""
        self._abandoned.append((y, elapsed))

    def note_end(self, line: int, now: int) -> None:
        """The same of a line of the log that has ended."""
        self._ends[line] = now

    def close(self) -> FinishedRun:
        """What the engine has counted when it is asked again. Raises TimingMattersError if it decides otherwise."""
        engine = self._engine()
        asked = _Asked(engine, self._compute, self._link, self._ends)
        asked.compare(engine.begin(self._began))
        for ended in self._ended:
            asked.take(ended)
        if not engine.is_over:
            raise TimingMattersError("the engine has more to do than its replay; use --decisions compiled")
        for y, elapsed in self._abandoned:
            engine.abandoned(y, elapsed)
        return engine.close()

    def _due(self) -> list[Begun]:
        """What can begin now, on the link first."""
        begun: list[Begun] = []
        moved = self._landed
        if not self._moving and moved < len(self._link) and self._link[moved].after <= self._computed:
            self._moving = True
            begun += self._link[moved].begun
        done = self._computed
        if not self._computing and done < len(self._compute) and self._compute[done].after <= self._landed:
            self._computing = True
            begun += self._compute[done].begun
        return begun


class _Asked:
    """The engine, asked again: what it begins must be what began, on each resource in the same order."""

    def __init__(
        self, engine: Decisions, compute: Sequence[Entry], link: Sequence[Entry], ends: dict[int, int]
    ) -> None:
        self._engine, self._ends = engine, ends
        self._due = {True: [each for entry in link for each in entry.begun]}
        self._due[False] = [each for entry in compute for each in entry.begun]
        self._at = {True: 0, False: 0}

    def take(self, ended: Ended) -> None:
        """Something has ended."""
        if ended.y is None:
            self.compare(self._engine.computed(ended.now, ended.elapsed))
            return
        self.compare(self._engine.landed(ended.y, ended.now, ended.elapsed))
        if self._engine.is_called_up:
            self.compare(self._engine.resumed(ended.now))

    def compare(self, begun: Sequence[Begun]) -> None:
        """Raises TimingMattersError."""
        for each in begun:
            of_link = each.kind in OF_LINK
            at = self._at[of_link]
            due = self._due[of_link][at] if at < len(self._due[of_link]) else None
            if due is None or due._replace(line=each.line) != each:
                raise TimingMattersError(
                    f"layer {each.layer}: with what ended when, the engine begins another {each.kind} than its replay; "
                    "let it decide in the run: --decisions compiled"
                )
            self._at[of_link] = at + 1
            if due.line in self._ends:
                self._engine.note_end(each.line, self._ends[due.line])


def entries(kept: Sequence[Kept]) -> tuple[list[Entry], list[Entry]]:
    """What compute does and what the link does, each with how many of the other must have ended before."""
    maker = _Maker()
    for each in kept:
        maker.add(*each)
    return maker.compute, maker.link


class _Maker:
    """Reads decisions in their order."""

    def __init__(self) -> None:
        self.compute: list[Entry] = []
        self.link: list[Entry] = []
        self._before: list[Begun] = []  # evictions or a reset that come with what begins next
        self._gate = 0  # how many computations have ended when the gate in progress opens
        self._ran: dict[int, int] = {}  # copy -> how many have ended when it has been computed last
        self._came: dict[int, int] = {}  # copy -> how many have landed when it has
        self._streaming = NO_COPY  # in the bypass buffer
        self._streamed = 0  # how many computations have ended when that was free last

    def add(self, begun: Begun, computed: int | None) -> None:
        """The next one, with what it was made after (`Kept`)."""
        if begun.kind in ("evict", "reset"):
            self._before.append(begun)
        elif begun.kind == "transfer":
            self._transfer(begun, computed)
        else:
            self._computation(begun)

    def _transfer(self, begun: Begun, computed: int | None) -> None:
        """After its gate, and after what it evicts was computed; or after the computation that let it begin."""
        after = max([self._gate, self._streamed, *(self._ran.get(each.y, 0) for each in self._before)])
        self.link.append(Entry((*self._before, begun), after if computed is None else computed))
        self._before = []
        self._came[begun.y] = len(self.link)
        if begun.cause == "streamed":
            self._streaming = begun.y

    def _computation(self, begun: Begun) -> None:
        """An expert after it has landed."""
        after = self._came.get(begun.y, 0) if begun.kind == "expert" else 0
        self.compute.append(Entry((*self._before, begun), after))
        self._before = []
        if begun.kind == "dense":
            self._gate = len(self.compute)
        else:
            self._ran[begun.y] = len(self.compute)
        if begun.y == self._streaming != NO_COPY:
            self._streaming, self._streamed = NO_COPY, len(self.compute)


def script_of(engine: Callable[[], Decisions], machine: Machine, warm: Sequence[int]) -> Script:
    """What `engine` decides on this machine, a simulated one, as a script; copies `warm` are there before.

    The machine has one link, which issues one transfer at a time. Raises ValueError where something is prefetched.
    """
    recorder = Recorder(engine())
    run(recorder, machine, Unobserved(), warm)
    if any(each.begun.cause == "prefetch" for each in recorder.kept):
        raise ValueError("what is prefetched depends on timing: a script is for runs without prefetch")
    return Script(recorder.kept, engine)
