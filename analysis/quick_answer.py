"""The quick answer of `recommend` in sentences and tables, from `sweeps/recommend/quick_document.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moereplay.analysis.drafting_answer import drafting_lines, drafts_assumed
from moereplay.analysis.placements_answer import placement_lines
from moereplay.analysis.tables import table
from moereplay.traces.texts import digits, percent, size
from moereplay.traces.units import GB

Document = Mapping[str, Any]
SHOWN = 6  #: upgrades
FAR = 1.5  #: times the tokens/s of the best that is borne out by runs
MS = 1e6
PARTS = {"compute": "compute", "cpu": "CPU", "link": "link", "disk": "disk", "sync": "launches and waiting"}
HOLDS = {
    "layers": "whole layers",
    "static": "the most used experts of each layer",
    "lru": "the last used experts of each layer",
    "lru in one pool": "the last used experts",
}
READS = {"mmap": "by page faults", "direct": "whole experts at a time"}
MISSES = {
    "cpu": "the CPU computes the others",
    "fetch": "the others are fetched",
    "split": "link and CPU divide the others",
}


def lines(found: Document) -> Iterator[str]:
    """Yield every sentence and table of the answer."""
    best, machine = found["best"], found["machine"]
    yield f"{found['name']} on {_machine(machine)}"
    yield f"{found['grade'].upper()}: {found['routing']}"
    yield ""
    yield f"  {_speed(best)}   {best['engine']}: {best['flags']}"
    yield f"  {_fast(found, best)}"
    if best["experts_ram_bytes"]:
        experts = f"{_gb(best['experts_ram_bytes'])} experts"
        of = f" of {_gb(machine['ram_bytes'])}" if machine["ram_bytes"] else ""
        yield f"  RAM {_gb(best['peak_ram_bytes'])}{of}: {experts}, 2 GB for the system (assumed)"
    if best["experts_disk_bytes"]:
        yield f"  disk: {_gb(best['experts_disk_bytes'])} of experts are in no memory"
    yield f"  a token takes {_ms(best)}"
    yield f"  {_compared(best)}"
    yield from _faster(found, best)
    yield from (f"warning: {each}" for each in found["warnings"])
    if found.get("decoding"):
        yield from drafting_lines(found["decoding"], machine["fast_tier"])
    yield ""
    yield f"binds: {best['binds']}"
    if found["more"]:
        yield table([_more(each) for each in found["more"][:SHOWN]], "what more would buy:")
    else:
        yield "no single part that is larger or twice as fast gains more than 1%"
    yield from _pays(found)
    yield from placement_lines(found)
    yield ""
    yield table(
        [_engine(each) for each in found["by_engine"]],
        "best setting of each engine (tokens/s: least, middle and most over the routings; hit: of a token's experts; "
        "runs: measured ones, compared):",
    )
    if len(found["ladder"]["steps"]) > 1:
        yield table([_step(each) for each in found["ladder"]["steps"]], f"steps of {found['ladder']['knob']}:")
    assumed = [*machine["assumed"], *found["assumed"], *drafts_assumed(found.get("decoding"))]
    if assumed:
        yield f"assumed: {'; '.join(assumed)}"


def _compared(best: Document) -> str:
    """Say how far off the form was in measured runs of the engine, and the speed if it is as far off here."""
    tried = best["tried"]
    if not tried:
        return "not compared with measured runs of this engine"
    then = _number(best["tokens_per_s"]["middle"] / tried["median"])
    return f"{best['tried_in_words']} of this engine, median {tried['median']:.2f}: then {then} tokens/s"


def _faster(found: Document, best: Document) -> Iterator[str]:
    """Yield the engine that is fastest by the closed form alone, if it is far ahead."""
    first = max(found["by_engine"], key=lambda each: each["tokens_per_s"]["middle"])
    if first["tokens_per_s"]["middle"] > FAR * best["tokens_per_s"]["middle"]:
        borne = "in runs it was slower" if first["tried"] else "compared with no run"
        yield f"  faster by this form, {borne}: {first['engine']}, {_speed(first)}: {first['flags']}"


def _machine(machine: Document) -> str:
    fast = f"{machine['name']}, {_gb(machine['fast_bytes'])} {machine['fast_tier']}"
    if machine["fast_bytes_per_s"]:
        fast += f" at {machine['fast_bytes_per_s'] / GB:.4g} GB/s"
    parts = [fast]
    if machine["link_bytes_per_s"]:
        parts.append(f"link {machine['link_bytes_per_s'] / GB:.3g} GB/s")
    if machine["ram_bytes"]:
        rate = f" at {machine['ram_bytes_per_s'] / GB:.3g} GB/s" if machine["ram_bytes_per_s"] else ""
        parts.append(f"RAM {_gb(machine['ram_bytes'])}{rate}")
    if machine["disk_bytes_per_s"]:
        parts.append(f"disk {machine['disk_bytes_per_s'] / GB:.3g} GB/s")
    return ", ".join(parts)


def _gb(count: float) -> str:
    return size(int(count))


def _speed(each: Document) -> str:
    found = each["tokens_per_s"]
    if found["most"] < found["least"] * 1.02:
        return f"{_number(found['middle'])} tokens/s"
    return f"{_number(found['least'])} to {_number(found['most'])} tokens/s"


def _fast(found: Document, best: Document) -> str:
    parts = [f"{_gb(found['model']['dense_bytes'])} dense weights"]
    decoding = found.get("decoding")
    streams = f"{decoding['concurrency']} x " if decoding and decoding["concurrency"] > 1 else ""
    parts.append(f"{_gb(found['kv_bytes'])} KV cache of {streams}{found['context']:,} positions")
    if decoding and decoding["drafts"] and decoding["head_bytes"]:
        parts.append(f"{_gb(decoding['head_bytes'])} layer that drafts")
    parts.append(f"{_gb(found['runtime_bytes'])} runtime")
    held = f"{_gb(best['experts_fast_bytes'])} experts"
    if best["gpu_layers"] is not None:
        held += f" of {best['gpu_layers']} of {found['model']['layers']} layers"
    else:
        share = best["experts_fast_bytes"] / found["model"]["expert_bytes"]
        of = f"{share:.0%} of all, which hold {best['hit_rate']['middle']:.0%} of a {'pass' if decoding else 'token'}'s"
        held += f" ({of if share < 1 else 'all'})"
    name, have = best["fast_tier"], best["fast_tier_bytes"]
    return f"{name} {_gb(best['peak_fast_bytes'])} of {_gb(have)}: {', '.join([*parts, held])}"


def _ms(best: Document) -> str:
    parts = {PARTS[name]: value for name, value in best["parts_ns"].items() if value}
    total = sum(parts.values())
    each = ", ".join(
        f"{_number(value / MS)} {name}" for name, value in sorted(parts.items(), key=lambda part: -part[1])
    )
    return f"{_number(total / MS)} ms: {each}"


def _number(value: float) -> str:
    return digits(value, 3)


def _more(each: Document) -> dict[str, object]:
    return {
        "part": each["what"],
        "tokens/s": _number(each["tokens_per_s"]),
        "gain": percent(each["gain"]),
        "with": each["engine"],
    }


def _pays(found: Document) -> Iterator[str]:
    """Yield whether CPU execution, a cache and prefetch pay, and when another scheme leads."""
    pays = found["pays"]
    if found["best"]["hit_rate"]["least"] >= 1 and not found["best"]["experts_disk_bytes"]:
        yield f"every expert fits into {found['best']['fast_tier']}: no cache, CPU execution or prefetch gains anything"
        return
    if not found["placements"]:
        yield from _gained("computing misses on the CPU", "fetching each", pays["cpu"])
        yield from _gained("a cache of the last used experts", "experts placed for good", pays["cache"])
    prefetch = pays["prefetch"]["gain"]
    if prefetch > 0.01:
        yield f"prefetch: at most {percent(prefetch)} more, if every transfer were hidden; the gain may be zero"
    else:
        yield "prefetch: does not pay, nothing is waited for that it could hide"
    crossings = found["crossings"]
    if len(crossings) > 1 and not found["placements"]:
        steps = [f"{HOLDS[each['holds']]}, {MISSES[each['miss']]} (from {each['share']:.0%})" for each in crossings]
        yield f"by the share of experts that {found['machine']['fast_tier']} holds, fastest are: {'; '.join(steps)}"


def _gained(this: str, other: str, known: Document) -> Iterator[str]:
    if known["gain"] is None:
        return
    reads = [READS[each] for each in known["reads"]]
    by = f"by the fastest engine of each ({'; '.join(known['engines'])})"
    by += f"; the first reads the disk {reads[0]}, the other {reads[1]}" if reads else ""
    least, most = known["least"], known["most"]
    if max(abs(least), abs(most)) <= 0.01:
        yield f"{this}: as fast as {other}"
    elif known["pays"] is None:
        yield f"{this}: depends on the routing, {_change(least)} to {_change(most)} than {other}, {by}"
    else:
        low, high = map(percent, sorted((abs(least), abs(most))))
        across = low if low == high else f"{low} to {high}"
        verdict = f"pays, {across} more" if known["pays"] else f"does not pay, {across} less"
        yield f"{this}: {verdict} than {other}, {by}"


def _change(gain: float) -> str:
    return f"{percent(abs(gain))} {'more' if gain > 0 else 'less'}"


def _engine(each: Document) -> dict[str, object]:
    tried = each["tried"]
    return {
        "engine": each["engine"],
        "flags": each["flags"],
        "tokens/s": _three(each),
        "hit": f"{each['hit_rate']['middle']:.0%}",
        "runs": tried["runs"] if tried else "none",
    }


def _step(each: Document) -> dict[str, object]:
    fast = f"{each['fast_tier']} GB" if each["peak_ram_bytes"] else "GB"
    row: dict[str, object] = {"flags": each["flags"], "tokens/s": _three(each)}
    row[fast] = f"{each['peak_fast_bytes'] / GB:.3g}"
    return row | ({"RAM GB": f"{each['peak_ram_bytes'] / GB:.3g}"} if each["peak_ram_bytes"] else {})


def _three(each: Document) -> str:
    """Return the least, the median and the most tokens/s, or the one that all routings give."""
    speeds = [_number(each["tokens_per_s"][name]) for name in ("least", "middle", "most")]
    return " ".join(speeds) if len(set(speeds)) > 1 else speeds[0]
