"""The quick answer as a document: numbers and texts by name, for `--json` and for sentences. Sizes are in bytes."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from moereplay.simulator.calibration import unlike_passes
from moereplay.simulator.machine import NO_LIMIT, Machine
from moereplay.simulator.platform import Platform
from moereplay.sweeps.recommend.drafting import Drafted, OfEngine, Step
from moereplay.sweeps.recommend.engines import engine
from moereplay.sweeps.recommend.hits import LAYERS
from moereplay.sweeps.recommend.placements import Choice, Placements, placements
from moereplay.sweeps.recommend.quick import WORTH, Estimate, Quick, Range
from moereplay.sweeps.recommend.token_time import MAPPED, Load, Parts, waited
from moereplay.traces.dense import dense_of
from moereplay.traces.drafts import OFF
from moereplay.traces.geometry import recognised

Document = dict[str, Any]
#: The largest part of a token's time where mapped experts do not fit in memory; the range is of MAPPED's sources.
FAULTS = (
    f"page faults of mapped files read at {MAPPED:.0%} of the disk's rate (engines' authors measured 14% to 45%; "
    "pass that much of it as --disk)"
)
NO_GAIN: Document = dict.fromkeys(("gain", "least", "most", "pays"))


def quick_document(load: Load, machine: Machine, found: Quick) -> Document:
    """Return the document of an answer."""
    return {
        "machine": _machine(machine, load, found),
        "model": {
            "layers": load.geometry.layers,
            "experts": load.geometry.experts,
            "k": load.geometry.k,
            "expert_bytes": load.expert_bytes,
            "dense_bytes": load.dense_bytes,
        },
        "context": load.context,
        "kv_bytes": load.kv_bytes,
        "runtime_bytes": load.runtime_bytes,
        "best": _estimate(found.best) | {"binds": found.binds},
        "ladder": {"knob": found.best.setting.mode.name, "steps": [_estimate(each) for each in found.ladder]},
        "by_engine": [_estimate(each) for each in found.by_engine],
        "schemes": [_estimate(each) for each in found.schemes],
        "crossings": [each._asdict() for each in found.crossings],
        "more": [
            {"what": each.what, "tokens_per_s": each.tokens_per_s, "gain": each.gain, "engine": each.setting.engine}
            | {"flags": each.setting.flags}
            for each in found.more
        ],
        "pays": _pays(found),
        "placements": _placements(placements(load, machine)),
        "not_listed": found.not_listed,
        "warnings": list(found.warnings),
    }


def decoding_document(found: Drafted) -> Document:
    """Return the document of an answer about drafts and streams; tokens/s are those of all streams together."""
    of = found.asked
    decoding = of.at(found.best)
    compared = found.tried
    gain = compared.gain(found.none) if compared else None
    return {
        "concurrency": of.streams,
        "drafts": found.best,
        "accept": list(of.drafts.accept),
        "accept_source": of.accept,
        "rejected": of.drafts.rejected,
        "rows": decoding.rows,
        "head": of.head and not found.stated,
        "head_bytes": max(step.load.head_bytes for step in found.steps),
        "engine": found.none.estimate.setting.engine,
        "steps": [_step(each, found.none) for each in found.steps],
        "alone": _step(found.alone, found.none) if found.alone else None,
        "gain": gain and _range(gain),
        "pays": None if gain is None else pays_of(gain),
        "by_engine": [_drafts_of(each) for each in found.by_engine],
    }


def _step(step: Step, none: Step) -> Document:
    estimate, of = step.estimate, step.load
    return {
        "drafts": step.drafts,
        "rows": of.decoding.rows,
        "tokens_per_pass": of.decoding.tokens,
        "tokens_per_s": _range(estimate.tokens_per_s),
        "tokens_per_s_per_stream": step.per_stream,
        "experts_per_layer": step.union,
        "experts_of_one_row": of.geometry.k,
        "hit_rate": _range(estimate.hit),
        "misses_per_layer": step.misses / of.geometry.layers,
        "bytes_missed_per_token": step.bytes_per_token,
        "pass_ns": step.pass_ns,
        "plain_passes": step.pass_ns / none.pass_ns,
        "experts_fast_bytes": estimate.setting.fast_bytes,
        "kv_bytes": of.kv_bytes,
        "flags": estimate.setting.flags,
    }


def _drafts_of(each: OfEngine) -> Document:
    best = each.best
    gain = best and best.gain(each.none)
    return {
        "engine": each.engine.name,
        "drafts_known": each.engine.drafts,
        "tokens_per_s_without": each.none.estimate.tokens_per_s.middle,
        "drafts": best and best.drafts,
        "tokens_per_s": best and best.estimate.tokens_per_s.middle,
        "gain": gain and _range(gain),
        "pays": gain and pays_of(gain),
        "plain_passes": best and best.pass_ns / each.none.pass_ns,
        "flags": (best if best and pays_of(gain or best.gain(each.none)) else each.none).estimate.setting.flags,
    }


def pays_of(gain: Range) -> bool | None:
    """Return whether a gain is worth it with every routing; None if that depends on the routing."""
    return True if gain.least > WORTH else False if gain.most <= WORTH else None


def _machine(machine: Machine, load: Load, found: Quick) -> Document:
    platform = machine.platform
    faults = any(each.setting.disk_bytes and each.setting.mode.below == "mmap" for each in found.by_engine)
    ram = machine.ram_bytes if 0 < machine.ram_bytes < NO_LIMIT else None
    return {
        "name": "this machine" if platform.name == "here" else platform.name,
        "kind": machine.kind,
        "fast_tier": platform.fast_tier,
        "fast_bytes": machine.memory_bytes,
        "fast_bytes_per_s": getattr(platform.compute, "memory_bytes_per_s", None),
        "link_bytes_per_s": platform.links[0].bytes_per_s if machine.has_main_memory else None,
        "ram_bytes": ram,
        "ram_bytes_per_s": getattr(platform.cpu, "memory_bytes_per_s", None),
        "disk_bytes_per_s": machine.disk_bytes_per_s,
        **_basis(platform, load, found.best.parts),
        "assumed": [*machine.assumed, *([FAULTS] if faults else [])],
    }


def _basis(platform: Platform, load: Load, parts: Parts) -> Document:
    """Return whether the platform's figures were fitted on this model and on what a token waits for here, or why not.

    A model without a name is judged by the sizes of its weights.
    """
    about = platform.calibrated
    if about is None:
        return {"calibrated": False, "calibration": None, "uncalibrated": None, "band": None}
    model, size = recognised(load.model), fmean(load.geometry.expert_bytes)
    name = model.name if model else load.model
    several = f"batch:{load.decoding.rows}"
    wrong = (
        about.unlike(name, dense_of(load.geometry).read)
        or about.unlike_experts(name, size, [size])
        or unlike_passes(platform.compute, several, OFF)
        or about.unmeasured(waited(platform, [parts]))
    )
    band = platform.band if wrong is None else None
    return {
        "calibrated": wrong is None,
        "calibration": about.in_one_line() if wrong is None else None,
        "uncalibrated": wrong,
        "band": band and band.in_words(),
    }


def _estimate(found: Estimate) -> Document:
    setting, machine = found.setting, found.machine
    tried = engine(setting.engine).tried_with(setting.mode)
    return {
        "engine": setting.engine,
        "mode": setting.mode.name,
        "flags": setting.flags,
        "holds": setting.mode.holds,
        "miss": setting.mode.miss,
        "tokens_per_s": _range(found.tokens_per_s),
        "hit_rate": _range(found.hit),
        "gpu_layers": setting.gpu_layers if setting.mode.holds == LAYERS else None,
        "fast_tier": machine.platform.fast_tier,
        "fast_tier_bytes": machine.memory_bytes,
        "experts_fast_bytes": setting.fast_bytes,
        "experts_ram_bytes": setting.ram_bytes,
        "experts_disk_bytes": setting.disk_bytes,
        "peak_fast_bytes": found.peak_fast_bytes,
        "peak_ram_bytes": found.peak_ram_bytes,
        "parts_ns": found.parts._asdict(),
        "tried": tried.model_dump(mode="json") if tried else None,
    }


def _range(values: Range) -> Document:
    return values._asdict()


def _pays(found: Quick) -> Document:
    """Return the gain of each scheme over the best without it; `pays` is null where it depends on the routing."""
    fetching = [each for each in found.schemes if each.setting.mode.miss == "fetch"]
    computing = [each for each in found.schemes if each.setting.mode.miss != "fetch"]
    caches = [each for each in found.schemes if each.setting.mode.holds.startswith("lru")]
    placed = [each for each in found.schemes if not each.setting.mode.holds.startswith("lru")]
    return {"cpu": _gain(computing, fetching), "cache": _gain(caches, placed)} | {
        "prefetch": {"gain": found.prefetch_gain, "pays": found.prefetch_gain > WORTH or None, "is_upper_bound": True}
    }


def _gain(these: list[Estimate], others: list[Estimate]) -> Document:
    """Compare the fastest of two kinds, of which one may read the disk in another way."""
    if not these or not others:
        return NO_GAIN | {"reads": [], "engines": []}
    this, other = (max(each, key=lambda found: found.tokens_per_s.middle) for each in (these, others))
    reads = [each.setting.mode.below for each in (this, other) if each.setting.disk_bytes]
    return _over(this, other) | {
        "reads": reads if len(set(reads)) > 1 else [],
        "engines": [f"{each.setting.engine}{_untried(each)}" for each in (this, other)],
    }


def _untried(found: Estimate) -> str:
    return "" if engine(found.setting.engine).tried else ", compared with no run"


def _placements(found: Placements | None) -> Document | None:
    """Return what the same bytes could hold, and the gains of a cache and of each way to serve a miss."""
    if found is None or all(each.estimate.setting.disk_bytes for each in found.choices):
        return None  # how an engine reads the disk decides then, which the schemes leave out
    fastest = {of: [each for each in found.choices if each.scheme.is_cache == of] for of in (True, False)}
    by_miss = {of: [each for each in found.choices if each.scheme.miss == of] for of in ("cpu", "fetch", "split")}
    return {
        "experts_bytes": found.size,
        "choices": [_choice(each) for each in found.choices],
        "expert_us": found.expert_us,
        "turns": [each._asdict() for each in found.turns],
        "cache": _compared(fastest[True], fastest[False]),
        "cpu": _compared(by_miss["cpu"], by_miss["fetch"]),
    }


def _choice(each: Choice) -> Document:
    estimate = each.estimate
    return {
        "holds": each.scheme.holds,
        "miss": each.scheme.miss,
        "tokens_per_s": _range(estimate.tokens_per_s),
        "hit_rate": _range(estimate.hit),
        "gpu_layers": estimate.setting.gpu_layers if each.scheme.holds == LAYERS else None,
        "experts_fast_bytes": estimate.setting.fast_bytes,
        "experts_ram_bytes": estimate.setting.ram_bytes,
        "experts_disk_bytes": estimate.setting.disk_bytes,
        "parts_ns": estimate.parts._asdict(),
        "engines": list(each.engines),
    }


def _compared(these: list[Choice], others: list[Choice]) -> Document:
    """Return the gain of the fastest of these over the fastest of the others, routing by routing."""
    if not these or not others:
        return dict(NO_GAIN)
    return _over(these[0].estimate, others[0].estimate)


def _over(this: Estimate, other: Estimate) -> Document:
    """Return the gain of one over the other: in the middle, least and most over the routings, and whether it pays."""
    gains = [mine / theirs - 1 for mine, theirs in zip(this.speeds, other.speeds, strict=True)]
    gain = this.tokens_per_s.middle / other.tokens_per_s.middle - 1
    return {"gain": gain, "least": min(gains), "most": max(gains), "pays": pays_of(Range.of(gains))}
