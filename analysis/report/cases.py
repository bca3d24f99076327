"""Material of a page, and its cases: the configurations of one trace, schedule of passes and platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any, NamedTuple

import polars as pl

from moereplay.analysis.comparisons import YES, estimate
from moereplay.analysis.metrics import entries, measured, varying
from moereplay.analysis.verdict import (
    FIGURES,
    Condition,
    Entry,
    Verdict,
    by_condition,
    independent,
    name_of_set,
    verdict,
)
from moereplay.results.checks import Check
from moereplay.results.result import DOCUMENTED
from moereplay.results.settings import POLICIES, expert_lists, repeat_command
from moereplay.traces.schema import Trace

#: Settings that all configurations of a case share; results of different cases are never compared.
SHARED = ("model", "trace", "passes", "platform")
MOST_SERIES = 16  #: most lines that a reader can distinguish
#: Place of a configuration in its case, as in a ranking.
GROUPS = BEST, ALONE, ALIKE, UNSURE, BEHIND, BOUND = (
    "best",
    "the only one",
    "statistically tied with the best",
    "not compared",
    "behind the best",
    "knows the future: cannot be used",
)


@dataclass(frozen=True)
class Case:
    """The configurations of one trace, schedule of passes and platform, which are compared with one another."""

    shared: Mapping[str, Any]  #: values of `SHARED`
    table: pl.DataFrame  #: tidy rows with every metric, sorted by identity
    entries: Sequence[Entry]  #: in the order of `table`
    names: Sequence[str]  #: settings that name its configurations

    @property
    def usable(self) -> list[Entry]:
        """Entries that do not know the future."""
        return [entry for entry in self.entries if not entry.foresees]

    @property
    def foreseeing(self) -> list[Entry]:
        """Entries that know the future, which are never the answer."""
        return [entry for entry in self.entries if entry.foresees]

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The verdict on speed and that on hit rate, if the case has the figure."""
        found = (verdict(figure, self.usable) for figure in FIGURES)
        return [each for each in found if each is not None]

    @cached_property
    def conditions(self) -> list[Condition]:
        """The best at each capacity by the first figure; none with one capacity, or one set at each."""
        found = by_condition(self.verdicts[0].figure, self.usable) if self.verdicts else []
        return found if any(each.found.second for each in found) else []

    @cached_property
    def bound_conditions(self) -> list[Condition]:
        """The best entry that knows the future at each capacity, by the first figure."""
        return by_condition(self.verdicts[0].figure, self.foreseeing) if self.verdicts else []

    @cached_property
    def groups(self) -> dict[str, str]:
        """Place of every configuration by identity, from the first verdict at its capacity."""
        groups = {identity(entry): BOUND if entry.foresees else UNSURE for entry in self.entries}
        best = BEST if len(self.usable) > 1 else ALONE
        for first in [condition.found for condition in self.conditions] or self.verdicts[:1]:
            for rival in first.rivals:
                if rival.beside.tested or rival.exact:
                    groups[identity(rival.entry)] = BEHIND if rival.beside.answer == YES else ALIKE
            groups |= {identity(entry): best for entry in first.tied}
        return groups

    @cached_property
    def ranked(self) -> list[Entry]:
        """The entries by standing, and then by the first figure, or the hit rate."""
        order = {group: place for place, group in enumerate(GROUPS)}
        figure = self.verdicts[0].figure.name if self.verdicts else FIGURES[-1].name
        return sorted(
            self.entries,
            key=lambda each: (order[self.groups[identity(each)]], -(getattr(each, figure) or 0), identity(each)),
        )

    @cached_property
    def drawn(self) -> list[str]:
        """The lines of figures: the best sets of policies, at any capacity."""
        return list(dict.fromkeys(self.series(each.settings) for each in self.ranked))[:MOST_SERIES]

    @cached_property
    def left(self) -> int:
        """The number of sets of policies that no figure draws."""
        return len({self.series(each.settings) for each in self.entries}) - len(self.drawn)

    @cached_property
    def requests(self) -> int:
        """The fewest per-request rows of any configuration; 0 if they were not stored."""
        return min(len(entry.requests()) for entry in self.entries)

    @property
    def synthetic(self) -> bool:
        """True if the routing is synthetic; intervals are omitted then."""
        return any(entry.synthetic for entry in self.entries)

    @property
    def shares_a_cache(self) -> bool:
        """True if requests depend on one another."""
        return not all(independent(entry.settings) for entry in self.entries)

    def label(self, entry: Entry) -> str:
        """Return the name of a configuration within its case."""
        return name_of_set(entry, self.names)

    def series(self, settings: Mapping[str, Any]) -> str:
        """Name a configuration without its capacity, as the line of a figure."""
        words = [str(settings[name]) if name in POLICIES else f"{name} {settings[name]}" for name in self.lines]
        return ", ".join(words)

    @property
    def lines(self) -> list[str]:
        """Settings that name lines of figures."""
        return [name for name in self.names if name != "capacity"] or ["eviction"]


def identity(entry: Entry) -> str:
    """Return the identity of an entry's configuration."""
    return entry.settings["identity"]


def cases(material: Material) -> list[Case]:
    """Return every case of the results, in the order of their shared settings."""
    if material.frame.is_empty():
        return []
    frame = material.frame
    known = {identity(entry): entry for entry in entries(frame, material.foresees)}
    table = measured(frame).sort(*SHARED, "identity")
    names = [name for name in varying(frame) if name not in SHARED]
    return [_case(rows, known, names) for _, rows in table.group_by(SHARED, maintain_order=True)]


def _case(rows: pl.DataFrame, known: Mapping[str, Entry], names: Sequence[str]) -> Case:
    inside = [name for name in names if rows[name].n_unique() > 1]
    return Case(
        shared=rows.select(SHARED).row(0, named=True),
        table=rows,
        entries=[known[each] for each in rows["identity"]],
        names=inside or ["eviction"],
    )


def title(case: Case, all_cases: Sequence[Case]) -> str:
    """Return the settings that distinguish a case from the others; model and platform if it is the only one."""
    apart = [name for name in SHARED if len({each.shared[name] for each in all_cases}) > 1]
    shown = apart or ["model", "platform"]
    words = {name: str(case.shared[name])[:12] if name == "trace" else str(case.shared[name]) for name in shown}
    plain = [text if name in ("model", "platform") else f"{name} {text}" for name, text in words.items()]
    return ", ".join(plain)


# Material


class Source(NamedTuple):
    """A trace of the results."""

    name: str  #: as commands take it
    trace: Trace | None = None
    missing: str = ""  #: why it is not available, and how to get it


class Material(NamedTuple):
    """Everything that a page is made from. One of `frame` and `curves` may be empty."""

    frame: pl.DataFrame  #: from `results.stored.load`, with rows of requests
    layered: Callable[[pl.DataFrame], pl.DataFrame]  #: adds rows of layers, and of requests and layers, to some of it
    curves: pl.DataFrame  #: from `results.curves.load`
    failed: int  #: configurations without a result
    checks: Sequence[Check]
    provenances: Sequence[Mapping[str, Any]]
    sources: Mapping[str, Source]  #: by digest
    remarks: Sequence[str]  #: on bounds of the available traces
    foresees: Callable[[Mapping[str, Any]], bool]  #: returns whether policies know the future
    version: str  #: of the package


# Runs: every configuration as a document

Run = dict[str, Any]
#: Facts of a result that are shown with its settings.
FACTS = ("label", "seconds", "warning", "capacity_forms", "capacity_bytes", "token_cycles", "semantics")


#: Configurations of a page, divided among its cases, and the fewest of a case; those that figures draw are all there.
MOST_RUNS, LEAST_RUNS = 300, 5


def runs(cases: Sequence[Case], material: Material) -> list[Run]:
    """Return the runs of a page, case by case, by standing and then by figure: the first, and all that figures draw."""
    most = max(LEAST_RUNS, MOST_RUNS // max(1, len(cases)))
    return [run for at, case in enumerate(cases) for run in _of_case(at, case, most, material)]


def _of_case(at: int, case: Case, most: int, material: Material) -> list[Run]:
    kept = [
        entry for place, entry in enumerate(case.ranked) if place < most or case.series(entry.settings) in case.drawn
    ]
    names = pl.Series([identity(entry) for entry in kept]).implode()
    own = material.frame.select("config", "about").filter(pl.col("about").struct.field("identity").is_in(names))
    stored = {row["about"]["identity"]: row for row in own.iter_rows(named=True)}
    rows = {row["identity"]: row for row in case.table.filter(pl.col("identity").is_in(names)).iter_rows(named=True)}
    return [
        _run(case, entry, rows[identity(entry)], stored[identity(entry)], material) | {"case": at} for entry in kept
    ]


def _run(case: Case, entry: Entry, row: Mapping[str, Any], stored: Mapping[str, Any], material: Material) -> Run:
    config, about, trace = stored["config"], stored["about"], material.sources[row["trace"]].name
    return {
        "identity": row["identity"],
        "label": case.label(entry),
        "series": case.series(entry.settings),
        "group": case.groups[row["identity"]],
        "config": config,
        "command": repeat_command(config, trace, policy_files(config, material.provenances)),
        "files": expert_lists(config),
        "figures": {name: row.get(name) for name in DOCUMENTED},
        "interval": {figure.name: interval(entry, figure.name) for figure in FIGURES},
        "about": {name: row[name] for name in ("model", "trace")} | {name: about.get(name) for name in FACTS},
    }


def interval(entry: Entry, figure: str) -> dict[str, Any] | None:
    """Return the 95 % CI of a configuration's own figure; None if there is none."""
    found = estimate(entry.requests(), figure)
    if found is None or found.low is None or found.high is None:
        return None
    return {"low": found.low, "high": found.high, "requests": found.requests}


def policy_files(config: Mapping[str, Any], provenances: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the user's policy files that a configuration needs, without the folders of their machine."""
    versions = {text.partition(":")[0].partition("@")[2] for name in POLICIES if (text := str(config[name]))} - {""}
    stored = {each["sha256"]: str(each["path"]) for one in provenances for each in one.get("policy_files", ())}
    named = [path for sha, path in sorted(stored.items()) if any(sha.startswith(version) for version in versions)]
    return [PurePath(path).name for path in named]
