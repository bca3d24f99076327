"""Lines above a table of replays: label, trace, platform, capacities in every form, warnings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moereplay.analysis.tables import counted
from moereplay.results.remarks import assumptions, seconds_in_words, with_routing
from moereplay.results.result import Result
from moereplay.results.settings import EXPERTS, POLICIES, SETTINGS
from moereplay.traces.schema import Trace
from moereplay.traces.synthetic import synthetic

#: Settings that are echoed beside the policies; capacity has lines of its own, and lists of experts are long.
OTHERS = [each.name for each in SETTINGS if each.name not in (*POLICIES, "capacity") and each.kind != EXPERTS]

OPEN_LOOP = "open-loop: the recorded logits do not react to a changed mixture; a live run measures what that costs"


def heading(trace: Trace, results: Sequence[Result]) -> list[str]:
    """Lines that say what was replayed, and how to read it."""
    label = "SIMULATED, open-loop" if any("open-loop" in result.about["label"] for result in results) else "SIMULATED"
    lines = [
        *simulated(trace, label),
        *settings(results),
        *_seconds(results),
        *dict.fromkeys(filter(None, (result.about.get("assumed") for result in results))),
    ]
    return [*lines, *([OPEN_LOOP] if "open-loop" in label else []), ""]


def simulated(trace: Trace, label: str = "SIMULATED") -> list[str]:
    """The first lines of a table over one trace: what it is of, and that its routing is synthetic, if so."""
    made = synthetic(trace.header.provenance)
    return [f"{with_routing(label, made)}: {of_trace(trace)}", *assumptions([made])]


def of_trace(trace: Trace) -> str:
    """Of what model, how much, and which."""
    much = f"{counted(trace.requests, 'request')}, {counted(trace.tokens, 'token')}"
    return f"{trace.header.provenance.model}, {much}, trace {trace.digest[:12]}"


def settings(results: Sequence[Result]) -> list[str]:
    """Every setting, the capacities in every form with their warnings, and what is cached beside them."""
    return [
        _echo(results, POLICIES),
        _echo(results, OTHERS),
        *capacities([(result.config, result.about) for result in results]),
        *_each_side_buffer(results),
    ]


def _seconds(results: Sequence[Result]) -> list[str]:
    """What the times of the platforms rest on, those alike in one line."""
    platforms: dict[str, dict[str, None]] = {}
    for result in results:
        platforms.setdefault(seconds_in_words(result.about), {})[result.config["platform"]] = None
    return [f"seconds of {', '.join(names)}: {of}" for of, names in platforms.items()]


def capacities(cached: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    """From (configuration, `about`) of each: the capacities in every other form, then each warning once."""
    forms = dict.fromkeys((config["capacity"], about["capacity_forms"]) for config, about in cached)
    return [
        *(f"capacity {capacity}: {text.removeprefix(f'{capacity} = ')}" for capacity, text in forms),
        *warnings((config["capacity"], about["warning"]) for config, about in cached),
    ]


def warnings(found: Iterable[tuple[str, str | None]]) -> list[str]:
    """From (capacity, warning) of each configuration: each warning once, with the capacities that it is of."""
    capacities: dict[str, dict[str, None]] = {}  # one may be of one platform alone
    for capacity, warning in found:
        if warning:
            capacities.setdefault(warning, {})[capacity] = None
    return [f"warning for {', '.join(texts)}: {warning}" for warning, texts in capacities.items()]


def _each_side_buffer(results: Sequence[Result]) -> list[str]:
    """Side buffers, whose bytes are outside of the capacity."""
    held = {result.about["policies"]["prefetch"]: result.about["side_bytes"] for result in results}
    return [
        f"side buffers of {prefetch}: {size:,} bytes beside the capacity" for prefetch, size in held.items() if size
    ]


def _echo(results: Sequence[Result], names: Sequence[str]) -> str:
    """Each setting with all its values."""
    values = {name: list(dict.fromkeys(str(result.config[name]) for result in results)) for name in names}
    return "; ".join(f"{name} {', '.join(each)}" for name, each in values.items() if each != [""])
