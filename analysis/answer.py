"""The answers of `recommend`, of settings of engines and of a search of a trace: sentences, tables, and a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from moereplay.analysis.comparisons import compare, estimate
from moereplay.analysis.statistics import Interval
from moereplay.analysis.tables import Share, table
from moereplay.results.remarks import SYNTHETIC, seconds_in_words
from moereplay.sweeps.recommend.answer import WORTH, Answer, Drafted, Estimate, More, Range, Way, tried_of
from moereplay.sweeps.recommend.engines import GLOBAL_LRU, LAYERS, engine, not_listed
from moereplay.sweeps.recommend.runner import Tried
from moereplay.sweeps.recommend.search import differing
from moereplay.sweeps.recommend.searched import KNOWN, Lossy, Searched
from moereplay.sweeps.recommend.settings import MAPPED, Sum
from moereplay.traces.texts import between, counted, digits, percent, size, sold
from moereplay.traces.units import GB

SHOWN = 6  #: upgrades in the table
HEAD = 2  #: and in the answer; also of lossy sets
FAR = 1.5  #: times the tokens/s of the best that is borne out by runs
MS = 1e6
PARTS = {"compute": "compute", "cpu": "CPU", "link": "link", "disk": "disk", "sync": "launches and waiting"}
SCHEMES = {"layers": "whole layers", "static": "most used, listed", "lru in one pool": "cache of last used"}
SERVES = {"cpu": "on the CPU", "fetch": "fetched", "split": "split"}
PLACES = {"cpu": "on the CPU", "link": "over the link", "disk": "from the disk"}
EVERY = "every engine, each way to use the memory, and all steps"
CHANCES = "drafts are right with chances {}"
FAULTS = (
    f"page faults of mapped files read at {MAPPED:.0%} of the disk's rate (engines' authors measured 14% to 45%; "
    "pass that much of it as --disk)"
)


def lines(of: Answer | Searched, verbose: bool = False) -> Iterator[str]:
    """Yield the answer in 25 lines or fewer; with `verbose` its tables as well."""
    yield from _searched(of) if isinstance(of, Searched) else _answered(of)
    if not verbose:
        more = "the speed by memory, and the flags of engines" if isinstance(of, Searched) else EVERY
        yield f"-v shows {more}"
        return
    yield ""
    yield from _searched_tables(of) if isinstance(of, Searched) else _tables(of)


def _answered(of: Answer) -> Iterator[str]:
    best = of.best
    yield f"{of.load.name}{_weights(of)} on {of.machine.in_words}"
    yield f"{of.load.grade.upper()}: {of.load.source}"
    yield ""
    yield f"  {speed(best.tokens_per_s)}   {best.setting.engine}: {typed_of(best)}"
    if of.ends and max(of.ends) > 1.02 * min(of.ends):
        least, most = (digits(end, 3) for end in (min(of.ends), max(of.ends)))
        yield f"  {least} to {most} tokens/s by what is assumed of RAM and cores (--ram-rate, --cores)"
    yield f"  {_compared(best)}"
    positions = f"{of.load.context:,} positions"
    streams = of.load.decoding.streams
    notes = {"KV cache": f" of {f'{streams} x ' if streams > 1 else ''}{positions}", "experts": _held(of)}
    for name, memory in zip(_tiers(best), best.memory, strict=True):
        yield f"  {name} {_sum(memory, notes if memory is best.memory[0] else {})}"
    if best.setting.disk_bytes:
        yield f"  disk: {size(best.setting.disk_bytes)} of experts do not fit in memory"
    yield f"  time per token: {_ms(best)}; it waits most for: {of.binds}"
    yield from _faster(of)
    yield from (f"warning: {warning}" for warning in of.warnings)
    yield from _drafts(of)
    yield from _first_token(of)
    yield from _improve(of)
    yield from _cache(of)
    if of.left_out:
        yield f"not listed: {', '.join(f'{name} ({why})' for name, why in of.left_out.items())}"
    yield f"assumed: {'; '.join(assumed(of))}"


def _tables(of: Answer) -> Iterator[str]:
    """Yield the tables: engines, upgrades, ways, steps, drafts."""
    yield table(
        [_engine(estimate) for estimate in of.engines],
        "best settings of each engine (tokens/s: lowest, middle and highest over the routings; hit: of a token's "
        "experts; runs: number of measured runs compared):",
    )
    without = [{"engine": row.name, "does": row.scheme, "no flags because": row.why} for row in not_listed()]
    yield table(without, "engines without settings here:")
    if of.more:
        yield table([_more(more) for more in of.more[:SHOWN]], f"gain from upgrades, with {of.best.setting.engine}:")
    if of.ways:
        held = of.ways[0].estimate.setting.fast_bytes
        yield table(
            [_way(way, of) for way in of.ways],
            f"ways to use {size(held)} of {of.machine.platform.fast_tier} for experts and to serve a miss, at one cost "
            "per layer for all; each engine has its own above (tokens/s as above):",
        )
    if len(of.ladder) > 1:
        knob = of.best.setting.mode.name
        yield table([_step(estimate) for estimate in of.ladder], f"values of {knob} (tokens/s at the middle routing):")
    if of.prompt:
        rows = [
            {"engine": first.engine, "seconds": digits(first.seconds, 3)}
            | {"tokens/s": digits(first.tokens_per_s, 3), "experts outside": HOW[first.how]}
            for first in of.prompt.engines
        ]
        yield table(rows, f"first token of a prompt of {of.prompt.tokens:,} tokens, by engine:")
    if len(of.steps) > 1:
        yield table([_drafted(step, of.steps[0]) for step in of.steps], "drafts per pass:")


def document(of: Answer | Searched) -> dict[str, Any]:
    """Return the answer for `--json`. Sizes are in bytes, times in nanoseconds."""
    return plain(_of_search(of) if isinstance(of, Searched) else _of_engines(of))


def plain(value: Any) -> Any:
    """Return what JSON has for a value: fields by name, lists for sequences."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    value = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def _of_engines(of: Answer) -> dict[str, Any]:
    load, machine, platform = of.load, of.machine, of.machine.platform
    known = load.known
    return {
        "name": load.name,
        "grade": load.grade,
        "routing": load.source,
        "routings": [routing.name for routing in load.routings],
        "assumed": assumed(of),
        "machine": {
            "name": "this machine" if platform.name == "here" else platform.name,
            "kind": machine.kind,
            "fast_tier": platform.fast_tier,
            "fast_bytes": machine.memory_bytes,
            "fast_bytes_per_s": getattr(platform.compute, "memory_bytes_per_s", None),
            "link_bytes_per_s": platform.links[0].bytes_per_s if machine.has_main_memory else None,
            "ram_bytes": of.best.memory[1].size if len(of.best.memory) > 1 and of.best.memory[1].is_known else None,
            "ram_bytes_per_s": getattr(platform.cpu, "memory_bytes_per_s", None),
            "disk_bytes_per_s": machine.disk_bytes_per_s,
        },
        "model": {
            "layers": load.geometry.layers,
            "experts": load.geometry.experts,
            "k": load.geometry.k,
            "expert_bytes": load.expert_bytes,
            "dense_bytes": load.dense_bytes,
            "params": known.params if known else None,
            "active_params": known.active_params if known else None,
        },
        "context": load.context,
        "kv_bits": load.kv_bits,
        "best": _estimate(of.best) | {"binds": of.binds, "ends": of.ends},
        "by_engine": [_estimate(estimate) for estimate in of.engines],
        "ladder": {"knob": of.best.setting.mode.name, "steps": [_estimate(estimate) for estimate in of.ladder]},
        "ways": [_estimate(way.estimate) | {"engines": way.engines} for way in of.ways],
        "turns": of.turns,
        "expert_us": of.costs,
        "more": of.more,
        "smaller": of.smaller,
        "drafts": [_step_of(step, of.steps[0]) for step in of.steps],
        "alone": of.alone and _estimate(of.alone),
        "prompt": of.prompt,
        "not_listed": of.left_out,
        "warnings": of.warnings,
        "replays": of.replays,
    }


def _estimate(of: Estimate) -> dict[str, Any]:
    setting = of.setting
    return {
        "engine": setting.engine,
        "mode": setting.mode.name,
        "flags": setting.flags,
        "holds": setting.mode.holds,
        "miss": setting.mode.miss,
        "tokens_per_s": of.tokens_per_s,
        "hit_rate": of.hit,
        "gpu_layers": setting.gpu_layers if setting.mode.holds == LAYERS else None,
        "experts_fast_bytes": setting.fast_bytes,
        "experts_ram_bytes": setting.ram_bytes,
        "experts_disk_bytes": setting.disk_bytes,
        "memory": of.memory,
        "parts_ns": of.parts,
        "tried": tried_of(of) if setting.engine else None,
    }


def _step_of(step: Drafted, none: Drafted) -> dict[str, Any]:
    totals, requests = step.estimate.middle.totals, step.estimate.middle.requests
    passes = sum(row["decode_passes"] for row in requests) / step.load.decoding.streams
    return _estimate(step.estimate) | {
        "drafts": step.drafts,
        "gain": step.estimate.gain(none.estimate),
        "experts_per_layer": totals["accesses"] / passes / step.load.geometry.layers,
    }


def typed_of(of: Estimate) -> str:
    """Return what to type: the engine's command and the flags of the setting, and what it needs besides."""
    made = engine(of.setting.engine)
    besides = "; ".join(filter(None, (made.state, made.needs)))
    return " ".join(filter(None, (made.command, of.setting.flags))) + (f" ({besides})" if besides else "")


def assumed(of: Answer) -> list[str]:
    """Return every assumption, with the option that replaces it."""
    faults = any(estimate.setting.disk_bytes and estimate.setting.mode.below == "mmap" for estimate in of.engines)
    drafts = of.load.asked
    chances = [CHANCES.format(drafts.accept)] if drafts and drafts.most else []
    return [*of.machine.assumed, *([FAULTS] if faults else []), *of.load.assumed, *chances]


def _weights(of: Answer) -> str:
    known = of.load.known
    return f", {known.weights}," if known and known.params else ""


def speed(of: Range) -> str:
    """Return `15.7 tokens/s`, or `15.7 tokens/s (12.1 to 18.2)`."""
    if of.most < of.least * 1.02:
        return f"{digits(of.middle, 3)} tokens/s"
    return f"{digits(of.middle, 3)} tokens/s ({digits(of.least, 3)} to {digits(of.most, 3)} by routing)"


KINDS = {
    "resident": "all experts on the card",
    "hybrid": "experts in VRAM and RAM",
    "disk": "experts read from a disk",
    "unified": "unified memory",
    "cpu": "no GPU",
}


def _compared(best: Estimate) -> str:
    """Say how far off predictions were in measured runs of this kind."""
    tried = tried_of(best)
    name, kind = best.setting.engine, KINDS[best.kind]
    if not tried:
        return f"not compared with measured runs: none of {name} with {kind} is known"
    many = f" on {counted(tried.machines, 'machine')}" if tried.machines else ""
    whose = f" ({tried.population})" if tried.population else ""
    said = tried.as_they(f"{name}, {kind}{many}{whose}", best.middle.tokens_per_s)
    if tried.left_out is not None:
        said += f"; median error of a machine that no figure was fitted on {tried.left_out:.0%}"
    return said


def _tiers(best: Estimate) -> list[str]:
    return [best.setting.machine.platform.fast_tier, "RAM"][: len(best.memory)]


def _sum(memory: Sum, notes: dict[str, str]) -> str:
    """Return what takes a memory: `24.7 GB of 25.8 GB (sold as 24 GB): 4.54 GB dense weights, ...`, with notes."""
    parts = [f"{size(count)} {name}{notes.get(name, '')}" for name, count in memory.parts.items()]
    of_size = f" of {size(memory.size)} (sold as {sold(memory.size)})" if memory.is_known else ""
    return f"{size(memory.total)}{of_size}: {', '.join(parts)}"


def _held(of: Answer) -> str:
    setting = of.best.setting
    if setting.fast_bytes == of.load.expert_bytes:
        return " (all)"
    if setting.mode.holds == LAYERS:
        return f" of {setting.gpu_layers} of {of.load.geometry.layers} layers"
    return f" ({setting.fast_bytes / of.load.expert_bytes:.0%} of all, {of.best.hit.middle:.0%} of a token's)"


def _ms(best: Estimate) -> str:
    parts = {PARTS[name]: value for name, value in best.parts._asdict().items() if value > 0.001 * best.parts.total}
    each = ", ".join(f"{digits(ns / MS, 3)} {name}" for name, ns in sorted(parts.items(), key=lambda part: -part[1]))
    return f"{digits(best.parts.total / MS, 3)} ms: {each}"


def _faster(of: Answer) -> Iterator[str]:
    """Yield the engine that is fastest in replays alone, if it is far ahead of the one that runs bear out."""
    first = of.engines[0]
    if first.middle.tokens_per_s > FAR * of.best.middle.tokens_per_s:
        tried = tried_of(first)
        borne = f"its runs took {tried.median:.2g} times the predicted time" if tried else "not compared with runs"
        name = first.setting.engine
        yield f"  faster in replays: {name}, {speed(first.tokens_per_s)}, {borne}: {typed_of(first)}"


def _drafts(of: Answer) -> Iterator[str]:
    """Yield whether drafts pay, and what several streams do."""
    if of.alone is not None:
        streams, together = of.load.decoding.streams, of.best.tokens_per_s.middle
        yield _together(streams, together, together / streams, of.alone.tokens_per_s.middle)
    if len(of.steps) > 1:
        none, tried = of.steps[0], max(of.steps[1:], key=lambda step: step.estimate.tokens_per_s.middle)
        speeds = (step.estimate.tokens_per_s.middle for step in (tried, none))
        yield _drafting(tried.drafts, tried.estimate.gain(none.estimate), *speeds)


def _together(streams: int, together: float, each: float, alone: float) -> str:
    said = f"{streams} streams: {digits(together, 3)} tokens/s together, {digits(each, 3)} each"
    return f"{said}; one stream alone has {digits(alone, 3)}"


def _drafting(drafts: int, gain: Range, tried: float, none: float) -> str:
    verdict = {True: "pay", False: "do not pay", None: "depend on the routing"}[pays(gain)]
    many = f"{counted(drafts, 'draft')} per pass {span(gain)} tokens/s than none"
    return f"drafts {verdict}: {many} ({digits(tried, 3)} in place of {digits(none, 3)})"


HOW = {
    "cpu": "computed by the CPU",
    "touched": "streamed, those that a batch touches",
    "layers": "streamed, whole layers",
    "waves": "streamed in waves of slots",
    "cache": "through the cache",
}


def _first_token(of: Answer) -> Iterator[str]:
    """Yield the seconds to the first token of a prompt, where they are asked for."""
    prompt = of.prompt
    if prompt is None:
        return
    best = next((first for first in prompt.engines if first.engine == of.best.setting.engine), None)
    if best is None:
        yield f"first token of {prompt.tokens:,} tokens: how {of.best.setting.engine} computes prompts is not known"
        return
    wins = ""
    if prompt.streaming_from:
        wins = f"; streaming begins to win at about {prompt.streaming_from:,} tokens"
    yield (
        f"first token of a prompt of {prompt.tokens:,} tokens: {digits(best.seconds, 3)} s "
        f"({digits(best.tokens_per_s, 3)} tokens/s), experts outside fast memory {HOW[best.how]}{wins}"
    )


def pays(gain: Range) -> bool | None:
    """Return whether a gain is worth it with every routing; None if that depends on the routing."""
    return True if gain.least > WORTH else False if gain.most <= WORTH else None


def span(gain: Range) -> str:
    """Return a gain in words: `12% to 20% more`, `3% less`."""
    least, most = gain.least, gain.most
    if max(abs(least), abs(most)) <= WORTH:
        return "no more"
    if least < 0 < most:
        return f"{percent(-least)} less to {percent(most)} more"
    low, high = sorted((abs(least), abs(most)))
    return f"{between(percent(low), percent(high))} {'more' if most > 0 else 'less'}"


def _improve(of: Answer) -> Iterator[str]:
    """Yield what makes it faster, and the smaller quantisation to take."""
    if of.more:
        parts = [f"{more.what}: {digits(more.tokens_per_s, 3)} ({percent(more.gain)} more)" for more in of.more[:HEAD]]
        yield f"faster with: {'; '.join(parts)}"
    else:
        yield "faster with: no single change (larger, or twice as fast) gains more than 1%"
    if of.smaller:
        parts = [f"{more.what}: {digits(more.tokens_per_s, 3)} tokens/s" for more in of.smaller]
        yield f"smaller quantisations, which lose quality: {'; '.join(parts)}"


def _cache(of: Answer) -> Iterator[str]:
    """Yield whether a cache gains over experts placed for good, and who should serve a miss."""
    tier = of.machine.platform.fast_tier
    if of.best.hit.least >= 1 and not of.best.setting.disk_bytes:
        yield f"every expert fits into {tier}: no cache, CPU execution or prefetch gains anything"
        return
    if not of.ways:
        return
    caches = [way.estimate for way in of.ways if way.estimate.setting.mode.holds == GLOBAL_LRU]
    placed = [way.estimate for way in of.ways if way.estimate.setting.mode.holds != GLOBAL_LRU]
    if caches and placed:
        gain = caches[0].gain(placed[0])
        verdict = {True: "pays", False: "does not pay", None: "depends on the routing"}[pays(gain)]
        yield f"a cache of the last used experts {verdict}: {span(gain)} than the best fixed placement, at equal costs"
        if last := of.placed_from:
            yield f"a cache wins below {size(last.size)} of experts in {tier}, placement above"
    yield "a missing expert takes " + ", ".join(f"{_us(us)} {PLACES[name]}" for name, us in of.costs.items())


def _us(us: float) -> str:
    return f"{digits(us / 1000, 3)} ms" if us >= 1000 else f"{us:.0f} us"


def _three(of: Range) -> str:
    if of.most < of.least * 1.02:
        return digits(of.middle, 3)
    return " ".join(digits(value, 3) for value in of)


def _engine(of: Estimate) -> dict[str, object]:
    tried = tried_of(of)
    return {
        "engine": of.setting.engine,
        "flags": of.setting.flags,
        "tokens/s": _three(of.tokens_per_s),
        "hit": f"{of.hit.middle:.0%}",
        "runs": tried.runs if tried else "none",
    }


def _more(more: More) -> dict[str, object]:
    return {
        "part": more.what,
        "tokens/s": digits(more.tokens_per_s, 3),
        "gain": percent(more.gain),
        "flags": more.flags,
    }


def _way(way: Way, of: Answer) -> dict[str, object]:
    setting = way.estimate.setting
    first, *others = sorted(way.engines, key=lambda name: name != of.best.setting.engine) or ["none listed"]
    holds = counted(setting.gpu_layers, "whole layer") if setting.mode.holds == LAYERS else SCHEMES[setting.mode.holds]
    return {
        f"{of.machine.platform.fast_tier} holds": holds,
        "a miss is": SERVES[setting.mode.miss],
        "tokens/s": _three(way.estimate.tokens_per_s),
        "hit": f"{way.estimate.hit.middle:.0%}",
        "engines": f"{first} and {len(others)} more" if len(others) > 1 else ", ".join([first, *others]),
    }


def _step(of: Estimate) -> dict[str, object]:
    row: dict[str, object] = {"flags": of.setting.flags, "tokens/s": digits(of.tokens_per_s.middle, 3)}
    for name, memory in zip(_tiers(of), of.memory, strict=True):
        row[f"{name} GB"] = f"{memory.total / GB:.3g}"
    return row


def _drafted(step: Drafted, none: Drafted) -> dict[str, object]:
    found = _step_of(step, none)
    return {
        "drafts": step.drafts,
        "tokens/s": _three(step.estimate.tokens_per_s),
        "gain": "" if step is none else percent(found["gain"].middle, signed=True),
        "experts/layer": f"{found['experts_per_layer']:.1f}",
        "hit": f"{step.estimate.hit.middle:.0%}",
        "flags": step.estimate.setting.flags,
    }


# -- a search of a trace

NEAR = 1e-3  #: smaller relative differences of sizes are ignored
UNCOUNTED = "what an engine itself costs is not counted (--engine NAME counts it)"
STARTS = {
    "layers": "the experts of whole layers, from the last, as many as fit",
    "any": "arbitrary experts of all layers, as many as fit",
    "used": "the experts that the first half of the trace's tokens used most, as many as fit",
}


def _searched(of: Searched) -> Iterator[str]:
    best, answer = of.best, of.answer
    fast = f"{sold(of.question.memory.total_bytes)} {of.machine.fast_tier}"
    yield f"{of.best.model} on {best.config.platform}, {fast}"
    grade, source = of.grade
    yield f"{grade.upper()}: {source}"
    yield ""
    yield f"  {_exact(best)} ({_sure(of)})   {_named(best)}"
    yield f"  {_band(of)}"
    yield from _room(of)
    yield from _start(of)
    yield from _have(of)
    yield from (f"warning: {each}" for each in of.warnings)
    if answer.second:
        differs = ", ".join(f"{kind} {answer.second.policies[kind]}" for kind in differing(best, answer.second))
        chance = "" if _beaten(of, answer.second) in (None, "yes") else ", which may be chance"
        yield f"second: {differs}: {_exact(answer.second)} ({_change(answer.second, of)}{chance})"
    words = {True: "pays", False: "does not pay", None: "may pay or not"}
    if of.question.all_fit:
        yield f"every expert fits into {of.machine.fast_tier}: no eviction, CPU execution or prefetch gains anything"
    else:
        yield f"prefetch {words[of.prefetch.pays]}: {of.prefetch.reason}"
    if of.cpu.pays is not None:
        yield f"the CPU {words[of.cpu.pays]}: {of.cpu.reason}"
    yield from _decoded(of)
    yield from _sizes(of)
    yield from _target(of)
    yield from _lossy(of)
    yield _tried(of)
    chances = [CHANCES.format(of.decoded.accept_source)] if of.decoded and len(of.decoded.steps) > 1 else []
    yield f"assumed: {'; '.join((*of.assumed, *chances, UNCOUNTED))}"
    yield f"again: {of.command(best)}"


def _exact(tried: Tried) -> str:
    return f"{digits(tried.tokens_per_s, 4)} tokens/s"


def _named(tried: Tried) -> str:
    return ", ".join(f"{kind} {text}" for kind, text in tried.policies.items())


def _interval(of: Searched) -> Interval | None:
    """Return the best set's tokens/s with the interval over requests; synthetic routing has none."""
    return None if of.synthetic else estimate(of.best.result.per_request, "tokens_per_s")


def _sure(of: Searched) -> str:
    interval = _interval(of)
    if interval is None or interval.low is None or interval.high is None:
        return f"no interval: {interval.why if interval else SYNTHETIC}"
    ends = between(digits(interval.low, 4), digits(interval.high, 4))
    return f"95% interval over {interval.requests} requests: {ends}"


def _beaten(of: Searched, second: Tried) -> str | None:
    """Return whether the best set is significantly faster than the second."""
    if of.synthetic:
        return None
    return compare(of.best.result.per_request, second.result.per_request, "tokens_per_s").answer


def _band(of: Searched) -> str:
    """Say how far off such times were in measured runs, or that they were not compared."""
    if of.machine.band and of.about.get("band"):
        return of.machine.band.as_they(of.best.config.platform, of.best.tokens_per_s)
    if of.about["seconds"] == "calibrated":
        return seconds_in_words(of.about)
    return f"not compared with measured runs: {of.about['uncalibrated'] or 'the platform states none'}"


def _room(of: Searched) -> Iterator[str]:
    """Yield what takes the fast memory, and its peak with the system's."""
    memory, where = of.question.memory, of.placed
    parts = {"dense weights": memory.dense_bytes, "KV cache": memory.kv_bytes, "runtime": memory.runtime_bytes}
    parts |= {"draft layer": memory.head_bytes, "experts": of.held}
    mean = " of mean size" if _is_unequal(of) else ""
    notes = {"experts": f" ({where.slots:,}{mean}, {where.gpu_experts} of each layer)"}
    total = Sum({name: count for name, count in parts.items() if count}, memory.total_bytes)
    yield f"  {of.machine.fast_tier} {_sum(total, notes)}"
    peak = of.peak(memory.total_bytes)
    if peak:
        said = f"{size(peak.peak_bytes)} with {size(peak.reserve_bytes)} for the system"
        machine = size(peak.machine_bytes)
        pages = f", but the machine has {machine}: every set here will page; times do not include page faults"
        yield f"warning: peak: {said}{pages}" if peak.will_page else f"  peak: {said}, of {machine}"


def _is_unequal(of: Searched) -> bool:
    return len(set(of.question.trace.geometry.expert_bytes)) > 1


def _start(of: Searched) -> Iterator[str]:
    """Yield hit rate and start of the cache."""
    start, cold = STARTS.get(of.start(of.best)), of.answer.from_empty
    empty = f"; from an empty cache: {_exact(cold)}, hit rate {Share(cold.hit_rate)}" if start and cold else ""
    begins = f"; the cache begins with {start} (--warm){empty}" if start else ""
    yield f"  hit rate {Share(of.best.hit_rate)}{begins}"


def _have(of: Searched) -> Iterator[str]:
    """Yield the engines that have the set, or the best set that one has."""
    known = of.answer.known
    if mine := of.engines(of.best):
        yield f"  engines that have this set: {', '.join(mine)}"
    elif known is None:
        yield "  no known engine has this set"
    else:
        what = f"{_exact(known)} ({_change(known, of)}), hit rate {Share(known.hit_rate)}: {_named(known)}"
        yield f"  no known engine has this set; the best that one has ({', '.join(of.engines(known))}): {what}"


def _decoded(of: Searched) -> Iterator[str]:
    """Yield what several streams do, and whether drafts pay."""
    found = of.decoded
    if found and found.alone:
        chosen = next(step for step in found.steps if step.drafts == found.drafts)
        together, alone = chosen.throughput_tokens_per_s, found.alone.tokens_per_s
        yield _together(found.concurrency, together, chosen.tokens_per_s, alone)
    if found and found.gain is not None:
        tried = max(found.steps[1:], key=lambda step: step.tokens_per_s)
        gain = Range(found.gain, found.gain, found.gain)
        yield _drafting(tried.drafts, gain, tried.tokens_per_s, found.steps[0].tokens_per_s)


def _change(tried: Tried, of: Searched) -> str:
    return percent(tried.tokens_per_s / of.best.tokens_per_s - 1, signed=True)


def _sizes(of: Searched) -> Iterator[str]:
    """Yield the change by the next larger and the next smaller memory."""
    now, curve = of.held, of.answer.curve
    above = [each for each in curve if each.cache_bytes > now * (1 + NEAR)][:1]
    below = [each for each in curve if each.cache_bytes < now * (1 - NEAR)][-1:]
    steps = [(each, "more") for each in above] + [(each, "less") for each in below]
    if steps:
        words = (f"{size(abs(each.cache_bytes - now))} {word}: {_change(each, of)} tokens/s" for each, word in steps)
        yield f"memory: {'; '.join(words)}"


def _target(of: Searched) -> Iterator[str]:
    wanted, smallest = of.question.target_tokens_per_s, of.answer.smallest
    if wanted is None:
        return
    if smallest is not None:
        said = f"needs {sold(of.memory_with(smallest))} of memory, as it is sold"
    elif of.answer.cut:
        said = "not known: the search ended before; --budget none searches on"
    else:
        said = "cannot be reached, even with every expert in fast memory"
    yield f"target: {digits(wanted, 4)} tokens/s: {said}"


def _lossy(of: Searched) -> Iterator[str]:
    if of.lossy_left_out:
        yield f"lossy: {of.lossy_left_out}"
    sets = [
        f"{', '.join(map(' '.join, lossy.change.items()))}: {_exact(tried)}, {percent(lossy.gain)} more, for "
        f"{_cost(tried, lossy)}"
        for tried, lossy in of.lossy[:HEAD]
    ]
    if sets:
        yield f"lossy (what that costs in quality is not known here: docs/quality.md): {'; '.join(sets)}"


def _cost(tried: Tried, each: Lossy) -> str:
    low, kept = each.mass_share_low_precision or 0, tried.mass_share_kept
    costs = [f"{percent(1 - kept)} of the gate weight not as chosen"] if kept is not None and kept < 1 else []
    costs += [f"{percent(low)} of it at a lower precision"] if low else []
    costs += [f"every expert at {each.bits:g} bits instead of {each.stored_bits:g}"] if each.bits else []
    return " and ".join(costs) or "nothing that counters show"


def _tried(of: Searched) -> str:
    answer, space = of.answer, of.answer.space
    each = ", ".join(f"{len(values)} of {axis}" for axis, values in space.axes().items())
    judged, few = of.question.trace.tokens, answer.screened_on
    how = f", most on a part ({counted(few, 'request')}), the best sets on all" if few else ""
    if judged != of.whole.tokens:
        how = f"; figures cover {judged:,} of {counted(of.whole.tokens, 'token')}; --thorough replays all"
    cut = f"; ended early, of at most {of.at_most:,}: --budget none tries all" if answer.cut else ""
    many = f"{counted(space.combinations, 'lossless set')} ({each}); {counted(answer.replayed, 'replay')}"
    return f"searched: {many}{how}{cut}"


def _searched_tables(of: Searched) -> Iterator[str]:
    """Yield the tables: memory, flags, drafts."""
    rows = []
    for tried in of.answer.curve:
        peak = of.peak(used := of.memory_with(tried))
        row = {"memory as sold GB": used / 2**30, "cache GB": tried.cache_bytes / GB, "tok/s": tried.tokens_per_s}
        row |= {"change": _change(tried, of), "hit": Share(tried.hit_rate), "set": _named(tried)}
        rows.append(row | ({"memory": "will page" if peak.will_page else "fits"} if peak else {}))
    yield table(rows, "speed by memory, with the fastest of the leading sets:")
    flags = [{"engine": name, "flags": text or "none: it takes the memory there is"} for name, text in of.flags.items()]
    if flags:
        yield table(flags, f"flags of engines for a cache of {of.placed.cache_mib:,} MiB:")
    if of.decoded:
        yield table(
            [
                {"drafts": step.drafts, "tokens/pass": digits(step.tokens_per_pass, 3)}
                | {"tokens/s": digits(step.tokens_per_s, 4), "hit": f"{step.hit_rate:.0%}"}
                | {"together, with prompts": digits(step.throughput_tokens_per_s, 4), "miss": step.set["miss"]}
                for step in of.decoded.steps
            ],
            "drafts per pass (tokens/s of a request in decoding):",
        )


def _of_search(of: Searched) -> dict[str, Any]:
    answer, question, about = of.answer, of.question, of.about
    memory, second, judged = question.memory, answer.second, question.trace
    part = {"requests": judged.requests, "tokens": judged.tokens}
    part |= {"of_requests": of.whole.requests, "of_tokens": of.whole.tokens}
    return {
        "grade": of.grade[0],
        "routing": of.grade[1],
        "trace": {"name": of.name, "model": of.best.model, "digest": of.whole.digest},
        "synthetic": of.synthetic or None,
        "platform": of.best.config.platform,
        "memory": memory._asdict() | {"cache_bytes": memory.cache_bytes} | _peak(of, memory.total_bytes),
        "best": _leader(of, of.best) | {"interval": _interval(of)},
        "from_empty": answer.from_empty and _set(answer.from_empty),
        "best_known": answer.known and _leader(of, answer.known, KNOWN),
        "compulsory_limit": of.compulsory_limit,
        "second": second and _set(second) | {"differs": differing(of.best, second), "answer": _beaten(of, second)},
        **{name: about[name] for name in ("seconds", "calibration", "uncalibrated")},
        **{name: about.get(name) for name in ("band", "band_least", "band_most")},
        "assumed": of.assumed,
        "searched": {
            "axes": answer.space.axes(),
            "combinations": answer.space.combinations,
            "replayed": answer.replayed,
            "screened_on": answer.screened_on,
            "judged_on": None if judged.tokens == of.whole.tokens else part,
            "at_most": of.at_most,
            "cut": answer.cut,
        },
        "memory_curve": [_point(of, each) for each in answer.curve],
        "all_fit": question.all_fit,
        "prefetch": of.prefetch._asdict() | {"recall_that_pays": answer.recall_that_pays},
        "cpu": of.cpu,
        "lossy": [_set(tried) | lossy._asdict() for tried, lossy in of.lossy],
        "lossy_left_out": of.lossy_left_out,
        "target_tokens_per_s": question.target_tokens_per_s,
        "smallest_memory_for_target": answer.smallest and _point(of, answer.smallest),
        "flags": {"cache_mib": of.placed.cache_mib, "slots": of.placed.slots, "slots_per_layer": of.placed.gpu_experts}
        | {"unequal": _is_unequal(of), **of.flags},
        "decoding": of.decoded,
        "warnings": of.warnings,
    }


def _set(tried: Tried) -> dict[str, Any]:
    return {
        "config": tried.config,
        "identity": tried.result.about["identity"],
        "cache_bytes": tried.cache_bytes,
        "tokens_per_s": tried.tokens_per_s,
        "hit_rate": tried.hit_rate,
        "mass_share_kept": tried.mass_share_kept,
    }


def _leader(of: Searched, tried: Tried, before: str = "") -> dict[str, Any]:
    found = {"start": of.start(tried), "engines": of.engines(tried), "command": of.command(tried, before)}
    return _set(tried) | found


def _point(of: Searched, tried: Tried) -> dict[str, Any]:
    found = {name: value for name, value in _set(tried).items() if name in ("cache_bytes", "tokens_per_s", "hit_rate")}
    used = of.memory_with(tried)
    return {"memory_bytes": used, "set": tried.policies, **found, **_peak(of, used)}


def _peak(of: Searched, used: int) -> dict[str, Any]:
    peak = of.peak(used)
    return peak._asdict() if peak else {}
