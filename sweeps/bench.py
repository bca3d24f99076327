"""The benchmark of expert caches: a suite of traces, capacities, contracts and machines, and a row for each entry.

An entry is an eviction, a prefetch and a miss policy that leave unchanged what the model computes. Its row has its
score, the counts that the score is made of, and the digests of all that they depend on. The same suite, policies and
code give the same bytes. A row in a file ends with a digest of itself, which notices an edit; that the figures are true
is only known by a run (`verified`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

from pydantic import Field, ValidationError, field_validator

from moereplay.policies.contract import PolicyError
from moereplay.policies.files import source
from moereplay.policies.grammar import Chosen
from moereplay.results.result import METRICS, Result, request_times
from moereplay.simulator.config import SEMANTICS_VERSION, ReplayConfig, configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.jit.machine_code import digest_of_sources
from moereplay.simulator.platforms import platform
from moereplay.simulator.replay import plan
from moereplay.sweeps.grid import run_grid
from moereplay.traces.documents import (
    DocumentError,
    Frozen,
    Text,
    canonical_digest,
    content,
    first_fault,
    from_toml,
    json_lines,
    json_text,
)
from moereplay.traces.files import bundled, sha256_of
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace
from moereplay.traces.synthetic import Draw, drawn_like

SUITE = Path(__file__).with_name("bench.toml")
KINDS = ("eviction", "prefetch", "miss")
#: Totals that a row keeps for every cell and machine. A share of complete steps joins them by its counter's name.
COUNTED = ("misses",)
US = 1000  #: ns
DIGITS = 16  #: of digests


class Contract(Frozen):
    """How a step's experts are looked up, and which of them share a pool."""

    contract: str
    scope: str


class Suite(Frozen):
    """The replays of every entry: routing models, recordings and platforms by name, each with a digest."""

    version: int = Field(ge=1)
    capacities: tuple[str, ...] = Field(min_length=1)
    passes: str
    contracts: tuple[Contract, ...] = Field(min_length=1)
    draw: Draw
    drawn: dict[str, str]
    recorded: dict[str, str]
    machines: dict[str, str] = Field(min_length=1)

    @field_validator("drawn", "recorded", "machines")
    @classmethod
    def _digests(cls, found: dict[str, str]) -> dict[str, str]:
        for name, digest in found.items():
            if len(digest) != DIGITS or not set(digest) <= set("0123456789abcdef"):
                raise ValueError(f"{name}: expected a digest of {DIGITS} hexadecimal digits")
        return found

    @property
    def digest(self) -> str:
        """Digest of all that the suite states."""
        return canonical_digest(self.model_dump(mode="json"))[:DIGITS]

    def cells(self) -> Iterator[dict[str, str]]:
        """Yield the settings of each cell of a trace, in the order in which rows count."""
        for contract, capacity in product(self.contracts, self.capacities):
            yield {"capacity": capacity, "passes": self.passes, **contract.model_dump()}


class Entry(NamedTuple):
    """Policies that are entered together, as the command line spells them."""

    eviction: str
    prefetch: str = "none"
    miss: str = "fetch"

    def chosen(self) -> list[Chosen[Any]]:
        """Return the three policies. Raises PolicyError, also if they change what the model computes."""
        found = configure(**self._asdict()).policy_set()
        if found.open_loop:
            raise PolicyError(f"miss {self.miss} changes what the model computes; bench takes lossless policies only")
        return [getattr(found, kind) for kind in KINDS]

    def settled(self) -> Entry:
        """Return the entry in the spelling of rows, with the versions of user policies."""
        return Entry(*(each.text() for each in self.chosen()))

    def digest(self) -> str:
        """Return the digest of the policies' files and parameters."""
        parts = [[each.text(full=True), sha256(source(each.policy)).hexdigest()] for each in self.chosen()]
        return canonical_digest(parts)[:DIGITS]

    def name(self) -> str:
        """Return the policies that differ from lru, none and fetch; `lru` if none does."""
        own = [text for text, plain in zip(self, LRU, strict=True) if text != plain]
        return " + ".join(own) or LRU.eviction


LRU, BELADY = Entry("lru"), Entry("belady")


class Digests(Frozen):
    """The digests of all that a row depends on."""

    suite: Text
    policies: Text
    code: Text
    semantics: int


class Row(Frozen):
    """The result of an entry. Lists are by trace and cell, in the order of the suite."""

    bench: int  #: version of the suite
    eviction: Text
    prefetch: Text
    miss: Text
    misses: float  #: mean over cells and machines: 0 as many as LRU, 100 as few as Belady
    tokens_per_s: dict[str, float]  #: by machine, geometric mean over cells
    may_take_us: dict[str, float]  #: by machine, mean over cells: time saved per token and layer, compared with LRU
    digests: Digests
    counted: dict[str, dict[str, list[int]]]  #: by machine: COUNTED, and decode_ns
    row: Text = ""  #: digest of all before

    @property
    def entry(self) -> Entry:
        """The policies."""
        return Entry(self.eviction, self.prefetch, self.miss)

    def line(self) -> str:
        """Return the row as it is written, with its digest."""
        document = self.model_dump(mode="json", exclude={"row"})
        return json_text(document | {"row": canonical_digest(document)[:DIGITS]})


# -- The suite


def read_suite(path: Path = SUITE) -> Suite:
    """Read a suite, and check its settings, and that the machines have the figures it means. Raises ConfigError."""
    try:
        suite = Suite.model_validate(from_toml(content(path)))
    except OSError as wrong:
        raise ConfigError(f"{path}: {wrong.strerror}") from None
    except DocumentError as wrong:
        raise ConfigError(f"{path} is not valid TOML: {wrong}") from None
    except ValidationError as wrong:
        raise ConfigError(f"{path}: {first_fault(wrong)}") from None
    try:
        for settings, machine in product(suite.cells(), suite.machines):
            configure(platform=machine, **settings)
    except ConfigError as wrong:
        raise ConfigError(f"{path}: {wrong}") from None
    for name, digest in suite.machines.items():
        _check_same(path, f"machine {name}", digest, platform(name).seal)
    return suite


def traces_of(suite: Suite, path: Path = SUITE) -> list[Trace]:
    """Draw the traces of a suite, and open those beside its file. Raises TraceError; ConfigError for other digests."""
    found = [(name, digest, drawn_like(name, suite.draw)) for name, digest in suite.drawn.items()]
    found += [(name, digest, open_trace(bundled(Path(name), path.parent))) for name, digest in suite.recorded.items()]
    for name, digest, trace in found:
        _check_same(path, f"trace {name}", digest, trace.digest[:DIGITS])
    return [trace for _, _, trace in found]


def _check_same(path: Path, what: str, stated: str, found: str) -> None:
    if stated != found:
        raise ConfigError(
            f"{path}: {what} has the digest {found} here, and the suite states {stated}: rows made here could not be "
            "compared; install the version of moereplay that the suite is from"
        )


# -- Rows


def check_entries(entries: Sequence[Entry], suite: Suite, traces: Sequence[Trace]) -> None:
    """Raises PolicyError or ConfigError for an entry that a cell of the suite refuses."""
    for entry in entries:
        entry.chosen()
        for trace, config in product(traces, _configs(entry, suite)):
            plan(trace, config)


def _configs(entry: Entry, suite: Suite) -> list[ReplayConfig]:
    return [
        configure(platform=machine, **cell, **entry._asdict())
        for machine, cell in product(suite.machines, suite.cells())
    ]


def run_entries(
    entries: Sequence[Entry],
    suite: Suite,
    traces: Sequence[Trace],
    workers: int = 1,
    done: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Replay the suite under each entry, LRU and Belady, and return a row for each entry.

    Raises PolicyError, ConfigError or TraceError.
    """
    check_entries(entries, suite, traces)
    entries = [entry.settled() for entry in entries]
    cells: dict[Entry, list[Cell]] = {entry: [] for entry in (LRU, BELADY, *entries)}
    for trace in traces:
        of = [(entry, config) for entry in cells for config in _configs(entry, suite)]
        results = run_grid(trace, [config for _, config in of], workers, bounded=False, done=done)
        for (entry, config), (result, _) in zip(of, results, strict=True):
            cells[entry].append(Cell.of(config.platform, result, trace.geometry.layers))
    return [_row(entry, suite, cells[entry], cells[LRU], cells[BELADY]) for entry in entries]


def replays(entries: Sequence[Entry], suite: Suite) -> int:
    """Return how many replays `run_entries` makes."""
    traces = len(suite.drawn) + len(suite.recorded)
    return len({LRU, BELADY, *entries}) * len(_configs(LRU, suite)) * traces


class Cell(NamedTuple):
    """The counts of a replay."""

    machine: str
    counted: Mapping[str, int]  #: COUNTED and the sums of times
    layers: int

    @classmethod
    def of(cls, machine: str, result: Result, layers: int) -> Cell:
        """Return the counts of a result."""
        totals = {name: result.totals[name] for name in COUNTED}
        return cls(machine, totals | request_times(result.per_request), layers)

    def saved_us(self, lru: Cell) -> float:
        """Return the time that a token saves in a layer, compared with LRU, in us."""
        saved = lru.counted["decode_ns"] - self.counted["decode_ns"]
        return saved / (self.counted["decode_tokens"] * self.layers * US)


def _row(entry: Entry, suite: Suite, own: Sequence[Cell], lru: Sequence[Cell], belady: Sequence[Cell]) -> Row:
    places = {name: [at for at, cell in enumerate(own) if cell.machine == name] for name in suite.machines}
    speed = METRICS["tokens_per_s"]
    speeds = {name: geometric_mean([speed.value(own[at].counted) or 0 for at in of]) for name, of in places.items()}
    saved = {name: fmean(own[at].saved_us(lru[at]) for at in of) for name, of in places.items()}
    return Row(
        bench=suite.version,
        **entry._asdict(),
        misses=round(fmean(_shares(own, lru, belady)), 2),
        tokens_per_s={name: float(f"{value:.4g}") for name, value in speeds.items()},
        may_take_us={name: float(f"{value:.3g}") for name, value in saved.items()},
        digests=Digests(
            suite=suite.digest,
            policies=entry.digest(),
            code=canonical_digest([digest_of_sources(), sha256_of(Path(__file__))])[:DIGITS],
            semantics=SEMANTICS_VERSION,
        ),
        counted={
            name: {count: [own[at].counted[count] for at in of] for count in (*COUNTED, "decode_ns")}
            for name, of in places.items()
        },
    )


def _shares(own: Sequence[Cell], lru: Sequence[Cell], belady: Sequence[Cell]) -> Iterator[float]:
    """Yield, for each cell in which Belady misses less than LRU, which part of that in percent an entry reaches."""
    for mine, theirs, best in zip(own, lru, belady, strict=True):
        gap = theirs.counted["misses"] - best.counted["misses"]
        if gap > 0:
            yield 100 * (theirs.counted["misses"] - mine.counted["misses"]) / gap


# -- Rows in files, one in each line


class Written(NamedTuple):
    """A row of a file, as it stands there."""

    where: str
    row: Row
    line: str


def read_rows(paths: Sequence[Path]) -> list[Written]:
    """Read the rows of files. Raises ConfigError for a line that is no row, and for a row that was edited."""
    try:
        found = [Written(*each) for path in paths for each in json_lines(path, Row, "a row of `moereplay bench run`")]
    except DocumentError as wrong:
        raise ConfigError(str(wrong)) from None
    if not found:
        raise ConfigError(f"{', '.join(map(str, paths))}: expected rows of `moereplay bench run`, found none")
    for where, row, line in found:
        if row.line() != line:
            raise ConfigError(f"{where}: the row of {row.entry.name()} was changed after it was written; run it again")
    return found


def check_together(rows: Sequence[Written]) -> None:
    """Raises ConfigError for rows of two suites or semantics, and for an entry that is there twice."""
    first, seen = rows[0], dict[str, str]()
    for where, row, _ in rows:
        for what in ("suite", "semantics"):
            ours, theirs = (getattr(each.digests, what) for each in (first.row, row))
            if ours != theirs:
                raise ConfigError(
                    f"{where}: {what} {theirs} cannot be compared with {what} {ours} of {first.where}; "
                    "make all rows with one version of moereplay"
                )
        if row.digests.policies in seen:
            raise ConfigError(
                f"{where}: {row.entry.name()} is in {seen[row.digests.policies]} already; remove one of the two"
            )
        seen[row.digests.policies] = where


def check_current(written: Written, suite: Suite) -> None:
    """Raises ConfigError or PolicyError for a row whose suite, semantics or policies are not those of here."""
    where, row, _ = written
    stated = row.digests
    here = {"suite": suite.digest, "semantics": SEMANTICS_VERSION, "policies": _policies_here(written)}
    for what, found in here.items():
        if getattr(stated, what) != found:
            raise ConfigError(
                f"{where}: the row of {row.entry.name()} was made with {what} {getattr(stated, what)}; "
                f"here it is {found}: verify it with the version that made it"
            )


def _policies_here(written: Written) -> str:
    try:
        return written.row.entry.digest()
    except PolicyError as error:
        own = [text.partition(":")[0] for text in written.row.entry if "@" in text.partition(":")[0]]
        advice = f"; pass the file of {', '.join(own)} with --policy-file" if own else ""
        raise PolicyError(f"{written.where}: {error}{advice}") from None


def verified(written: Written, again: Row) -> bool:
    """Return whether a row was made by this very code; all else is the same. Raises ConfigError where it is not."""
    where, row, line = written
    if again.line() == line:
        return True
    same_code = again.digests.model_copy(update={"code": row.digests.code})
    if again.model_copy(update={"digests": same_code}).line() == line:
        return False
    for name in Row.model_fields:
        stated, found = getattr(row, name), getattr(again, name)
        if stated != found and name != "row":
            raise ConfigError(
                f"{where}: {name} of {row.entry.name()} is {_short(stated)}, and a run gives {_short(found)}"
            )
    raise ConfigError(f"{where}: the row of {row.entry.name()} is not what a run gives")


def _short(value: object) -> str:
    text = json_text(value.model_dump() if isinstance(value, Frozen) else value)
    return text if len(text) <= 100 else f"{text[:97]}..."
