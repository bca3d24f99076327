"""How the figures came about, and how to repeat them: what a reader who was not there must know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moereplay.analysis.bootstrap import FEW, MANY, RESAMPLES
from moereplay.analysis.report.machines import versions_of_semantics
from moereplay.analysis.report.material import Material
from moereplay.results.read import runs

SETTINGS = ("contract", "passes", "scope", "reset", "seed")
BOUNDS = (
    "Belady's bound is the most hits of any eviction without prefetch, in the same bytes, knowing the future; the "
    "compulsory limit is the most of any cache without prefetch. A policy that prefetches may exceed both. Policies "
    "that know the future are bounds as well, and are never named as the answer."
)
STATISTICS = (
    "Requests are the samples. Intervals are 95%: a studentised, symmetric bootstrap over requests "
    f"({RESAMPLES:,} resamples of one seed) from {FEW} to {MANY} requests, Student's t of the jackknife elsewhere, "
    f"which is rough below {FEW}. Differences are of the same requests under both, corrected for all pairs by "
    "Holm's method."
)
REPEAT = (
    "Every configuration of this page has the command that replays it. The same trace, configuration and version give "
    "the same counters to the last digit."
)


def method(material: Material) -> dict[str, Any]:
    """By name: semantics, settings of all replays, versions, and how to read bounds and intervals."""
    return {
        "semantics version": ", ".join(map(str, versions_of_semantics(material))) or _of_curves(material),
        **_settings(material),
        "engine": _all(str(one.get("engine", "unknown")) for one in material.provenances),
        "replayed with": _all(_versions(one) for one in material.provenances),
        "page made with": f"moereplay {material.version}",
        "bounds": BOUNDS,
        "statistics": STATISTICS,
        "repeat": REPEAT,
    }


def _settings(material: Material) -> dict[str, str]:
    if material.frame.is_empty():
        return {}
    table = runs(material.frame)
    return {name: _all(map(str, table[name].to_list())) for name in SETTINGS if name in table.columns}


def _of_curves(material: Material) -> str:
    return ", ".join(map(str, material.curves["semantics"].unique().sort().to_list()))


def _versions(provenance: Any) -> str:
    versions = dict(provenance.get("versions") or {})
    commit = f" ({provenance['commit'][:12]})" if provenance.get("commit") else ""
    first = f"moereplay {versions.pop('moereplay', 'unknown')}{commit}"
    return ", ".join([first, *(f"{name} {version}" for name, version in sorted(versions.items()) if version)])


def _all(texts: Any) -> str:
    found: Sequence[str] = sorted(set(texts))
    return "; ".join(found) or "unknown"
