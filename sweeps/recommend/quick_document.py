"""The quick answer as a document: numbers and texts by name, for `--json` and for sentences. Sizes are in bytes."""

from __future__ import annotations

from typing import Any

from moereplay.simulator.machine import NO_LIMIT, Machine
from moereplay.sweeps.recommend.engines import engine
from moereplay.sweeps.recommend.hits import LAYERS
from moereplay.sweeps.recommend.placements import Choice, Placements, placements
from moereplay.sweeps.recommend.quick import WORTH, Estimate, Load, Quick, Range

Document = dict[str, Any]


def quick_document(load: Load, machine: Machine, found: Quick) -> Document:
    """Return the document of an answer."""
    return {
        "machine": _machine(machine),
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
        "warnings": list(found.warnings),
    }


def _machine(machine: Machine) -> Document:
    platform = machine.platform
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
        "calibrated": platform.calibrated is not None,
        "assumed": list(machine.assumed),
    }


def _estimate(found: Estimate) -> Document:
    setting, of, machine = found.setting, engine(found.setting.engine), found.machine
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
        "tried": of.tried.model_dump(mode="json") if of.tried else None,
        "tried_in_words": of.tried.in_words() if of.tried else "",
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
        return {"gain": None, "least": None, "most": None, "pays": None, "reads": [], "engines": []}
    this, other = (max(each, key=lambda found: found.tokens_per_s.middle) for each in (these, others))
    gains = [mine / theirs - 1 for mine, theirs in zip(this.speeds, other.speeds, strict=True)]
    pays = True if min(gains) > WORTH else False if max(gains) <= WORTH else None
    reads = [each.setting.mode.below for each in (this, other) if each.setting.disk_bytes]
    return {
        "gain": this.tokens_per_s.middle / other.tokens_per_s.middle - 1,
        "least": min(gains),
        "most": max(gains),
        "pays": pays,
        "reads": reads if len(set(reads)) > 1 else [],
        "engines": [f"{each.setting.engine}{_untried(each)}" for each in (this, other)],
    }


def _untried(found: Estimate) -> str:
    return "" if engine(found.setting.engine).tried else ", compared with no run"


def _placements(found: Placements | None) -> Document | None:
    """Return what the same bytes could hold, and the gains of a cache and of each way to serve a miss."""
    if found is None:
        return None
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
        return {"gain": None, "least": None, "most": None, "pays": None}
    this, other = these[0].estimate, others[0].estimate
    gains = [mine / theirs - 1 for mine, theirs in zip(this.speeds, other.speeds, strict=True)]
    pays = True if min(gains) > WORTH else False if max(gains) <= WORTH else None
    gain = this.tokens_per_s.middle / other.tokens_per_s.middle - 1
    return {"gain": gain, "least": min(gains), "most": max(gains), "pays": pays}
