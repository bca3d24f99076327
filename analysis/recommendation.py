"""A recommendation in sentences, from the document of `sweeps/recommend/document.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moereplay.analysis.tables import Share, table
from moereplay.results.remarks import assumptions, seconds_in_words, with_routing
from moereplay.traces.texts import between, counted, digits, percent, size, sold, times_as_fast
from moereplay.traces.units import GB

Document = Mapping[str, Any]
KINDS = ("eviction", "prefetch", "miss", "scope")
SHOWN = 3  #: lossy sets that are listed
NEAR = 1e-3  #: smaller relative differences of sizes are ignored
UNJUDGED = "what that costs in quality is not known here (docs/quality.md)"


def lines(found: Document) -> list[str]:
    """Return every sentence and the table over memory."""
    return [
        _heading(found),
        *assumptions([found["synthetic"] or ""]),
        "",
        *_memory(found),
        *([found["dense_assumed"]] if found.get("dense_assumed") else []),
        *(f"warning: {each}" for each in found["warnings"]),
        *_best(found),
        *_start(found),
        *_engines(found),
        *_second(found),
        _prefetch(found),
        *_cpu(found),
        *(_replayed(found["decoding"]) if "decoding" in found else ()),
        *_more(found),
        *_target(found),
        *_lossy(found),
        _searched(found),
        "",
        table(
            [
                {
                    "memory as sold GB": point["memory_bytes"] / 2**30,
                    "cache GB": point["cache_bytes"] / GB,
                    "tok/s": point["tokens_per_s"],
                    "change": _change(point, found),
                    "hit": Share(point["hit_rate"]),
                    **({"memory": "will page" if point["will_page"] else "fits"} if "will_page" in point else {}),
                }
                for point in found["memory_curve"]
            ],
            "speed by memory, with the fastest of the leading sets:",
        ),
        _flags(found),
        f"again: {found['best']['command']}",
    ]


def _heading(found: Document) -> str:
    label = with_routing("SIMULATED", found["synthetic"] or "")
    return f"{label}: {found['trace']['model']} on {found['platform']}; seconds: {seconds_in_words(found)}"


def _memory(found: Document) -> list[str]:
    memory = found["memory"]
    assumed = found.get("assumed", {})
    context = f" ({assumed['context']:,} positions assumed; --context)" if "context" in assumed else ""
    runtime = " (assumed; --runtime)" if "runtime_bytes" in assumed else ""
    parts = f"{size(memory['dense_bytes'])} dense weights, {size(memory['kv_bytes'])} KV cache{context}, "
    parts += f"{size(memory['runtime_bytes'])} runtime{runtime}"
    parts += f", {size(memory['head_bytes'])} draft layer" if memory.get("head_bytes") else ""
    left = f"{size(memory['cache_bytes'])} left for {_room(found)}"
    total = memory["total_bytes"]
    return [f"memory: {size(total)} ({sold(total)} as sold): {parts}; {left}", *_peak(memory)]


def _peak(memory: Document) -> list[str]:
    """Return the memory peak, if the platform states the system's memory."""
    if "peak_bytes" not in memory:
        return []
    peak = f"peak: {size(memory['peak_bytes'])} with {size(memory['reserve_bytes'])} for the system"
    machine = size(memory["machine_bytes"])
    if not memory["will_page"]:
        return [f"{peak}, of {machine}"]
    return [
        f"warning: {peak}, but the machine has {machine}: every set here will page; times do not include page faults"
    ]


def _room(found: Document) -> str:
    flags = found["flags"]
    of_mean = " of mean size" if flags["unequal"] else ""
    return f"{flags['slots']:,} experts{of_mean}, {flags['slots_per_layer']} of each layer"


def _best(found: Document) -> list[str]:
    best = found["best"]
    named = ", ".join(f"{kind} {best['config'][kind]}" for kind in KINDS)
    named += " (will page)" if found["memory"].get("will_page") else ""
    basis = ", calibrated" if found["calibration"] else ", estimated"
    sure = "synthetic routing, no interval" if found["synthetic"] else _sure(best)
    speed = f"{_speed(best['tokens_per_s'])} ({sure}{basis}){_in_runs(found)}"
    return [f"use: {named}: {speed}, hit rate {Share(best['hit_rate'])}"]


def _in_runs(found: Document) -> str:
    """Return the speeds that the platform's measured runs make likely, if they were compared with predictions."""
    if not found.get("band_least"):
        return ""
    ends = (digits(found["best"]["tokens_per_s"] / found[name], 2) for name in ("band_most", "band_least"))
    return f", in measured runs {between(*ends)}"


STARTS = {
    "layers": "starts with the experts of whole layers, from the last, as many as fit",
    "any": "starts with arbitrary experts of all layers, as many as fit",
    "used": "starts with the experts that the first half of the trace's tokens used most, as many as fit",
}


def _start(found: Document) -> list[str]:
    text, cold = STARTS.get(found["best"]["start"]), found["from_empty"]
    if text is None:
        return []
    empty = f"; from an empty cache: {_speed(cold['tokens_per_s'])}, hit rate {Share(cold['hit_rate'])}" if cold else ""
    return [f"cache: {text} (--warm){empty}"]


def _engines(found: Document) -> list[str]:
    best, known = found["best"], found["best_known"]
    if best["engines"]:
        return [f"engines that have this set: {', '.join(best['engines'])}"]
    none = "engines: none known with this set"
    if not known:
        return [none]
    named = ", ".join(f"{kind} {known['config'][kind]}" for kind in KINDS)
    less = percent(known["tokens_per_s"] / best["tokens_per_s"] - 1, signed=True)
    what = f"{_speed(known['tokens_per_s'])} ({less}), hit rate {Share(known['hit_rate'])}"
    return [f"{none}; best supported set: {', '.join(known['engines'])}: {what}: {named}"]


def _sure(best: Document) -> str:
    interval = best.get("interval")
    if not interval or (interval["low"] is None and interval["requests"] == 1):
        return "one request, no interval"
    if interval["low"] is None:
        return f"no interval: {interval['why'] or 'requests cannot be compared one by one'}"
    ends = between(f"{interval['low']:,.4g}", f"{interval['high']:,.4g}")
    return f"{ends}, 95% over {counted(interval['requests'], 'request')}"


def _prefetch(found: Document) -> str:
    if found["all_fit"]:
        return "every expert fits: eviction and prefetch make no difference"
    pays = found["prefetch"]["pays"]
    words = "may pay or not" if pays is None else "pays" if pays else "does not pay"
    return f"prefetch {words}: {found['prefetch']['reason']}"


def _second(found: Document) -> list[str]:
    second = found["second"]
    if not second:
        return []
    named = ", ".join(f"{kind} {second['config'][kind]}" for kind in second["differs"])
    return [f"second: {named}: {_speed(second['tokens_per_s'])}{_behind(found)}"]


def _behind(found: Document) -> str:
    if found["synthetic"] or found["second"].get("answer") == "yes":
        return ""
    interval = found["best"].get("interval")
    if interval and interval["low"] is not None:
        return ", statistically tied with the best"
    ratio = found["best"]["tokens_per_s"] / found["second"]["tokens_per_s"]
    reason = "one request, not tested" if not interval or interval["requests"] < 2 else "not tested"
    return f", the best is {times_as_fast(ratio)} ({reason})"


def _cpu(found: Document) -> list[str]:
    pays = found["cpu"]["pays"]
    return [] if pays is None else [f"the CPU {'pays' if pays else 'does not pay'}: {found['cpu']['reason']}"]


def _more(found: Document) -> list[str]:
    now, curve = found["best"]["cache_bytes"], found["memory_curve"]
    above = [point for point in curve if point["cache_bytes"] > now * (1 + NEAR)][:1]
    below = [point for point in curve if point["cache_bytes"] < now * (1 - NEAR)][-1:]
    steps = [
        f"{size(abs(point['cache_bytes'] - now))} {word}: {_change(point, found)} tokens/s"
        for word, points in (("more", above), ("less", below))
        for point in points
    ]
    return [f"memory: {', '.join(steps)}"] if steps else []


def _change(point: Document, found: Document) -> str:
    return percent(point["tokens_per_s"] / found["best"]["tokens_per_s"] - 1, signed=True)


def _target(found: Document) -> list[str]:
    wanted, smallest = found["target_tokens_per_s"], found["smallest_memory_for_target"]
    if wanted is None:
        return []
    if smallest is None:
        if found["searched"]["cut"]:
            return [f"target: {_speed(wanted)}: the search ended before this was known; --budget none searches on"]
        return [f"target: {_speed(wanted)} cannot be reached, even with every expert in fast memory"]
    return [f"target: {_speed(wanted)} need {sold(smallest['memory_bytes'])} of memory, as it is sold"]


def _lossy(found: Document) -> list[str]:
    return [
        f"lossy: {', '.join(' '.join(pair) for pair in each['change'].items())}: {_speed(each['tokens_per_s'])}, "
        f"{percent(each['gain'])} more, for {_cost(each)}"
        for each in found["lossy"][:SHOWN]
    ] + [f"lossy: {found['lossy_left_out']}"] * bool(found["lossy_left_out"])


def _cost(each: Document) -> str:
    low, kept = each["mass_share_low_precision"] or 0, each["mass_share_kept"]
    costs = [f"{percent(1 - kept)} of the gate weight not as chosen"] if kept < 1 else []
    costs += [f"{percent(low)} of it at a lower precision"] if low else []
    costs += [f"every expert at {each['bits']:g} bits instead of {each['stored_bits']:g}"] if each["bits"] else []
    return f"{' and '.join(costs) or 'nothing that counters show'}; {UNJUDGED}"


def _searched(found: Document) -> str:
    searched = found["searched"]
    each = ", ".join(f"{len(values)} of {axis}" for axis, values in searched["axes"].items())
    few, part = searched["screened_on"], searched.get("judged_on")
    how = f", most on {few} requests, the best sets on all" if few and not part else ""
    if part:
        how = f"; figures cover {part['tokens']:,} of {counted(part['of_tokens'], 'token')}; --thorough replays all"
    cut = f"; ended early, of at most {searched['at_most']:,}: --budget none tries all" if searched["cut"] else ""
    many = f"{searched['combinations']:,} lossless sets ({each}); {counted(searched['replayed'], 'replay')}"
    return f"searched: {many}{how}{cut}"


def _flags(found: Document) -> str:
    flags = found["flags"]
    spelled = "; ".join(f"{name} {text}" for name, text in flags.items() if isinstance(text, str))
    nearest = f". Closest engine settings: {spelled}" if spelled else ""
    cache = f"{flags['cache_mib']:,} MiB, {_room(found)}"
    return f"in your engine: a cache of {cache}{nearest}"


def _speed(value: float) -> str:
    return f"{value:,.4g} tokens/s"


def with_intervals(found: Document, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the document with the interval of the best set's tokens/s, and whether it beats the second.

    `rows` are per-request rows by identity of the result. Synthetic routing has neither.
    """
    from moereplay.analysis.comparisons import compare, estimate

    if found["synthetic"]:
        return {**found, "best": {**found["best"], "interval": None}}
    ours = rows[found["best"]["identity"]]
    own = estimate(ours, "tokens_per_s")
    best = {**found["best"], "interval": own and own._asdict()}
    second = found["second"] and {
        **found["second"],
        "answer": compare(ours, rows[found["second"]["identity"]], "tokens_per_s").answer,
    }
    return {**found, "best": best, "second": second}


def _replayed(known: Document) -> Iterator[str]:
    """Yield the verdict and the table by number of drafts of a search by replays."""
    steps, streams = known["steps"], known["concurrency"]
    tried = max(steps[1:], key=lambda step: step["tokens_per_s"], default=None)
    if tried:
        drafts = f"{tried['drafts']} draft{'s' if tried['drafts'] > 1 else ''} per pass"
        words = f"use {drafts}" if known["pays"] else f"do not draft: the best, {drafts}"
        yield f"drafts: {words}: {percent(known['gain'], signed=True)} tokens/s beside none, each with its fastest set"
    alone = known["alone"]
    best = next((step for step in steps if step["drafts"] == known["drafts"]), steps[0])
    if alone:
        yield (
            f"streams: {streams} together have {_three(best['throughput_tokens_per_s'])} tokens/s with prompts, "
            f"{_three(best['tokens_per_s'])} each in decoding; one at a time without drafts has "
            f"{_three(alone['throughput_tokens_per_s'])} and {_three(alone['tokens_per_s'])}; "
            f"hit rate {best['hit_rate']:.0%} in place of {alone['hit_rate']:.0%}"
        )
    yield table(
        [
            {
                "drafts": step["drafts"],
                "tokens": _three(step["tokens_per_pass"]),
                "tokens/s": _three(step["tokens_per_s"]),
                "with prompts": _three(step["throughput_tokens_per_s"]),
                "hit": f"{step['hit_rate']:.0%}",
                "MB": _three(step["bytes_moved_per_token"] / 1e6),
                "miss": step["set"]["miss"],
            }
            for step in steps
        ],
        f"by number of drafts, {streams} at a time (tokens: of a request's pass; tokens/s: of a request in decoding, "
        "with prompts: of all together; MB: moved per decoded token):",
    )
    chances = "/".join(digits(chance, 3) for chance in known["accept"])
    if tried:
        yield f"a draft is right with {chances} if those before it are, {known['accept_source']}"


def _three(value: float) -> str:
    return digits(value, 3)
