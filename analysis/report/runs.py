"""Every configuration as a document: settings, identity, the command that repeats it, figures and intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from moereplay.analysis.bootstrap import FEW
from moereplay.analysis.comparisons import estimate
from moereplay.analysis.ratios import FORMULAS
from moereplay.analysis.report.cases import GROUPS, Case
from moereplay.analysis.report.material import Material
from moereplay.analysis.verdict import FIGURES, Entry
from moereplay.results.settings import POLICIES, expert_lists, repeat_command

Run = dict[str, Any]
#: Facts of a result that a reader needs beside its settings.
FACTS = ("label", "seconds", "warning", "capacity_forms", "capacity_bytes", "token_cycles", "semantics")


def runs(cases: Sequence[Case], material: Material) -> list[Run]:
    """All of them, case by case, in the order of their standing, and then of their figures."""
    stored = {row["about"]["identity"]: row for row in material.frame.iter_rows(named=True)} if cases else {}
    return [run for at, case in enumerate(cases) for run in _of_case(at, case, stored, material)]


def _of_case(at: int, case: Case, stored: Mapping[str, Run], material: Material) -> list[Run]:
    judged_by = case.verdicts[0].figure.name if case.verdicts else FIGURES[-1].name
    made = [
        _run(case, entry, row, stored[row["identity"]], material) | {"case": at}
        for entry, row in zip(case.entries, case.rows, strict=True)
    ]
    order = {group: place for place, group in enumerate(GROUPS)}
    return sorted(made, key=lambda run: (order[run["group"]], -(run["figures"][judged_by] or 0), run["identity"]))


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
        "figures": {name: row.get(name) for name in FORMULAS},
        "interval": {figure.name: interval(entry, figure.name) for figure in FIGURES},
        "about": {name: row[name] for name in ("model", "trace")} | {name: about.get(name) for name in FACTS},
    }


def interval(entry: Entry, figure: str) -> dict[str, Any] | None:
    """The 95 % interval of a configuration's own figure; None where its requests do not say."""
    found = estimate(entry.requests(), figure)
    if found is None or found.low is None or found.high is None:
        return None
    high = min(found.high, 1.0) if figure == "hit_rate" else found.high
    return {"low": found.low, "high": high, "requests": found.requests, "rough": found.requests < FEW}


def policy_files(config: Mapping[str, Any], provenances: Sequence[Mapping[str, Any]]) -> list[str]:
    """The files of the user's own policies that a configuration needs, without the folders of their machine."""
    versions = {text.partition(":")[0].partition("@")[2] for name in POLICIES if (text := str(config[name]))} - {""}
    stored = {each["sha256"]: str(each["path"]) for one in provenances for each in one.get("policy_files", ())}
    named = [path for sha, path in sorted(stored.items()) if any(sha.startswith(version) for version in versions)]
    return [PurePath(path).name for path in named]
