"""Warnings and background of a page: cautions, health of traces, machines, and method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import polars as pl

from moereplay.analysis.checks import candidates_of, summary
from moereplay.analysis.comparisons import FEW
from moereplay.analysis.ranking import OPEN_LOOP, warnings
from moereplay.analysis.report.cases import Case, Material, Source, title
from moereplay.analysis.statistics import EXACT
from moereplay.analysis.tables import cell
from moereplay.analysis.verdict import NO_INTERVAL, lacking, untimed
from moereplay.results.read import fields, label_of, routing_of, runs
from moereplay.results.remarks import assumptions, seconds_in_words
from moereplay.results.schema import fields_of
from moereplay.traces.schema import Trace
from moereplay.traces.summary import Summary, named_synthetic, summarise, synthetic
from moereplay.traces.texts import counted
from moereplay.traces.validator import examine


def cautions(
    material: Material,
    cases: Sequence[Case],
    traces: Sequence[Mapping[str, Any]],
    platforms: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Return every warning once, most important first."""
    lines = untimed([entry for case in cases for entry in case.entries])
    said = [
        *_synthetic(material),
        *_incomplete(material),
        *_of_rows(material),
        *estimates(platforms),
        *dense_weights(material),
        *_samples(cases),
        *([" ".join(line.strip() for line in lines)] if lines else []),
        *material.remarks,
        *caution_lines([dict(each) for each in traces]),
        *([] if material.frame.is_empty() else summary(material.checks, candidates_of(material.frame))),
    ]
    return list(dict.fromkeys(said))


def _synthetic(material: Material) -> list[str]:
    """Name synthetic routing of the results, or of the traces if there are curves only."""
    if not material.frame.is_empty():
        return routing_of(material.frame)
    models = material.curves["model"].unique().to_list()
    known = [synthetic(each.trace.header.provenance) for each in material.sources.values() if each.trace]
    return assumptions(known) or assumptions(map(named_synthetic, models))


def _incomplete(material: Material) -> list[str]:
    versions = versions_of_semantics(material)
    mixed = f"results of semantics {', '.join(map(str, versions))} are together here, and cannot be compared"
    failed = (
        f"{counted(material.failed, 'configuration')} without a result: `moereplay sweep show --errors` "
        f"shows the reasons"
    )
    return [*([failed] if material.failed else []), *([mixed] if len(versions) > 1 else [])]


def _of_rows(material: Material) -> list[str]:
    """Warn of small capacities and of routing that cannot react."""
    if material.frame.is_empty():
        return []
    rows = runs(material.frame).sort("capacity_bytes", "identity")
    warned = {about["identity"]: about.get("warning") for about in material.frame["about"].to_list()}
    said = warnings(
        (capacity, warned[identity]) for capacity, identity in rows.select("capacity", "identity").iter_rows()
    )
    return [*said, *([OPEN_LOOP] if "open-loop" in label_of(material.frame) else [])]


def _samples(cases: Sequence[Case]) -> list[str]:
    """Warn of few requests, missing rows, and dependent requests."""
    few: dict[int, list[str]] = {}
    for case in (each for each in cases if each.requests < FEW and not each.synthetic):
        few.setdefault(case.requests, []).append(title(case, cases))
    said = [
        f"{'; '.join(of) + ': ' if len(cases) > 1 else ''}{NO_INTERVAL[lacking(requests)]}"
        for requests, of in sorted(few.items())
    ]
    for case in (each for each in cases if each.requests >= FEW and not each.synthetic):
        for found in case.verdicts:
            if (own := found.own()) and own.low is None and own.why:
                said.append(f"{title(case, cases)}: no interval of {found.figure.title}: {own.why}")
    if any(case.shares_a_cache and case.requests >= FEW for case in cases):
        said.append("intervals take requests to be independent, but these share a cache (--reset request empties it)")
    return said


# Health of traces


def health(material: Material) -> list[dict[str, Any]]:
    """Return statistics and findings of every trace of the results. Raises TraceError on damaged rows."""
    return [_of(digest, source) for digest, source in sorted(material.sources.items())]


def _of(digest: str, source: Source) -> dict[str, Any]:
    named = {"digest": digest, "name": source.name}
    if source.trace is None:
        return named | {"missing": source.missing, "figures": {}, "layers": [], "findings": []}
    summary, findings = summarise(source.trace), examine(source.trace)
    return named | {
        "missing": "",
        "figures": _figures(source.trace, summary),
        "layers": [
            {"layer": at, "reuse": layer.reuse, "entropy": layer.entropy, "busiest/mean": layer.imbalance}
            | {f"recall +{depth}": share for depth, share in layer.recall.items()}
            for at, layer in enumerate(summary.layers)
        ],
        "findings": [{"level": each.level, "check": each.check, "text": each.text} for each in findings],
        "complete": source.trace.complete,
    }


def _figures(trace: Trace, summary: Summary) -> dict[str, Any]:
    geometry, depths = summary.geometry, summary.layers[0].recall
    recall = {
        f"look-ahead recall, {depth} layer{'s' * (depth > 1)} on": _share(
            fmean(layer.recall[depth] for layer in summary.layers if depth in layer.recall)
        )
        for depth in depths
    }
    return {
        "model": trace.header.provenance.model,
        "experts": f"{geometry.layers} MoE layers, top-{geometry.k} of {geometry.experts}",
        "bytes of all experts": f"{summary.bytes_of_experts:,}",
        "requests": f"{summary.requests:,}",
        "tokens": f"{summary.tokens:,}: {summary.prompt_tokens:,} of prompts, {summary.decode_tokens:,} decoded",
        "holds": ", ".join(summary.capabilities),
        "reuse by the next token": f"{_share(summary.reuse)}; {_share(summary.chance)} by chance",
        "evenness of use (entropy)": f"{fmean(layer.entropy for layer in summary.layers):.3f}",
        **recall,
        "notes": "; ".join(trace.header.provenance.notes) or "none",
    }


def caution_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return warnings and errors of the checks, and traces that are incomplete or missing."""
    said = []
    for each in found:
        if each["missing"]:
            said.append(f"trace {each['digest'][:12]} was not examined: {each['missing']}")
        elif not each["complete"]:
            said.append(f"trace {each['digest'][:12]} is not complete: only committed requests were replayed")
        said += [f"trace {each['name']}: {one['text']}" for one in each["findings"] if one["level"] != "ok"]
    return said


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


# Machines


def machines(material: Material) -> list[dict[str, Any]]:
    """Return every platform: the basis of its seconds, the changes in its name, and its figures."""
    if material.frame.is_empty():
        return []
    stored = {name: figures for one in material.provenances for name, figures in one.get("platforms", {}).items()}
    return [
        {
            "name": name,
            "seconds": seconds,
            "changes": name.split(":")[1:],
            "figures": dict(_flat(stored.get(name.partition(":")[0], {}))),
        }
        for name, seconds in _seconds(material).items()
    ]


def _seconds(material: Material) -> dict[str, str]:
    platforms = runs(material.frame)["platform"].to_list()
    found: dict[str, str] = {}
    for name, about in sorted(zip(platforms, material.frame["about"].to_list(), strict=True), key=lambda each: each[0]):
        found[name] = seconds_in_words(about, "calibrated: ")
    return found


def estimates(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name platforms whose seconds are estimates."""
    named: dict[str, list[str]] = {}
    for each in found:
        if not each["seconds"].startswith("calibrated"):
            named.setdefault(each["seconds"], []).append(each["name"])
    said = "hit rates and bytes are counted"
    return [f"seconds of {', '.join(names)}: {seconds}; {said}" for seconds, names in named.items()]


def dense_weights(material: Material) -> list[str]:
    """Return the assumptions of the results on dense weights."""
    if "assumed" not in fields_of(material.frame.schema.get("about")):
        return []
    said = material.frame.select(pl.col("about").struct.field("assumed")).to_series().drop_nulls()
    return sorted(set(said))


def _flat(figures: Any, inside: str = "") -> Iterator[tuple[str, str]]:
    """Flatten figures to dotted names, as in a platform file."""
    if isinstance(figures, Mapping):
        for name, value in figures.items():
            yield from _flat(value, f"{inside}.{name}" if inside else str(name))
    elif isinstance(figures, list):
        for at, value in enumerate(figures):
            yield from _flat(value, f"{inside}[{at}]")
    elif figures is not None:
        yield inside, _number(figures)


def _number(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e18
    return cell(int(value)) if whole else cell(value)


def versions_of_semantics(material: Material) -> list[int]:
    """Return the semantics versions of all results; several cannot be compared."""
    known = "semantics" in fields(material.frame) if not material.frame.is_empty() else False
    return sorted(set(runs(material.frame)["semantics"].to_list())) if known else []


# Method

SETTINGS = ("contract", "passes", "scope", "reset", "seed")
BOUNDS = (
    "No eviction without prefetch hits more than Belady's bound, in the same bytes, even if it knows the future; no "
    "cache without prefetch hits more than the compulsory limit. A policy that prefetches may exceed both. Policies "
    "that know the future are never named as the answer."
)
STATISTICS = (
    "Requests are the samples. Intervals are 95%: Student's t of the jackknife over requests; the first, which meets "
    f"an empty cache, is part of a figure but not of its spread. Fewer than {FEW} requests have none, nor has a figure "
    "that it or a long tail of lengths decides. Differences are "
    f"of the same requests under both: exact sign-flip test up to {EXACT} requests, Student's t beyond, corrected for "
    "all pairs by Holm's method."
)
REPEAT = (
    "Every configuration of this page has the command that replays it. The same trace, configuration and version give "
    "the same counters to the last digit."
)


def method(material: Material) -> dict[str, Any]:
    """Return semantics, settings of all replays, versions, and how to read bounds and intervals, by name."""
    versions = versions_of_semantics(material)
    return {
        "semantics version": ", ".join(map(str, versions or material.curves["semantics"].unique().sort())),
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


def _versions(provenance: Any) -> str:
    versions = dict(provenance.get("versions") or {})
    commit = f" ({provenance['commit'][:12]})" if provenance.get("commit") else ""
    first = f"moereplay {versions.pop('moereplay', 'unknown')}{commit}"
    return ", ".join([first, *(f"{name} {version}" for name, version in sorted(versions.items()) if version)])


def _all(texts: Any) -> str:
    found: Sequence[str] = sorted(set(texts))
    return "; ".join(found) or "unknown"
