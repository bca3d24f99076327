"""The answer of `recommend` for a model on a machine, in sentences and tables, and as a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moereplay.analysis.tables import table
from moereplay.sweeps.recommend.answer import WORTH, Answer, Drafted, Estimate, More, Range, Way, tried_of
from moereplay.sweeps.recommend.engines import GLOBAL_LRU, LAYERS, engine, not_listed
from moereplay.sweeps.recommend.settings import MAPPED, Sum
from moereplay.traces.texts import between, counted, digits, percent, size, sold
from moereplay.traces.units import GB

SHOWN = 6  #: upgrades in the table
HEAD = 2  #: and in the answer
FAR = 1.5  #: times the tokens/s of the best that is borne out by runs
MS = 1e6
PARTS = {"compute": "compute", "cpu": "CPU", "link": "link", "disk": "disk", "sync": "launches and waiting"}
SCHEMES = {"layers": "whole layers", "static": "most used, listed", "lru in one pool": "cache of last used"}
SERVES = {"cpu": "on the CPU", "fetch": "fetched", "split": "split"}
PLACES = {"cpu": "on the CPU", "link": "over the link", "disk": "from the disk"}
FAULTS = (
    f"page faults of mapped files read at {MAPPED:.0%} of the disk's rate (engines' authors measured 14% to 45%; "
    "pass that much of it as --disk)"
)


def lines(of: Answer, verbose: bool = False) -> Iterator[str]:
    """Yield the answer in 25 lines or fewer; with `verbose` its tables as well."""
    best = of.best
    yield f"{of.load.name}{_weights(of)} on {of.machine.in_words}"
    yield f"{of.load.grade.upper()}: {of.load.source}"
    yield ""
    yield f"  {speed(best.tokens_per_s)}   {best.setting.engine}: {typed_of(best)}"
    if of.ends and max(of.ends) > 1.02 * min(of.ends):
        least, most = (digits(end, 3) for end in (min(of.ends), max(of.ends)))
        yield f"  {least} to {most} tokens/s by what is assumed of RAM and cores (--ram-rate, --cores)"
    yield f"  {_compared(best)}"
    for name, memory in zip(_tiers(best), best.memory, strict=True):
        yield f"  {name} {_sum(of, memory)}"
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
    if not verbose:
        yield "-v shows every engine, each way to use the memory, and all steps"
        return
    yield from _tables(of)


def _tables(of: Answer) -> Iterator[str]:
    """Yield the tables: engines, upgrades, ways, steps, drafts."""
    yield ""
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


def document(of: Answer) -> dict[str, Any]:
    """Return the answer for `--json`. Sizes are in bytes, times in nanoseconds."""
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
        "best": _estimate(of.best) | {"binds": of.binds, "ends": list(of.ends)},
        "by_engine": [_estimate(estimate) for estimate in of.engines],
        "ladder": {"knob": of.best.setting.mode.name, "steps": [_estimate(estimate) for estimate in of.ladder]},
        "ways": [_estimate(way.estimate) | {"engines": list(way.engines)} for way in of.ways],
        "turns": [turn._asdict() for turn in of.turns],
        "expert_us": of.costs,
        "more": [more._asdict() for more in of.more],
        "smaller": [more._asdict() for more in of.smaller],
        "drafts": [_step_of(step, of.steps[0]) for step in of.steps],
        "alone": of.alone and _estimate(of.alone),
        "prompt": of.prompt and {**of.prompt._asdict(), "engines": [first._asdict() for first in of.prompt.engines]},
        "not_listed": of.left_out,
        "warnings": list(of.warnings),
        "replays": of.replays,
    }


def _estimate(of: Estimate) -> dict[str, Any]:
    setting = of.setting
    tried = tried_of(of) if setting.engine else None
    return {
        "engine": setting.engine,
        "mode": setting.mode.name,
        "flags": setting.flags,
        "holds": setting.mode.holds,
        "miss": setting.mode.miss,
        "tokens_per_s": of.tokens_per_s._asdict(),
        "hit_rate": of.hit._asdict(),
        "gpu_layers": setting.gpu_layers if setting.mode.holds == LAYERS else None,
        "experts_fast_bytes": setting.fast_bytes,
        "experts_ram_bytes": setting.ram_bytes,
        "experts_disk_bytes": setting.disk_bytes,
        "memory": [{"parts": memory.parts, "size": memory.size} for memory in of.memory],
        "parts_ns": of.parts._asdict(),
        "tried": tried.model_dump(mode="json") if tried else None,
    }


def _step_of(step: Drafted, none: Drafted) -> dict[str, Any]:
    totals = step.estimate.middle.result.totals
    passes = sum(row["decode_passes"] for row in step.estimate.middle.result.per_request) / step.load.decoding.streams
    return _estimate(step.estimate) | {
        "drafts": step.drafts,
        "gain": step.estimate.gain(none.estimate)._asdict(),
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
    chances = [f"drafts are right with chances {drafts.accept}"] if drafts and drafts.most else []
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
    middle = best.tokens_per_s.middle
    speeds = between(digits(middle / tried.most, 3), digits(middle / tried.least, 3))
    many = f" on {counted(tried.machines, 'machine')}" if tried.machines else ""
    whose = f" ({tried.population})" if tried.population else ""
    runs = counted(tried.runs, "measured run")
    said = f"{runs} of {name}, {kind}{many}{whose}: {speeds} tokens/s if this one errs as they"
    if tried.left_out is not None:
        said += f"; median error of a machine that no figure was fitted on {tried.left_out:.0%}"
    return said


def _tiers(best: Estimate) -> list[str]:
    return [best.setting.machine.platform.fast_tier, "RAM"][: len(best.memory)]


def _sum(of: Answer, memory: Sum) -> str:
    """Return what takes a memory: `24.7 GB of 25.8 GB (sold as 24 GB): 4.54 GB dense weights, ...`."""
    parts = []
    for name, count in memory.parts.items():
        text = f"{size(count)} {name}"
        if name == "KV cache":
            many = of.load.decoding.streams
            text += f" of {f'{many} x ' if many > 1 else ''}{of.load.context:,} positions"
        if name == "experts" and memory is of.best.memory[0]:
            text += _held(of)
        parts.append(text)
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
    if first.tokens_per_s.middle > FAR * of.best.tokens_per_s.middle:
        tried = tried_of(first)
        borne = f"its runs took {tried.median:.2g} times the predicted time" if tried else "not compared with runs"
        name = first.setting.engine
        yield f"  faster in replays: {name}, {speed(first.tokens_per_s)}, {borne}: {typed_of(first)}"


def _drafts(of: Answer) -> Iterator[str]:
    """Yield whether drafts pay, and what several streams do."""
    streams = of.load.decoding.streams
    if of.alone is not None:
        one, all_of = of.alone.tokens_per_s.middle, of.best.tokens_per_s.middle
        yield (
            f"{streams} streams: {digits(all_of, 3)} tokens/s together, {digits(all_of / streams, 3)} each; one stream "
            f"alone has {digits(one, 3)}"
        )
    if len(of.steps) < 2:
        return
    none, tried = of.steps[0], max(of.steps[1:], key=lambda step: step.estimate.tokens_per_s.middle)
    gain = tried.estimate.gain(none.estimate)
    verdict = {True: "pay", False: "do not pay", None: "depend on the routing"}[pays(gain)]
    yield (
        f"drafts {verdict}: {counted(tried.drafts, 'draft')} per pass {span(gain)} tokens/s than none "
        f"({digits(tried.estimate.tokens_per_s.middle, 3)} in place of {digits(none.estimate.tokens_per_s.middle, 3)})"
    )


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
    """Yield what to buy, and the smaller quantisation to take."""
    if of.more:
        parts = [f"{more.what}: {digits(more.tokens_per_s, 3)} ({percent(more.gain)} more)" for more in of.more[:HEAD]]
        yield f"to buy: {'; '.join(parts)}"
    else:
        yield "to buy: no single upgrade (larger, or twice as fast) gains more than 1%"
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
        last = of.turns[-1] if of.turns else None
        if last is not None and last.faster == "placed" and len(of.turns) > 1:
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
        "gain": "" if step is none else percent(found["gain"]["middle"], signed=True),
        "experts/layer": f"{found['experts_per_layer']:.1f}",
        "hit": f"{step.estimate.hit.middle:.0%}",
        "flags": step.estimate.setting.flags,
    }
