"""What stands above a table of replays: trace, machine, capacities in every form, warnings, the label."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.result import Result
from traces.schema import Trace

#: Settings that a reader must know even when they do not vary.
ALWAYS = ("platform", "contract", "scope", "passes", "reset")


def heading(trace: Trace, results: Sequence[Result]) -> list[str]:
    """Lines that say what was replayed, and how to read it."""
    label = "SIMULATED, open-loop" if any("open-loop" in result.about["label"] for result in results) else "SIMULATED"
    lines = [
        f"{label}: {trace.header.provenance.model}, {trace.requests:,} requests, {trace.tokens:,} tokens, "
        f"trace {trace.digest[:12]}",
        "; ".join(f"{name} {', '.join(_values(results, name))}" for name in ALWAYS),
        *_each_capacity(results),
    ]
    if "open-loop" in label:
        lines.append(
            "open-loop: the recorded logits do not react to a changed mixture; a live run measures what that costs"
        )
    return [*lines, ""]


def _each_capacity(results: Sequence[Result]) -> list[str]:
    forms = {(result.config["capacity"], result.about["capacity_forms"]): result.about["warning"] for result in results}
    lines = []
    for (capacity, text), warning in forms.items():
        lines.append(f"capacity {capacity}: {text}")
        if warning:
            lines.append(f"  warning: {warning}")
    return lines


def _values(results: Sequence[Result], name: str) -> list[str]:
    return list(dict.fromkeys(str(result.config[name]) for result in results))
