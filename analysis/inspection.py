"""Output of `inspect`: the validator's findings and the statistics of a trace's routing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from moereplay.analysis.tables import table
from moereplay.results.remarks import assumptions
from moereplay.traces.schema import Geometry, Trace
from moereplay.traces.summary import LayerSummary, Summary, synthetic
from moereplay.traces.texts import counted
from moereplay.traces.validator import Finding

MOST_SIZES = 4  #: of experts, that are listed


def document(trace: Trace, summary: Summary, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return everything as one JSON-ready document."""
    return {
        "digest": trace.digest,
        "complete": trace.complete,
        "header": trace.header.model_dump(mode="json"),
        "summary": asdict(summary) | {"geometry": summary.geometry.model_dump(mode="json")},
        "findings": [asdict(finding) for finding in findings],
    }


def render(trace: Trace, summary: Summary, findings: Sequence[Finding]) -> list[Any]:
    """Return headings, the per-layer table and the findings, ready to print."""
    return [
        *_heading(trace, summary),
        table([_layer_row(index, layer) for index, layer in enumerate(summary.layers)]),
        *_legend(summary),
        *(f"{finding.level:8} {finding.check}: {finding.text}" for finding in findings),
    ]


def _heading(trace: Trace, summary: Summary) -> list[str]:
    geometry, provenance = summary.geometry, trace.header.provenance
    state = "" if trace.complete else ", not complete: only committed requests are shown"
    return [
        f"{provenance.model}: {geometry.layers} MoE layers, top-{geometry.k} of {geometry.experts} experts, "
        f"{summary.bytes_of_experts / 2**30:,.2f} GiB of experts at {geometry.expert_bits:g} bits",
        *_each(geometry),
        f"{counted(summary.requests, 'request')}, {counted(summary.tokens, 'token')} "
        f"({summary.prompt_tokens:,} of prompts){state}",
        f"holds {', '.join(summary.capabilities)}; digest {trace.digest[:16]}",
        *_drafts(trace),
        *assumptions([synthetic(provenance)]),
        *(f"note: {note}" for note in provenance.notes),
        "",
    ]


def _each(geometry: Geometry) -> list[str]:
    """Return the sizes of an expert where they differ, and what slots of the largest would take."""
    sizes = Counter(geometry.rows.bytes.tolist())
    if len(sizes) == 1:
        return []
    each = ", ".join(f"{many:,} of {bytes_ / 2**20:.4g} MiB" for bytes_, many in sorted(sizes.items())[:MOST_SIZES])
    more = f", ... ({len(sizes)} sizes)" if len(sizes) > MOST_SIZES else ""
    padded = max(sizes) * geometry.layers * geometry.experts / 2**30
    return [f"experts: {each}{more}; {padded:,.2f} GiB in slots of the largest"]


def _drafts(trace: Trace) -> list[str]:
    """Return the size of the record of drafts, if there is one."""
    if (passes := trace.verified) is None:
        return []
    some, many, right = int((passes.many > 0).sum()), int(passes.many.sum()), int(passes.right.sum())
    verified = f"{counted(many, 'draft')} of which {right:,} were accepted"
    return [f"record of drafts (--draft recorded): {some:,} decode passes verified {verified}"]


def _legend(summary: Summary) -> list[str]:
    return [
        f"reuse: share of a token's experts that the previous token used; {summary.chance:.3f} by chance",
        "entropy: 1 if all experts are used equally; busiest/mean: uses of the busiest expert / mean uses",
        *(
            ["distinct in N: mean number of distinct experts over N consecutive tokens"]
            if summary.layers[0].distinct
            else []
        ),
        *(
            ["recall +D: share of the experts D layers ahead that the look-ahead of this layer predicts"]
            if summary.layers[0].recall
            else []
        ),
        "",
    ]


def _layer_row(index: int, layer: LayerSummary) -> dict[str, object]:
    row: dict[str, object] = {
        "layer": index,
        "reuse": layer.reuse,
        "entropy": layer.entropy,
        "busiest/mean": layer.imbalance,
    }
    row |= {f"distinct in {window}": mean for window, mean in layer.distinct.items()}
    return row | {f"recall +{depth}": share for depth, share in layer.recall.items()}
