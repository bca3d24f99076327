"""What a reader must know before believing a figure: every warning of `replay`, `sweep show` and the trace's checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moereplay.analysis.bootstrap import FEW
from moereplay.analysis.checks import candidates_of, summary
from moereplay.analysis.heading import OPEN_LOOP, warnings
from moereplay.analysis.report import health, machines
from moereplay.analysis.report.cases import Case, title
from moereplay.analysis.report.material import Material
from moereplay.analysis.sentences import untimed
from moereplay.analysis.tables import counted
from moereplay.results.read import label_of, routing_of, runs
from moereplay.results.remarks import assumptions
from moereplay.traces.synthetic import named_synthetic, synthetic


def cautions(
    material: Material,
    cases: Sequence[Case],
    traces: Sequence[Mapping[str, Any]],
    platforms: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Each once, in the order of their weight."""
    said = [
        *_synthetic(material),
        *_incomplete(material),
        *_of_rows(material),
        *machines.estimates(platforms),
        *machines.dense_weights(material),
        *_samples(cases),
        *_untimed(cases),
        *material.remarks,
        *health.cautions([dict(each) for each in traces]),
        *([] if material.frame.is_empty() else summary(material.checks, candidates_of(material.frame))),
    ]
    return list(dict.fromkeys(said))


def _synthetic(material: Material) -> list[str]:
    """That figures rest on synthetic routing, if so: of results, or of traces at hand where there are curves alone."""
    if not material.frame.is_empty():
        return routing_of(material.frame)
    models = material.curves["model"].unique().to_list()
    known = [synthetic(each.trace.header.provenance) for each in material.sources.values() if each.trace]
    return assumptions(known) or assumptions(map(named_synthetic, models))


def _incomplete(material: Material) -> list[str]:
    versions = machines.versions_of_semantics(material)
    mixed = f"results of semantics {', '.join(map(str, versions))} are together here, and cannot be compared"
    failed = f"{counted(material.failed, 'configuration')} without a result: `moereplay sweep show --errors` says why"
    return [*([failed] if material.failed else []), *([mixed] if len(versions) > 1 else [])]


def _of_rows(material: Material) -> list[str]:
    """Of capacities, and of routing that cannot react."""
    if material.frame.is_empty():
        return []
    rows = runs(material.frame).sort("capacity_bytes", "identity")
    warned = {about["identity"]: about.get("warning") for about in material.frame["about"].to_list()}
    said = warnings(
        (capacity, warned[identity]) for capacity, identity in rows.select("capacity", "identity").iter_rows()
    )
    return [*said, *([OPEN_LOOP] if "open-loop" in label_of(material.frame) else [])]


def _samples(cases: Sequence[Case]) -> list[str]:
    """Too few requests, none kept, or such as are not independent."""
    few: dict[int, list[str]] = {}
    for case in (each for each in cases if each.requests < FEW and not each.synthetic):
        few.setdefault(case.requests, []).append(title(case, cases))
    said = [_few(requests, "; ".join(of) if len(cases) > 1 else "") for requests, of in sorted(few.items())]
    if any(case.shares_a_cache and case.requests > 1 for case in cases):
        said.append("intervals take requests to be independent, but these share a cache (--reset request empties it)")
    return said


def _few(requests: int, of: str) -> str:
    where = f"{of}: " if of else ""
    if not requests:
        return f"{where}no rows of requests, so no telling how sure a difference is: `requests = true` keeps them"
    if requests == 1:
        return f"{where}one request, which says nothing of others: no intervals"
    return f"{where}{requests} requests, fewer than ten: intervals are rough"


def _untimed(cases: Sequence[Case]) -> list[str]:
    lines = untimed([entry for case in cases for entry in case.entries])
    return [" ".join(line.strip() for line in lines)] if lines else []
