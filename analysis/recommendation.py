"""A recommendation in sentences, from its document (`sweeps/recommendation.py` says what is in it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis.tables import Share, table
from results.labels import ESTIMATE

Document = Mapping[str, Any]
KINDS = ("eviction", "prefetch", "miss", "scope")
SHOWN = 3  #: of what may change the output


def lines(said: Document) -> list[str]:
    """Every sentence, and the table over memory."""
    return [
        _heading(said),
        "",
        *_memory(said),
        *_best(said),
        *_second(said),
        _prefetch(said),
        *_cpu(said),
        *_more(said),
        *_target(said),
        *_lossy(said),
        _searched(said),
        *(f"warning: {each}" for each in said["warnings"]),
        "",
        table(
            [_row(point, said) for point in said["memory_curve"]],
            "more or less memory, with the fastest of the leading sets:",
        ),
        _flags(said),
        f"again: {said['best']['command']}",
    ]


def _heading(said: Document) -> str:
    rest = f"calibrated, {said['calibration']}" if said["calibration"] else ESTIMATE
    return f"SIMULATED: {said['trace']['model']} on {said['platform']}; seconds: {rest}"


def _memory(said: Document) -> list[str]:
    memory = said["memory"]
    assumed = said.get("assumed", {})
    context = f" ({assumed['context']:,} positions assumed; --context)" if "context" in assumed else ""
    runtime = " (assumed; --runtime)" if "runtime_bytes" in assumed else ""
    parts = f"{_gb(memory['dense_bytes'])} dense weights, {_gb(memory['kv_bytes'])} KV cache{context}, "
    parts += f"{_gb(memory['runtime_bytes'])} runtime{runtime}"
    left = f"{_gb(memory['cache_bytes'])} left for experts, room for {said['flags']['slots']:,}"
    return [f"memory: {_gb(memory['total_bytes'])} GB: {parts}; {left}"]


def _best(said: Document) -> list[str]:
    best = said["best"]
    named = ", ".join(f"{kind} {best['config'][kind]}" for kind in KINDS)
    basis = "" if said["calibration"] else ", an estimate"
    return [f"use: {named}: {_speed(best['tokens_per_s'])} ({_sure(best)}{basis}), hit rate {Share(best['hit_rate'])}"]


def _sure(best: Document) -> str:
    interval = best.get("interval")
    if not interval or interval["low"] is None:
        return "of one request, so without an interval"
    return f"{interval['low']:,.4g} to {interval['high']:,.4g}, 95% over {interval['requests']} requests"


def _prefetch(said: Document) -> str:
    if said["all_fit"]:
        return "every expert fits: what is evicted or prefetched makes no difference"
    return f"prefetch {'pays' if said['prefetch']['pays'] else 'does not pay'}: {said['prefetch']['reason']}"


def _second(said: Document) -> list[str]:
    second = said["second"]
    if not second:
        return []
    named = ", ".join(f"{kind} {second['config'][kind]}" for kind in second["differs"])
    less = "" if second.get("answer") == "yes" else ", which cannot be distinguished from the best"
    return [f"second: {named}: {_speed(second['tokens_per_s'])}{less}"]


def _cpu(said: Document) -> list[str]:
    pays = said["cpu"]["pays"]
    return [] if pays is None else [f"the CPU {'pays' if pays else 'does not pay'}: {said['cpu']['reason']}"]


def _more(said: Document) -> list[str]:
    """The next points of the curve over memory, above and below."""
    now, curve = said["memory"]["cache_bytes"], said["memory_curve"]
    above = [point for point in curve if point["cache_bytes"] > now][:1]
    below = [point for point in curve if point["cache_bytes"] < now][-1:]
    steps = [
        f"{_gb(abs(point['cache_bytes'] - now))} GB {word}: {_change(point, said)} tokens/s"
        for word, points in (("more", above), ("less", below))
        for point in points
    ]
    return [f"memory: {', '.join(steps)}"] if steps else []


def _change(point: Document, said: Document) -> str:
    return f"{100 * (point['tokens_per_s'] / said['best']['tokens_per_s'] - 1):+.1f}%"


def _target(said: Document) -> list[str]:
    wanted, smallest = said["target_tokens_per_s"], said["smallest_memory_for_target"]
    if wanted is None:
        return []
    if smallest is None:
        return [f"target: {_speed(wanted)} are not reached with every expert in fast memory"]
    return [f"target: {_speed(wanted)} need {_gb(smallest['memory_bytes'])} GB of memory"]


def _lossy(said: Document) -> list[str]:
    return [
        f"lossy: {', '.join(' '.join(pair) for pair in each['change'].items())}: {_speed(each['tokens_per_s'])}, "
        f"{100 * each['gain']:,.0f}% more, for {_cost(each)}"
        for each in said["lossy"][:SHOWN]
    ]


def _cost(each: Document) -> str:
    low, kept = each["mass_share_low_precision"] or 0, each["mass_share_kept"]
    costs = [f"{100 * (1 - kept):.2g}% of the gate weight not as chosen"] if kept < 1 else []
    costs += [f"{100 * low:.3g}% of it at a lower precision"] if low else []
    costs += [f"every expert at {each['bits']:g} bits instead of {each['stored_bits']:g}"] if each["bits"] else []
    return " and ".join(costs) or "nothing that counters show"


def _searched(said: Document) -> str:
    searched = said["searched"]
    each = ", ".join(f"{len(values)} of {axis}" for axis, values in searched["axes"].items())
    few = searched["screened_on"]
    how = f", most of {few} requests, the best sets of all" if few else ""
    return f"searched: {searched['combinations']:,} lossless sets ({each}), with {searched['replayed']:,} replays{how}"


def _row(point: Document, said: Document) -> dict[str, object]:
    return {
        "memory GB": point["memory_bytes"] / 1e9,
        "cache GB": point["cache_bytes"] / 1e9,
        "tok/s": point["tokens_per_s"],
        "change": _change(point, said),
        "hit": Share(point["hit_rate"]),
    }


def _flags(said: Document) -> str:
    flags = said["flags"]
    spelled = ", ".join(f"{name} {text}" for name, text in flags.items() if isinstance(text, str))
    nearest = f". Nearest to it in engines that choose once: {spelled}" if spelled else ""
    cache = f"{flags['cache_mib']:,} MiB, {flags['slots_per_layer']} experts of each layer"
    return f"in your engine: a cache of {cache}{nearest}"


def _speed(value: float) -> str:
    return f"{value:,.4g} tokens/s"


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g}"


def with_intervals(said: Document, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The document with the interval of the best set's tokens/s, and whether it beats the second.

    `rows` are the requests of a result, by its identity.
    """
    from analysis.comparisons import compare, estimate

    ours = rows[said["best"]["identity"]]
    found = estimate(ours, "tokens_per_s")
    best = {**said["best"], "interval": found and found._asdict()}
    second = said["second"] and {
        **said["second"],
        "answer": compare(ours, rows[said["second"]["identity"]], "tokens_per_s").answer,
    }
    return {**said, "best": best, "second": second}
