"""The HTML page: contents in the template, with styles, scripts and data inside.

Its content security policy loads nothing and runs only the two scripts whose hashes it names. Texts from files are
escaped by the template, or put into JSON without any `<`.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from moereplay.analysis.checks import candidates_of
from moereplay.analysis.checks import summary as of_checks
from moereplay.analysis.comparisons import FEW
from moereplay.analysis.metrics import DEFAULTS
from moereplay.analysis.ranking import OPEN_LOOP, warnings
from moereplay.analysis.report import figures
from moereplay.analysis.report.cases import Case, Material, Run, Source, cases, interval, runs, title
from moereplay.analysis.report.figures import summary, value
from moereplay.analysis.report.vega import Figure, compiled, runtime, still
from moereplay.analysis.statistics import EXACT
from moereplay.analysis.tables import SHARES, Share, cell
from moereplay.analysis.verdict import (
    NO_INTERVAL,
    Condition,
    Verdict,
    certainty,
    lacking,
    listed,
    name_of_set,
    paragraph,
    set_names,
    untimed,
)
from moereplay.results.read import fields, label_of, routing_of
from moereplay.results.read import runs as tidied
from moereplay.results.remarks import assumptions, one_label, seconds_in_words
from moereplay.results.schema import fields_of
from moereplay.results.settings import POLICIES, SETTINGS
from moereplay.traces.documents import json_text
from moereplay.traces.schema import Provenance, Trace
from moereplay.traces.summary import Summary, named_synthetic, summarise, synthetic
from moereplay.traces.texts import counted, escaped_document, escaped_lines
from moereplay.traces.validator import examine

if TYPE_CHECKING:
    from jinja2 import Template


FIRST = 30  #: rows of a ranking before "show all"
#: Columns of the ranking, with their heads and meanings.
COLUMNS = {
    "tokens_per_s": ("tokens/s", "of a request, decoded tokens"),
    "hit_rate": ("hit rate", "hits per access"),
    "belady_hit_rate": ("Belady", "upper bound on hits for any eviction without prefetch"),
    "ttft_mean_ms": ("TTFT, ms", "time to first token, mean"),
    "tpot_ms": ("TPOT, ms", "time per output token"),
    "collisions_per_miss": ("collisions per miss", "misses on experts evicted earlier in the same pass"),
    "gb_moved": ("GB moved", "by demand and prefetch"),
}
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {}; base-uri 'none'; form-action 'none'"
)


def page(material: Material) -> str:
    """Return the whole HTML page; equal material gives equal text. Raises TraceError if a trace's rows are damaged."""
    made, scripts = contents(material), {"vega": runtime(), "page": _file("page.js")}
    return _template().render(
        contents=made,
        columns={
            name: head
            for name, head in COLUMNS.items()
            if any(run["figures"][name] is not None for run in made.data["runs"])
        },
        data_json=as_json(made.data),
        drawings=as_json({figure.name: _drawing(figure) for panel in made.panels for figure in panel.figures}),
        first=FIRST,
        policy=POLICY.format(" ".join(_hash(text) for text in scripts.values())),
        scripts=scripts,
        style=_file("page.css"),
    )


def as_json(document: Any) -> str:
    """Return JSON for a script element, which its strings can neither end nor turn into a comment."""
    text = json_text(escaped_document(document), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _template() -> Template:
    """Load the template. It escapes everything except our own styles, scripts and JSON, and rejects unknown names."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )
    environment.filters |= {
        "shown": _shown,
        "ends": _ends,
        "still": lambda figure: still(escaped_document(figure.spec())),
        "summary": summary,
        "meaning": lambda name: MEANINGS.get(name, ""),
        "text": lambda value: "none" if value in ("", None, []) else str(value),
        "by_standing": lambda runs: [(group, list(of)) for group, of in groupby(runs, lambda run: run["group"])],
    }
    environment.globals["value"] = value
    return environment.from_string(_file("page.html"))


def _printable(value: Any) -> Any:
    """Escape unprintable characters in foreign texts; our own markup has another type."""
    return escaped_lines(value) if type(value) is str else value


def _file(name: str) -> str:
    return files("moereplay.analysis.report").joinpath(name).read_text("utf-8")


def _hash(script: str) -> str:
    """Hash a script as a browser does: the text between the tags."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _drawing(figure: Figure) -> dict[str, Any]:
    fields = {"x": figure.chart.x.scale == "log", "y": figure.chart.y.scale == "log"}
    return {"spec": compiled(escaped_document(figure.spec())), "logarithmic": fields}


def _shown(number: float | None, name: str) -> str:
    if number is None:
        return "-"
    return str(Share(number)) if name in SHARES else cell(number)


def _ends(found: dict[str, Any] | None, name: str) -> str:
    if not found:
        return ""
    return f"{_shown(found['low'], name)} to {_shown(found['high'], name)}"


# Contents

CURVES_ALONE = "Curves alone: no configuration was replayed, so none is fastest."


class Panel(NamedTuple):
    """A case on the page."""

    title: str
    answer: Sequence[str]
    budgets: Sequence[Budget]  #: a row per capacity, if several are compared
    runs: Sequence[Run]  #: best first
    left: int  #: configurations that are not on the page
    standing: Mapping[str, int]  #: how many of all have each place
    figures: Sequence[Figure]
    varies: Sequence[str]  #: settings that have a column in the ranking
    timed: bool  #: whether any run decodes


class Contents(NamedTuple):
    """The contents of a page: `data` is its JSON and complete, the rest is for the template."""

    data: dict[str, Any]
    panels: Sequence[Panel]
    traces: Sequence[dict[str, Any]]
    platforms: Sequence[dict[str, Any]]
    method: dict[str, Any]


def contents(material: Material) -> Contents:
    """Return the contents of a page. Raises TraceError if the rows of a trace are damaged."""
    found = cases(material)
    every, traces, platforms = runs(found, material), health(material), machines(material)
    panels = [_panel(at, case, found, every, material) for at, case in enumerate(found)] or [
        Panel("", [CURVES_ALONE], [], [], 0, {}, figures.of_curves(material), (), False)
    ]
    best = brief(found)
    data = {
        "question": question(material, found),
        "answer": [
            f"{panel.title}: {sentence}" if len(panels) > 1 else sentence
            for panel in panels
            for sentence in panel.answer
        ],
        "budgets": [budget._asdict() | {"case": at} for at, case in enumerate(found) for budget in budgets(case)],
        "best": best and _best(best, every),
        "interval": best and interval(best.best, best.figure.name),
        "runs": every,
        "left_out": sum(panel.left for panel in panels),
        "warnings": cautions(material, found, traces, platforms),
    }
    return Contents(data, panels, traces, platforms, method(material))


def _panel(at: int, case: Case, found: Sequence[Case], every: Sequence[Run], material: Material) -> Panel:
    own = [run for run in every if run["case"] == at]
    return Panel(
        title=title(case, found),
        answer=answers(case),
        budgets=budgets(case),
        runs=own,
        left=len(case.entries) - len(own),
        standing=Counter(case.groups.values()),
        figures=figures.figures(at, case, own, material),
        varies=case.names,
        timed=any(run["figures"]["tokens_per_s"] is not None for run in own),
    )


def _best(found: Verdict, every: Sequence[Run]) -> dict[str, Any]:
    run = next(run for run in every if run["identity"] == found.best.settings["identity"])
    alike = {entry.settings["identity"] for entry in (*found.tied[1:], *found.as_good)}
    return {
        "identity": run["identity"],
        "label": run["label"],
        "figure": found.figure.name,
        "value": found.value,
        "case": run["case"],
        "as_good": sorted(alike),
    }


# -- The question that results answer, and the answer in the sentences of the tables (`analysis/verdict.py`)


MEANINGS = {setting.name: setting.help.partition(":")[0].rstrip(".") for setting in SETTINGS} | {
    "model": "The model of the trace",
    "trace": "The recorded routing, by its digest",
    "policy": "The eviction policy of a curve",
    "semantics": "The version of what counters and times mean",
}
#: Settings that are shown even at their default.
ALWAYS = ("model", "platform", "passes", "contract", "scope", *POLICIES)


def answers(case: Case) -> list[str]:
    """Return the verdict on each figure that the case has, or why nothing can be chosen; a table has the first one's.

    The table of `budgets` says where the first figure leads, and how sure that is.
    """
    if case.verdicts:
        told = case.verdicts[1:] if case.conditions else case.verdicts
        parts = [paragraph(found.figure, case.entries, case.names) for found in told]
        return [_sentence(line) for part in parts for line in part.lines]
    if not case.usable:
        return ["Every configuration knows the future, so none can be used."]
    return ["No configuration has a figure to compare."]


def _sentence(line: str) -> str:
    text = line.strip()
    return f"{text[0].upper()}{text[1:]}."


class Budget(NamedTuple):
    """A row of the answer: the best set at one capacity."""

    capacity: str
    best: str
    value: str
    ends: str  #: the interval of its figure; empty if there is none
    second: str
    lead: str
    sure: str
    bound: str  #: the best that knows the future at this capacity


def budgets(case: Case) -> list[Budget]:
    """Return the best set at each capacity by the first figure; none with one capacity, or one set at each."""
    return [_budget(case, condition) for condition in case.conditions]


def _budget(case: Case, each: Condition) -> Budget:
    found, lead = each.found, each.found.lead
    figure, names = found.figure, set_names(case.names)
    own, bounds = found.own(), [bound for bound in case.bound_conditions if bound.label == each.label]
    known = own is not None and own.low is not None and own.high is not None
    tied = len(found.tied) > 1
    return Budget(
        capacity=each.label,
        best=listed(found.tied, names),
        value=figure.shown(found.value),
        ends=f"{figure.end(own.low or 0)} to {figure.end(own.high or 0)}" if own and known else "",
        second=name_of_set(found.second, names) if found.second and not tied else "",
        lead=figure.more(lead.more, lead.below) if lead and not tied else "",
        sure=certainty(found, lead) if lead and not tied else "",
        bound=figure.shown(bounds[0].found.value) if bounds else "",
    )


def brief(cases: Sequence[Case]) -> Verdict | None:
    """Return the fastest of all cases, or the one with most hits where nothing decodes."""
    firsts = [case.verdicts[0] for case in cases if case.verdicts]
    fastest = [first for first in firsts if first.figure.name == "tokens_per_s"] or firsts
    return max(fastest, key=lambda each: each.value, default=None)


def question(material: Material, cases: Sequence[Case]) -> dict[str, Any]:
    """Return the question as a sentence and as settings: `varies` name -> values, `constant` name -> value."""
    if material.frame.is_empty():
        return _of_curves(material)
    table = tidied(material.frame)
    known = [name for name in fields(material.frame) if name in table.columns]
    values = {name: _values(table[name].to_list()) for name in known}
    return {
        "text": _asked(material, cases),
        "label": label_of(material.frame),
        "traces": [_trace(material, digest) for digest in values["trace"]],
        "platforms": values["platform"],
        "varies": {name: found for name, found in values.items() if len(found) > 1},
        "constant": {
            name: one
            for name, (one, *more) in values.items()
            if not more and (name in ALWAYS or (name in DEFAULTS and one not in (DEFAULTS[name], "", None)))
        },
    }


def _of_curves(material: Material) -> dict[str, Any]:
    curves = material.curves
    models, digests = (curves[name].unique().sort().to_list() for name in ("model", "trace"))
    text = f"How does the hit rate of {', '.join(models)} grow with the capacity? Curves alone: nothing was timed."
    traces = [_trace(material, digest) for digest in digests]
    varies = {"policy": curves["policy"].unique().sort().to_list()}
    return {
        "text": text,
        "label": one_label(curves["label"]),
        "traces": traces,
        "platforms": [],
        "varies": varies,
        "constant": {},
    }


def _asked(material: Material, cases: Sequence[Case]) -> str:
    models = dict.fromkeys(_model_of(material, case) for case in cases)
    platforms = dict.fromkeys(str(case.shared["platform"]) for case in cases)
    decodes = any(case.verdicts and case.verdicts[0].figure.name == "tokens_per_s" for case in cases)
    places = ", ".join(platforms)
    of = counted(len(material.frame), "cache configuration")
    sizes = max((len(case.conditions) for case in cases), default=0)
    if sizes:
        wanted = "decode fastest" if decodes else "hit most"
        return f"Which policies {wanted} at each of {sizes} capacities for {', '.join(models)} on {places}?"
    return f"Which of {of} {'decodes fastest' if decodes else 'hits most'} for {', '.join(models)} on {places}?"


def _model_of(material: Material, case: Case) -> str:
    """Return the model's name, or the trace's where the model has none."""
    name = str(case.shared["model"])
    return material.sources[case.shared["trace"]].name if name == Provenance().model else name


def _trace(material: Material, digest: str) -> dict[str, Any]:
    return {"digest": digest, "name": material.sources[digest].name}


def _values(found: Sequence[Any]) -> list[Any]:
    """Return distinct values, numbers by size and texts by name."""
    return sorted(set(found), key=lambda value: (value is None, _size(value), str(value)))


def _size(value: Any) -> float:
    """Return the leading number of a capacity, so that 5% sorts before 25%."""
    text = str(value)
    digits = next((text[:end] for end in range(len(text), 0, -1) if text[:end].replace(".", "", 1).isdecimal()), "")
    return float(digits) if digits else float("inf")


# Warnings


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
        *caution_lines([dict(trace) for trace in traces]),
        *(of_checks(material.checks, candidates_of(material.frame)) if material.checks else []),
    ]
    return list(dict.fromkeys(said))


def _synthetic(material: Material) -> list[str]:
    """Name synthetic routing of the results, or of the traces if there are curves only."""
    if not material.frame.is_empty():
        return routing_of(material.frame)
    models = material.curves["model"].unique().to_list()
    known = [synthetic(source.trace.header.provenance) for source in material.sources.values() if source.trace]
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
    rows, about = tidied(material.frame).sort("capacity_bytes", "identity"), pl.col("about").struct
    warned = dict(material.frame.select(about.field("identity"), about.field("warning")).iter_rows())
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
    return [_trace_of(digest, source) for digest, source in sorted(material.sources.items())]


def _trace_of(digest: str, source: Source) -> dict[str, Any]:
    named = {"digest": digest, "name": source.name}
    if source.trace is None:
        return named | {"missing": source.missing, "figures": {}, "layers": [], "findings": []}
    found, findings = summarise(source.trace), examine(source.trace)
    return named | {
        "missing": "",
        "figures": _statistics(source.trace, found),
        "layers": [
            {"layer": at, "reuse": layer.reuse, "entropy": layer.entropy, "busiest/mean": layer.imbalance}
            | {f"recall +{depth}": share for depth, share in layer.recall.items()}
            for at, layer in enumerate(found.layers)
        ],
        "findings": [{"level": finding.level, "check": finding.check, "text": finding.text} for finding in findings],
        "complete": source.trace.complete,
    }


def _statistics(trace: Trace, found: Summary) -> dict[str, Any]:
    geometry, depths = found.geometry, found.layers[0].recall
    recall = {
        f"look-ahead recall, {depth} layer{'s' * (depth > 1)} on": _share(
            fmean(layer.recall[depth] for layer in found.layers if depth in layer.recall)
        )
        for depth in depths
    }
    return {
        "model": trace.header.provenance.model,
        "experts": f"{geometry.layers} MoE layers, top-{geometry.k} of {geometry.experts}",
        "bytes of all experts": f"{found.bytes_of_experts:,}",
        "requests": f"{found.requests:,}",
        "tokens": f"{found.tokens:,}: {found.prompt_tokens:,} of prompts, {found.decode_tokens:,} decoded",
        "holds": ", ".join(found.capabilities),
        "reuse by the next token": f"{_share(found.reuse)}; {_share(found.chance)} by chance",
        "evenness of use (entropy)": f"{fmean(layer.entropy for layer in found.layers):.3f}",
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
    about = material.frame["about"].struct.unnest()
    facts = [name for name in ("seconds", "calibration", "uncalibrated", "band") if name in about.columns]
    rows = about.select(facts).insert_column(0, material.frame["config"].struct.field("platform"))
    every = rows.unique(maintain_order=True).sort("platform", maintain_order=True).iter_rows(named=True)
    return {row["platform"]: seconds_in_words(row, "calibrated: ") for row in every}


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
        whole = isinstance(figures, float) and figures.is_integer() and abs(figures) < 1e18
        yield inside, cell(int(figures)) if whole else cell(figures)


def versions_of_semantics(material: Material) -> list[int]:
    """Return the semantics versions of all results; several cannot be compared."""
    known = "semantics" in fields(material.frame) if not material.frame.is_empty() else False
    return sorted(set(tidied(material.frame)["semantics"].to_list())) if known else []


# Method

OF_METHOD = ("contract", "passes", "scope", "reset", "seed")
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
    table = tidied(material.frame)
    return {name: _all(map(str, table[name].to_list())) for name in OF_METHOD if name in table.columns}


def _versions(provenance: Any) -> str:
    versions = dict(provenance.get("versions") or {})
    commit = f" ({provenance['commit'][:12]})" if provenance.get("commit") else ""
    first = f"moereplay {versions.pop('moereplay', 'unknown')}{commit}"
    return ", ".join([first, *(f"{name} {version}" for name, version in sorted(versions.items()) if version)])


def _all(texts: Any) -> str:
    found: Sequence[str] = sorted(set(texts))
    return "; ".join(found) or "unknown"
