"""Write a recommendation as a document: numbers and texts by name, for `--json`, sentences and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from moereplay.policies.grammar import deciding
from moereplay.results.remarks import Ranked, idle, synthetic_of, turned
from moereplay.results.settings import repeat_command
from moereplay.simulator.capacity import Memory, kv_bytes_of
from moereplay.simulator.platforms import platform
from moereplay.sweeps.recommend.answer import UNKNOWN_DENSE
from moereplay.sweeps.recommend.engines import Placed, engines, placed
from moereplay.sweeps.recommend.runner import Tried
from moereplay.sweeps.recommend.search import (
    WORTH,
    Answer,
    Question,
    chosen,
    differing,
    everything,
    most_replays,
)
from moereplay.sweeps.recommend.space import SHORT, bits_of, compulsory_limit, engines_of, start_of
from moereplay.traces.schema import Geometry, Trace
from moereplay.traces.texts import percent

Document = dict[str, Any]
KNOWN = "best_known-"  #: beginning of the names of the lists of `best_known`
FITS = "every expert fits, so that each is loaded once"
UNSEARCHED = "the search ended before it was known; --budget none searches on"
SHORT_TRACE = (
    "short trace: a cache that begins empty hits at most {} (compulsory limit), whatever its size, and "
    "makes no profile; every set here begins with a full cache, of whole layers or of arbitrary experts"
)
ONE = "one request only: how far another one would differ cannot be known"
NO_DENSE = f"not compared, because {UNKNOWN_DENSE}"
UNSIZED = (
    "no memory is counted for {}: neither the trace nor its model's name gives its size; subtract it from --memory"
)


def document(
    question: Question, answer: Answer, trace_name: str, whole: Trace | None = None, lists_at: str = ""
) -> Document:
    """Return the document of an answer. `trace_name` is the trace as the user typed it. All sizes are in bytes.

    `whole` is the complete trace if the question covers a part of it. `lists_at` is the beginning of the paths of the
    lists of experts that commands read; those of `best_known` are named after it.
    """
    trace = whole or question.trace
    best = answer.best
    return {
        "trace": {"name": trace_name, "model": _about(best)["model"], "digest": trace.digest},
        "synthetic": synthetic_of(_about(best)) or None,
        "platform": best.config.platform,
        "memory": {name: size for name, size in question.memory._asdict().items() if size or name != "head_bytes"}
        | {"cache_bytes": question.memory.cache_bytes}
        | _peak(question, question.memory.total_bytes),
        "best": _leader(question, best, trace_name, lists_at),
        "from_empty": answer.from_empty and _found(answer.from_empty),
        "best_known": answer.known and _leader(question, answer.known, trace_name, f"{lists_at}{KNOWN}"),
        "compulsory_limit": compulsory_limit(question.trace, best.config.schedule),
        "second": answer.second and _found(answer.second) | {"differs": list(differing(best, answer.second))},
        "seconds": _about(best)["seconds"],
        "calibration": _about(best)["calibration"],
        "uncalibrated": _about(best)["uncalibrated"],
        "dense_assumed": _about(best)["assumed"],
        **{name: _about(best).get(name) for name in ("band", "band_least", "band_most")},
        "searched": {
            "axes": answer.space.axes(),
            "combinations": answer.space.combinations,
            "replayed": answer.replayed,
            "screened_on": answer.screened_on,
            "judged_on": _part(question.trace, trace),
            "at_most": most_replays(question),
            "cut": answer.cut,
        },
        "memory_curve": [_point(question, each) for each in answer.curve],
        "all_fit": question.all_fit,
        "prefetch": _prefetch(question, answer),
        "cpu": _cpu(answer),
        "lossy": _lossy_sets(question, answer),
        "lossy_left_out": NO_DENSE if not question.memory.dense_bytes else "",
        "target_tokens_per_s": question.target_tokens_per_s,
        "smallest_memory_for_target": answer.smallest and _point(question, answer.smallest),
        "flags": flags(_setup(question, best)),
        "warnings": [*_warnings(question, best), *_turned(question, answer)],
    }


def _part(judged: Trace, trace: Trace) -> Document | None:
    """Describe the part of the trace that the figures cover, None for all of it."""
    if judged.tokens == trace.tokens:
        return None
    return {
        "requests": judged.requests,
        "tokens": judged.tokens,
        "of_requests": trace.requests,
        "of_tokens": trace.tokens,
    }


def _about(tried: Tried) -> Mapping[str, Any]:
    return tried.result.about


def _found(tried: Tried) -> Document:
    return {
        "config": tried.config.model_dump(mode="json"),
        "identity": _about(tried)["identity"],
        "cache_bytes": _about(tried)["capacity_bytes"],
        "tokens_per_s": tried.tokens_per_s,
        "hit_rate": tried.hit_rate,
        "mass_share_kept": tried.mass_share_kept,
    }


def _leader(question: Question, tried: Tried, trace_name: str, lists_at: str) -> Document:
    """Describe a leading set: result, start of the cache, engines that support it, and the command that replays it."""
    start = start_of(question.trace, tried.config)
    return _found(tried) | {
        "start": start,
        "engines": engines_of(tried.config, start),
        "command": repeat_command(tried.config.model_dump(mode="json"), trace_name, lists_at=lists_at),
    }


def _point(question: Question, tried: Tried) -> Document:
    size = _about(tried)["capacity_bytes"]
    total = question.memory.total_bytes - question.memory.cache_bytes + size
    return {
        "memory_bytes": total,
        "set": chosen(tried),
        "cache_bytes": size,
        "tokens_per_s": tried.tokens_per_s,
        "hit_rate": tried.hit_rate,
        **_peak(question, total),
    }


def _peak(question: Question, used: int) -> Document:
    """Describe the peak of a fast memory of `used` bytes, if the platform states the memory that the system needs."""
    machine = platform(question.base["platform"])
    if machine.memory_bytes is None or machine.reserve_bytes is None:
        return {}
    peak = used + int(machine.reserve_bytes)
    of = {"reserve_bytes": int(machine.reserve_bytes), "machine_bytes": int(machine.memory_bytes)}
    return of | {"peak_bytes": peak, "will_page": peak > machine.memory_bytes}


def _prefetch(question: Question, answer: Answer) -> Document:
    """Return whether prefetching pays; `pays` is null where the search ended too early to know."""
    best, without = answer.best, answer.without_prefetch
    if question.all_fit or without is None:
        known = question.all_fit
        return {"pays": False if known else None, "gain": 0.0, "reason": FITS if known else UNSEARCHED}
    gain = best.tokens_per_s / without.tokens_per_s - 1
    if best.config.prefetch != "none":
        pays = gain > WORTH
        than = "than the best set without" + ("" if pays else ", which is negligible")
        return {"pays": pays, "gain": gain, "reason": f"{best.config.prefetch}: {percent(gain)} more tokens/s {than}"}
    if answer.recall_that_pays is None and answer.cut:
        return {"pays": None, "gain": 0.0, "reason": UNSEARCHED}
    if answer.recall_that_pays is None:
        return {"pays": False, "gain": 0.0, "reason": "not even with every expert of the next layer predicted"}
    recall = answer.recall_that_pays
    reason = f"no prefetch that the trace can feed gains; a predictor of recall and precision {recall:g} would"
    return {"pays": False, "gain": 0.0, "reason": reason, "recall_that_pays": recall}


def _cpu(answer: Answer) -> Document:
    """Describe whether computing misses on the CPU beats fetching them; `pays` is null if the machine has none."""
    if answer.space.miss == ("fetch",):
        return {"pays": None, "gain": 0.0, "reason": "the machine has no additional CPU, or none is needed"}
    if answer.fetching is None:
        return {"pays": None, "gain": 0.0, "reason": UNSEARCHED}
    best, gain = answer.best, answer.best.tokens_per_s / answer.fetching.tokens_per_s - 1
    if best.config.miss == "fetch":
        return {"pays": False, "gain": 0.0, "reason": "to fetch every miss is faster than to compute any on the CPU"}
    reason = f"{best.config.miss}: {percent(gain)} more tokens/s than the best set that fetches every miss"
    return {"pays": gain > WORTH, "gain": gain, "reason": reason}


def _lossy_sets(question: Question, answer: Answer) -> list[Document]:
    """Describe the lossy sets; none if dense weights are unknown, because gains would be for experts alone."""
    found = answer.lossy if question.memory.dense_bytes else ()
    return [_lossy(each, answer.best, question.trace.geometry.expert_bits) for each in found]


def _lossy(tried: Tried, best: Tried, stored_bits: float) -> Document:
    totals = tried.result.totals
    low = totals["mass_low_precision"] / totals["mass"] if totals["mass"] else None
    changed = {kind: text for kind in ("routing", "miss") if (text := getattr(tried.config, kind)) != "standard"}
    changed = {kind: text for kind, text in changed.items() if text != getattr(best.config, kind)}
    return _found(tried) | {
        "change": changed,
        "gain": tried.tokens_per_s / best.tokens_per_s - 1,
        "mass_share_low_precision": low,
        "bits": bits_of(changed),
        "stored_bits": stored_bits,
    }


def _setup(question: Question, best: Tried) -> Setup:
    geometry = question.trace.geometry
    size = min(_about(best)["capacity_bytes"], everything(geometry))
    return Setup(geometry, question.memory, size, platform(best.config.platform).cpu is not None)


def _warnings(question: Question, best: Tried) -> list[str]:
    about, trace = _about(best), question.trace
    sizes = {"dense weights": question.memory.dense_bytes, "the KV cache": kv_bytes_of(trace)}
    unsized = [UNSIZED.format(what) for what, size in sizes.items() if not size]
    limit = compulsory_limit(trace, best.config.schedule)
    short = [SHORT_TRACE.format(f"{100 * limit:.1f}%")] if limit < SHORT and best.config.warm else []
    short += idle([best.result.to_json()])
    open_loop = [about["label"]] if "open-loop" in about["label"] else []
    return [*unsized, *short, *filter(None, [about["warning"]]), *open_loop, *([ONE] if trace.requests == 1 else [])]


def _turned(question: Question, answer: Answer) -> list[str]:
    """Say which other set would be faster under an assumed price of decisions, if the platform states none."""
    if platform(question.base["platform"]).decisions.of_steps:
        return []
    others = {id(each): each for each in (answer.second, answer.without_prefetch, answer.known) if each}
    found = (turned(*_ranked(answer.best, each), question.trace.geometry.layers) for each in others.values())
    return list(dict.fromkeys(filter(None, found)))


def _ranked(best: Tried, other: Tried) -> tuple[Ranked, Ranked]:
    """Return two sets by the settings in which they differ."""
    of, settings = deciding(), differing(best, other)
    first, second = (
        Ranked(
            ", ".join(f"{name} {chosen(each)[name]}" for name in settings) or "the same set",
            each.tokens_per_s,
            of(each.config.model_dump(mode="json")),
        )
        for each in (best, other)
    )
    return first, second


# -- Flags of engines for a cache of some bytes


class Setup(NamedTuple):
    """Model and memory that an engine is configured for."""

    geometry: Geometry
    memory: Memory
    cache_bytes: int  #: for experts in fast memory
    beside_cpu: bool  #: the memory belongs to an accelerator with a host CPU, as engines for GPUs expect

    @property
    def placed(self) -> Placed:
        """The cache in the quantities that flags name."""
        share = (self.memory.dense_bytes + self.cache_bytes) / self.memory.total_bytes
        return placed(self.geometry, self.cache_bytes, share)


def flags(setup: Setup) -> dict[str, object]:
    """Return the cache in MiB and in experts of mean size, and for a GPU the flags of every engine that has one."""
    of = setup.placed
    spelled = {each.name: each.modes[0] for each in engines() if setup.beside_cpu and "gpu" in each.modes[0].machines}
    return {
        "cache_mib": of.cache_mib,
        "slots": of.slots,
        "slots_per_layer": of.gpu_experts,
        "unequal": len(set(setup.geometry.expert_bytes)) > 1,
        **{name: mode.render(of) for name, mode in spelled.items()},
    }
