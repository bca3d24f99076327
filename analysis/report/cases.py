"""Cases: the configurations of one trace, schedule of passes and platform, among which policies are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import polars as pl

from moereplay.analysis.comparisons import YES
from moereplay.analysis.metrics import entries, measured, varying
from moereplay.analysis.report.material import Material
from moereplay.analysis.sentences import Given, each_given
from moereplay.analysis.verdict import FIGURES, Entry, Verdict, called, independent, verdict
from moereplay.results.settings import POLICIES

#: What the configurations of a case share; its results are never compared with those of another.
SHARED = ("model", "trace", "passes", "platform")
#: Where a configuration stands in its case, in the order of a ranking.
GROUPS = BEST, ALONE, ALIKE, UNSURE, BEHIND, BOUND = (
    "best",
    "the only one",
    "statistically tied with the best",
    "not compared",
    "behind the best",
    "upper bound: knows the future",
)


@dataclass(frozen=True)
class Case:
    """One trace, one schedule of passes, one platform."""

    shared: Mapping[str, Any]  #: by `SHARED`
    rows: Sequence[Mapping[str, Any]]  #: tidy, with every metric, by identity
    entries: Sequence[Entry]  #: of the same
    names: Sequence[str]  #: the settings by which its configurations are called

    @property
    def usable(self) -> list[Entry]:
        """Those that know nothing of the future."""
        return [entry for entry in self.entries if not entry.foresees]

    @property
    def foreseeing(self) -> list[Entry]:
        """Those that do: bounds, and never the answer."""
        return [entry for entry in self.entries if entry.foresees]

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The fastest, and the one with most hits; without those of which nothing is known."""
        found = (verdict(figure, self.usable) for figure in FIGURES)
        return [each for each in found if each is not None]

    @cached_property
    def bounds(self) -> dict[str, Entry]:
        """By figure, the best with knowledge of the future."""
        found = {figure.name: verdict(figure, self.foreseeing) for figure in FIGURES}
        return {name: each.best for name, each in found.items() if each is not None}

    @cached_property
    def given(self) -> list[Given]:
        """By the first figure, the best at each capacity; none where there is one capacity, or one set at each."""
        found = each_given(self.verdicts[0].figure, self.usable) if self.verdicts else []
        return found if any(each.found.second for each in found) else []

    @cached_property
    def bounds_given(self) -> list[Given]:
        """By the first figure, the upper bound at each capacity."""
        return each_given(self.verdicts[0].figure, self.foreseeing) if self.verdicts else []

    @cached_property
    def groups(self) -> dict[str, str]:
        """Where every configuration stands, by identity; compared by the first verdict, each at its capacity."""
        groups = {identity(entry): BOUND if entry.foresees else UNSURE for entry in self.entries}
        best = BEST if len(self.usable) > 1 else ALONE
        for first in [each.found for each in self.given] or self.verdicts[:1]:
            for rival in first.rivals:
                if rival.beside.off is not None or rival.exact:
                    groups[identity(rival.entry)] = BEHIND if rival.beside.answer == YES else ALIKE
            groups |= {identity(entry): best for entry in first.tied}
        return groups

    @cached_property
    def requests(self) -> int:
        """The fewest rows of requests of any configuration; 0 where they were not kept."""
        return min(len(entry.requests()) for entry in self.entries)

    @property
    def synthetic(self) -> bool:
        """Whether its routing is: no interval is given then."""
        return any(entry.synthetic for entry in self.entries)

    @property
    def shares_a_cache(self) -> bool:
        """Whether requests are not independent."""
        return not all(independent(entry) for entry in self.entries)

    def label(self, entry: Entry) -> str:
        """What a configuration is called among those of its case."""
        return called(entry, self.names)

    def series(self, settings: Mapping[str, Any]) -> str:
        """What it is called whatever its capacity: the line of a figure that it belongs to."""
        words = [str(settings[name]) if name in POLICIES else f"{name} {settings[name]}" for name in self.lines]
        return ", ".join(words)

    @property
    def lines(self) -> list[str]:
        """The settings by which lines of figures are called."""
        return [name for name in self.names if name != "capacity"] or ["eviction"]


def identity(entry: Entry) -> str:
    """Of the configuration of an entry."""
    return entry.settings["identity"]


def cases(material: Material) -> list[Case]:
    """Every case of the results, in the order of what they share."""
    if material.frame.is_empty():
        return []
    frame = material.frame
    known = {identity(entry): entry for entry in entries(frame, material.foresees)}
    table = measured(frame).sort(*SHARED, "identity")
    names = [name for name in varying(frame) if name not in SHARED]
    return [_case(rows, known, names) for _, rows in table.group_by(SHARED, maintain_order=True)]


def _case(rows: pl.DataFrame, known: Mapping[str, Entry], names: Sequence[str]) -> Case:
    found = rows.to_dicts()
    inside = [name for name in names if rows[name].n_unique() > 1]
    return Case(
        shared={name: found[0][name] for name in SHARED},
        rows=found,
        entries=[known[row["identity"]] for row in found],
        names=inside or ["eviction"],
    )


def title(case: Case, all_cases: Sequence[Case]) -> str:
    """What a case has that the others have not; its trace and platform where it is alone."""
    apart = [name for name in SHARED if len({each.shared[name] for each in all_cases}) > 1]
    shown = apart or ["model", "platform"]
    words = {name: str(case.shared[name])[:12] if name == "trace" else str(case.shared[name]) for name in shown}
    plain = [text if name in ("model", "platform") else f"{name} {text}" for name, text in words.items()]
    return ", ".join(plain)
