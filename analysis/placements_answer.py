"""The part of the quick answer about placement in sentences: place for good or cache, and who serves a miss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moereplay.analysis.tables import table
from moereplay.traces.texts import digits, percent, size

Document = Mapping[str, Any]
HOLDS = {"layers": "whole layers", "static": "most used, listed", "lru in one pool": "cache of last used"}
MISSES = {"cpu": "on the CPU", "fetch": "fetched", "split": "divided"}
SERVED = {"cpu": "computed by the CPU", "fetch": "fetched", "split": "divided between CPU and link"}
USES = {
    "layers": "whole layers of experts",
    "static": "the most used experts of each layer by a list, placed for good",
    "lru in one pool": "a cache of the last used experts",
}
KINDS = {"layers": "whole layers", "static": "the most used experts in VRAM", "lru in one pool": "a cache"}


#: What published runs say against the form (docs/hybrid.md, direction 4; freetoken.toml).
MEASURED = (
    "published runs say less for a cache: dividing misses was no faster than fetching them in two pairs, and with "
    "misses on the CPU it lost or tied where 10 to 15% of the experts fit; measure before you change engines"
)


def placement_lines(found: Document) -> Iterator[str]:
    """Yield the table of schemes and what follows from it; nothing where every expert fits or there is no RAM below."""
    known = found["placements"]
    if known is None or known["experts_bytes"] >= found["model"]["expert_bytes"]:
        return
    tier = found["machine"]["fast_tier"]
    yield ""
    yield _fastest(known["choices"])
    yield table(
        [_row(each, tier, found["best"]["engine"]) for each in known["choices"]],
        f"what the {size(known['experts_bytes'])} of {tier} for experts could hold, and who serves a miss (the same "
        "bytes and costs for all, so not an engine's speed; tokens/s: least, middle and most over the routings):",
    )
    if known["choices"][0]["holds"] == "lru in one pool":
        yield MEASURED
    yield from _cached_or_placed(found, known, tier)
    yield from _served(known)


def _fastest(choices: Sequence[Document]) -> str:
    """Return the fastest way, the engine that has it, and what whole layers reach."""
    best, layers = choices[0], next(each for each in choices if each["holds"] == "layers")
    has = f"which {best['engines'][0]} has" if best["engines"] else "which no engine listed here has"
    speed, whole = (digits(each["tokens_per_s"]["middle"], 3) for each in (best, layers))
    more = "" if best is layers else f"; whole layers with the rest on the CPU reach {whole}"
    way = f"{USES[best['holds']]}, misses {SERVED[best['miss']]}, {has}"
    return f"by this form the fastest use of VRAM: {way}: {speed} tokens/s{more}"


def _row(each: Document, tier: str, preferred: str) -> dict[str, object]:
    holds = HOLDS[each["holds"]]
    if each["gpu_layers"] is not None:
        holds = f"{each['gpu_layers']} {holds}"
    speeds = [digits(each["tokens_per_s"][name], 3) for name in ("least", "middle", "most")]
    first, *more = sorted(each["engines"], key=lambda name: name != preferred) or ["none listed"]
    return {
        f"{tier} holds": holds,
        "a miss is": MISSES[each["miss"]],
        "tokens/s": " ".join(speeds) if len(set(speeds)) > 1 else speeds[0],
        "hit": f"{each['hit_rate']['middle']:.0%}",
        "engines": f"{first} + {len(more)}" if more else first,
    }


def _cached_or_placed(found: Document, known: Document, tier: str) -> Iterator[str]:
    """Yield whether a cache gains over experts placed for good, and the step from which on it loses."""
    if known["cache"]["gain"] is None:
        return
    yield f"a cache of the last used experts: {_gained(known['cache'])} than the best experts placed for good"
    layers, turns = found["model"]["layers"], known["turns"]
    last = turns[-1] if turns else None
    if last is None:
        return
    if last["faster"] != "placed":
        yield f"the cache begins to lose at no size of {tier} below the whole model"
    elif len(turns) == 1:
        yield f"the cache loses at every size of {tier}: place experts for good"
    else:
        here = "below" if known["experts_bytes"] < last["size"] else "above"
        yield (
            f"the cache begins to lose where {tier} holds {last['layers']} of {layers} layers' bytes "
            f"({size(last['size'])}, {last['slots']:,} slots): from there on place experts for good; this machine is "
            f"{here} that"
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


def _gained(known: Document) -> str:
    least, most = known["least"], known["most"]
    if max(abs(least), abs(most)) <= 0.01:
        return "as fast, no more"
    if known["pays"] is None:
        return f"depends on the routing, {_change(least)} to {_change(most)} ({_change(known['gain'])} in the middle)"
    low, high = map(percent, sorted((abs(least), abs(most))))
    across = low if low == high else f"{low} to {high}"
    return f"pays, {across} more" if known["pays"] else f"does not pay, {across} less"


def _change(gain: float) -> str:
    return f"{percent(abs(gain))} {'more' if gain > 0 else 'less'}"
