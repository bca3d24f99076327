"""Lines above a table of replays: label, trace, platform, capacities in every form, warnings."""

from __future__ import annotations

from collections.abc import Sequence

from results.labels import ESTIMATE
from results.result import Result
from results.settings import EXPERTS, POLICIES, SETTINGS
from traces.schema import Trace

#: Settings that are echoed beside the policies; capacity has lines of its own, and lists of experts are long.
OTHERS = [each.name for each in SETTINGS if each.name not in (*POLICIES, "capacity") and each.kind != EXPERTS]


def heading(trace: Trace, results: Sequence[Result]) -> list[str]:
    """Lines that say what was replayed, and how to read it."""
    label = "SIMULATED, open-loop" if any("open-loop" in result.about["label"] for result in results) else "SIMULATED"
    lines = [
        f"{label}: {trace.header.provenance.model}, {trace.requests:,} requests, {trace.tokens:,} tokens, "
        f"trace {trace.digest[:12]}",
        *settings(results),
        *_seconds(results),
    ]
    if "open-loop" in label:
        lines.append(
            "open-loop: the recorded logits do not react to a changed mixture; a live run measures what that costs"
        )
    return [*lines, ""]


def settings(results: Sequence[Result]) -> list[str]:
    """Every setting, the capacities in every form with their warnings, and what is cached beside them."""
    return [
        _echo(results, POLICIES),
        _echo(results, OTHERS),
        *_each_capacity(results),
        *_each_side_buffer(results),
    ]


def _seconds(results: Sequence[Result]) -> list[str]:
    """What the times of each platform rest on."""
    platforms = {
        (result.config["platform"], result.about.get("seconds"), result.about.get("calibration")): None
        for result in results
    }
    lines = []
    for platform, seconds, calibration in platforms:
        of = f"calibrated, {calibration}" if seconds == "calibrated" else ESTIMATE
        lines.append(f"seconds of {platform}: {of}")
    return lines


def _each_capacity(results: Sequence[Result]) -> list[str]:
    forms = dict[tuple[str, str], dict[str, None]]()  # with each warning once: it may be of one platform alone
    for result in results:
        warnings = forms.setdefault((result.config["capacity"], result.about["capacity_forms"]), {})
        warnings |= {result.about["warning"]: None} if result.about["warning"] else {}
    lines = []
    for (capacity, text), warnings in forms.items():
        lines += [f"capacity {capacity}: {text}", *(f"  warning: {warning}" for warning in warnings)]
    return lines


def _each_side_buffer(results: Sequence[Result]) -> list[str]:
    """Side buffers, whose bytes are outside of the capacity."""
    held = {result.about["policies"]["prefetch"]: result.about["side_bytes"] for result in results}
    return [f"side buffers of {prefetch}: {size:,} bytes more" for prefetch, size in held.items() if size]


def _echo(results: Sequence[Result], names: Sequence[str]) -> str:
    """Each setting with all its values."""
    values = {name: list(dict.fromkeys(str(result.config[name]) for result in results)) for name in names}
    return "; ".join(f"{name} {', '.join(each)}" for name, each in values.items())
