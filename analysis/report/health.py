"""What a trace is like: how much of it there is, what it holds, how its routing behaves, and what checks found."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from moereplay.analysis.report.material import Material, Source
from moereplay.traces.schema import Trace
from moereplay.traces.summary import Summary, summarise
from moereplay.traces.validator import Finding, examine


def health(material: Material) -> list[dict[str, Any]]:
    """Of every trace of the results. Raises TraceError on damaged rows."""
    return [_of(digest, source) for digest, source in sorted(material.sources.items())]


def _of(digest: str, source: Source) -> dict[str, Any]:
    named = {"digest": digest, "name": source.name}
    if source.trace is None:
        return named | {"missing": source.missing, "figures": {}, "layers": [], "findings": []}
    summary, findings = summarise(source.trace), examine(source.trace)
    return named | {
        "missing": "",
        "figures": _figures(source.trace, summary),
        "layers": _layers(summary),
        "findings": [_finding(each) for each in findings],
        "complete": source.trace.complete,
    }


def _figures(trace: Trace, summary: Summary) -> dict[str, Any]:
    geometry, depths = summary.geometry, summary.layers[0].recall
    recall = {
        f"look-ahead recall, {depth} layer{'s' * (depth > 1)} on": _share(_recall(summary, depth)) for depth in depths
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


def _recall(summary: Summary, depth: int) -> float:
    return fmean(layer.recall[depth] for layer in summary.layers if depth in layer.recall)


def _layers(summary: Summary) -> list[dict[str, Any]]:
    """A row per layer: reuse, evenness of use, busiest over mean, and look-ahead recall where it was recorded."""
    return [
        {"layer": at, "reuse": layer.reuse, "entropy": layer.entropy, "busiest/mean": layer.imbalance}
        | {f"recall +{depth}": share for depth, share in layer.recall.items()}
        for at, layer in enumerate(summary.layers)
    ]


def _finding(found: Finding) -> dict[str, str]:
    return {"level": found.level, "check": found.check, "text": found.text}


def cautions(found: Sequence[dict[str, Any]]) -> list[str]:
    """Warnings and errors of the checks, and traces that are not complete or not at hand."""
    said = []
    for each in found:
        if each["missing"]:
            said.append(f"trace {each['digest'][:12]} was not looked at: {each['missing']}")
        elif not each["complete"]:
            said.append(f"trace {each['digest'][:12]} is not complete: only committed requests were replayed")
        said += [f"trace {each['name']}: {one['text']}" for one in each["findings"] if one["level"] != "ok"]
    return said


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"
