"""The quick answer of `recommend` in sentences and tables, from `sweeps/recommend/quick_document.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moereplay.analysis.drafting_answer import drafting_lines, drafts_assumed, span_of, speeds, three
from moereplay.analysis.tables import table
from moereplay.traces.texts import between, counted, digits, percent, size, sold
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
    "split": "link and CPU share the others",
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
        of = f" of {_gb(machine['ram_bytes'])} (a {sold(machine['ram_bytes'])} kit)" if machine["ram_bytes"] else ""
        yield f"  RAM {_gb(best['peak_ram_bytes'])}{of}: {experts}, 2 GB for the system (assumed)"
    if best["experts_disk_bytes"]:
        yield f"  disk: {_gb(best['experts_disk_bytes'])} of experts do not fit in memory"
    yield f"  time per token: {_ms(best)}"
    yield f"  {_compared(best)}"
    yield from _basis(machine)
    yield from _faster(found, best)
    yield from (f"warning: {each}" for each in found["warnings"])
    if found.get("decoding"):
        yield from drafting_lines(found["decoding"], machine["fast_tier"])
    yield ""
    yield f"bottleneck: {best['binds']}"
    if found["more"]:
        yield table([_more(each) for each in found["more"][:SHOWN]], "gain from upgrades:")
    else:
        yield "no single upgrade (larger, or twice as fast) gains more than 1%"
    yield from _pays(found)
    yield from placement_lines(found)
    yield ""
    yield table(
        [_engine(each) for each in found["by_engine"]],
        "best settings of each engine (tokens/s: lowest, middle and highest over the routings; hit: of a token's "
        "experts; runs: number of measured runs compared):",
    )
    if found["not_listed"]:
        yield f"not listed: {', '.join(f'{name} ({why})' for name, why in found['not_listed'].items())}"
    if len(found["ladder"]["steps"]) > 1:
        yield table([_step(each) for each in found["ladder"]["steps"]], f"values of {found['ladder']['knob']}:")
    assumed = [*machine["assumed"], *found["assumed"], *drafts_assumed(found.get("decoding"))]
    if assumed:
        yield f"assumed: {'; '.join(assumed)}"


def _basis(machine: Document) -> Iterator[str]:
    """Say which runs the platform's figures were fitted on, if any, and whether they hold here."""
    if machine["calibrated"]:
        yield "  platform: " + "; ".join(filter(None, (f"calibrated, {machine['calibration']}", machine["band"])))
    elif machine["uncalibrated"]:
        yield f"  platform: {machine['uncalibrated']}"


def _compared(best: Document) -> str:
    """Say how far off the form was in measured runs of the engine, and the speed if it is as far off here."""
    tried = best["tried"]
    if not tried:
        return "not compared with measured runs: none of this engine with this placement is known"
    then = three(best["tokens_per_s"]["middle"] / tried["median"])
    times = between(f"{tried['least']:.2f}", f"{tried['most']:.2f}")
    whose = f" ({tried['population']})" if tried.get("population") else ""
    on_disk = ", none of them with so much on the disk" if best["experts_disk_bytes"] else ""
    return (
        f"{counted(tried['runs'], 'measured run')} of {best['engine']} with this placement{whose} took {times} times "
        f"this time, half of them {tried['median']:.2f} times or more{on_disk}: expect {then} tokens/s"
    )


def _faster(found: Document, best: Document) -> Iterator[str]:
    """Yield the engine that is fastest by the closed form alone, if it is far ahead."""
    first = max(found["by_engine"], key=lambda each: each["tokens_per_s"]["middle"])
    if first["tokens_per_s"]["middle"] > FAR * best["tokens_per_s"]["middle"]:
        borne = "not compared with runs"
        if tried := first["tried"]:
            borne = f"by the median of its runs {three(first['tokens_per_s']['middle'] / tried['median'])}"
        yield f"  faster by the closed form: {first['engine']}, {_speed(first)} ({borne}): {first['flags']}"


def _machine(machine: Document) -> str:
    fast = f"{machine['name']}, {sold(machine['fast_bytes'])} {machine['fast_tier']}"
    if machine["fast_bytes_per_s"]:
        fast += f" at {machine['fast_bytes_per_s'] / GB:.4g} GB/s"
    parts = [fast]
    if machine["link_bytes_per_s"]:
        parts.append(f"link {machine['link_bytes_per_s'] / GB:.3g} GB/s")
    if machine["ram_bytes"]:
        rate = f" at {machine['ram_bytes_per_s'] / GB:.3g} GB/s" if machine["ram_bytes_per_s"] else ""
        parts.append(f"RAM {sold(machine['ram_bytes'])}{rate}")
    if machine["disk_bytes_per_s"]:
        parts.append(f"disk {machine['disk_bytes_per_s'] / GB:.3g} GB/s")
    return ", ".join(parts)


def _gb(count: float) -> str:
    return size(int(count))


def _speed(each: Document) -> str:
    found = each["tokens_per_s"]
    if found["most"] < found["least"] * 1.02:
        return f"{three(found['middle'])} tokens/s"
    return f"{three(found['least'])} to {three(found['most'])} tokens/s"


def _fast(found: Document, best: Document) -> str:
    parts = [f"{_gb(found['model']['dense_bytes'])} dense weights"]
    decoding = found.get("decoding")
    streams = f"{decoding['concurrency']} x " if decoding and decoding["concurrency"] > 1 else ""
    parts.append(f"{_gb(found['kv_bytes'])} KV cache of {streams}{found['context']:,} positions")
    if decoding and decoding["drafts"] and decoding["head_bytes"]:
        parts.append(f"{_gb(decoding['head_bytes'])} draft layer")
    parts.append(f"{_gb(found['runtime_bytes'])} runtime")
    held = f"{_gb(best['experts_fast_bytes'])} experts"
    if best["gpu_layers"] is not None:
        held += f" of {best['gpu_layers']} of {found['model']['layers']} layers"
    else:
        share = best["experts_fast_bytes"] / found["model"]["expert_bytes"]
        of = f"{share:.0%} of all, which hold {best['hit_rate']['middle']:.0%} of a {'pass' if decoding else 'token'}'s"
        held += f" ({of if share < 1 else 'all'})"
    name, have = best["fast_tier"], best["fast_tier_bytes"]
    what = f"a {sold(have)} card" if best["peak_ram_bytes"] else f"{sold(have)} as sold"
    return f"{name} {_gb(best['peak_fast_bytes'])} of {_gb(have)} ({what}): {', '.join([*parts, held])}"


def _ms(best: Document) -> str:
    parts = {PARTS[name]: value for name, value in best["parts_ns"].items() if value}
    total = sum(parts.values())
    each = ", ".join(f"{three(value / MS)} {name}" for name, value in sorted(parts.items(), key=lambda part: -part[1]))
    return f"{three(total / MS)} ms: {each}"


def _more(each: Document) -> dict[str, object]:
    return {
        "part": each["what"],
        "tokens/s": three(each["tokens_per_s"]),
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
        yield from _gained("a cache of the last used experts", "a fixed placement", pays["cache"])
    prefetch = pays["prefetch"]["gain"]
    if prefetch > 0.01:
        yield f"prefetch: at most {percent(prefetch)} more, if every transfer were hidden; the gain may be zero"
    else:
        yield "prefetch: does not pay, because no transfer stalls compute"
    crossings = found["crossings"]
    if len(crossings) > 1 and not found["placements"]:
        steps = [f"{HOLDS[each['holds']]}, {MISSES[each['miss']]} (from {each['share']:.0%})" for each in crossings]
        yield f"fastest scheme by the share of experts in {found['machine']['fast_tier']}: {'; '.join(steps)}"


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
        yield f"{this}: {_verdict(known)} than {other}, {by}"


def _verdict(known: Document) -> str:
    """Return: pays, 12% to 20% more."""
    across = span_of(known)
    return f"pays, {across} more" if known["pays"] else f"does not pay, {across} less"


def _change(gain: float) -> str:
    return f"{percent(abs(gain))} {'more' if gain > 0 else 'less'}"


def _engine(each: Document) -> dict[str, object]:
    tried = each["tried"]
    return {
        "engine": each["engine"],
        "flags": each["flags"],
        "tokens/s": speeds(each["tokens_per_s"]),
        "hit": f"{each['hit_rate']['middle']:.0%}",
        "runs": tried["runs"] if tried else "none",
    }


def _step(each: Document) -> dict[str, object]:
    fast = f"{each['fast_tier']} GB" if each["peak_ram_bytes"] else "GB"
    row: dict[str, object] = {"flags": each["flags"], "tokens/s": speeds(each["tokens_per_s"])}
    row[fast] = f"{each['peak_fast_bytes'] / GB:.3g}"
    return row | ({"RAM GB": f"{each['peak_ram_bytes'] / GB:.3g}"} if each["peak_ram_bytes"] else {})


# -- Placement: place for good or cache, and who serves a miss


SCHEMES = {"layers": "whole layers", "static": "most used, listed", "lru in one pool": "cache of last used"}
SERVES = {"cpu": "on the CPU", "fetch": "fetched", "split": "split"}
SERVED = {"cpu": "computed by the CPU", "fetch": "fetched", "split": "split between CPU and link"}
USES = {
    "layers": "whole layers of experts",
    "static": "a fixed list of the most used experts of each layer",
    "lru in one pool": "a cache of the last used experts",
}
KINDS = {"layers": "whole layers", "static": "the most used experts in VRAM", "lru in one pool": "a cache"}


#: What published runs say against the form (studies/pages/hybrid.md, direction 4; freetoken.toml).
MEASURED = (
    "published runs: caches gained less than this (nothing by splitting misses in 2 of 2 pairs, nothing with misses on "
    "the CPU at 10 to 15% of the experts); measure before you change engines"
)


def placement_lines(found: Document) -> Iterator[str]:
    """Yield the table of schemes and what follows from it; nothing where every expert fits or there is no RAM below."""
    known = found["placements"]
    if known is None or known["experts_bytes"] >= found["model"]["expert_bytes"]:
        return
    tier = found["machine"]["fast_tier"]
    yield ""
    yield _fastest_use(known["choices"])
    yield table(
        [_scheme(each, tier, found["best"]["engine"]) for each in known["choices"]],
        f"ways to use the {size(known['experts_bytes'])} of {tier} for experts and to serve a miss, at one cost per "
        "layer for all; each engine has its own below (tokens/s: lowest, middle and highest over the routings):",
    )
    if known["choices"][0]["holds"] == "lru in one pool":
        yield MEASURED
    yield from _cached_or_placed(found, known, tier)
    yield from _served(known)


def _fastest_use(choices: Sequence[Document]) -> str:
    """Return the fastest way, the engine that has it, and what whole layers reach."""
    best, layers = choices[0], next(each for each in choices if each["holds"] == "layers")
    has = f"as in {best['engines'][0]}" if best["engines"] else "in no engine listed here"
    speed, whole = (digits(each["tokens_per_s"]["middle"], 3) for each in (best, layers))
    more = "" if best is layers else f"; whole layers, with the rest on the CPU: {whole}"
    way = f"{USES[best['holds']]}, misses {SERVED[best['miss']]}, {has}"
    return f"fastest use of VRAM by the closed form: {way}: {speed} tokens/s{more}"


def _scheme(each: Document, tier: str, preferred: str) -> dict[str, object]:
    holds = SCHEMES[each["holds"]]
    if each["gpu_layers"] is not None:
        holds = counted(each["gpu_layers"], "whole layer")
    first, *more = sorted(each["engines"], key=lambda name: name != preferred) or ["none listed"]
    return {
        f"{tier} holds": holds,
        "a miss is": SERVES[each["miss"]],
        "tokens/s": speeds(each["tokens_per_s"]),
        "hit": f"{each['hit_rate']['middle']:.0%}",
        "engines": f"{first} and {len(more)} more" if len(more) > 1 else ", ".join([first, *more]),
    }


def _cached_or_placed(found: Document, known: Document, tier: str) -> Iterator[str]:
    """Yield whether a cache gains over experts placed for good, and the step from which on it loses."""
    if known["cache"]["gain"] is None:
        return
    yield f"a cache of the last used experts: {_gain(known['cache'])} than the best fixed placement"
    layers, turns = found["model"]["layers"], known["turns"]
    last = turns[-1] if turns else None
    if last is None:
        return
    if last["faster"] != "placed":
        yield f"the cache wins at every size of {tier} below the whole model"
    elif len(turns) == 1:
        yield f"the cache loses at every size of {tier}: use a fixed placement"
    else:
        most = f"{size(last['size'])} of experts in {tier} ({last['layers']} of {layers} layers' bytes"
        yield (
            f"a cache wins up to {most}, {last['slots']:,} slots), fixed placement above; "
            f"you have {size(known['experts_bytes'])}"
        )


def _served(known: Document) -> Iterator[str]:
    """Yield what an expert costs each way, and the speed of each way where experts lie as is fastest."""
    places = {"cpu": "on the CPU", "link": "over the link", "disk": "from the disk"}
    costs = ", ".join(f"{_us(us)} {places[name]}" for name, us in known["expert_us"].items())
    best = known["choices"][0]["holds"]
    alike = [each for each in known["choices"] if each["holds"] == best]
    ways = ", ".join(f"{digits(each['tokens_per_s']['middle'], 3)} {SERVED[each['miss']]}" for each in alike)
    verdict = f"; with {KINDS[best]}, tokens/s by how misses are served: {ways}" if len(alike) > 1 else ""
    yield f"a missing expert takes {costs}{verdict}"


def _us(value: float) -> str:
    return f"{digits(value / 1000, 3)} ms" if value >= 1000 else f"{value:.0f} us"


def _gain(known: Document) -> str:
    least, most = known["least"], known["most"]
    if max(abs(least), abs(most)) <= 0.01:
        return "as fast as, not faster"
    if known["pays"] is None:
        return f"depends on the routing, {_change(least)} to {_change(most)} (middle: {_change(known['gain'])})"
    return _verdict(known)
