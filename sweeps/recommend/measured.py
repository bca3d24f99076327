"""A measured run as a setting of an engine, and its time by a replay: what one or two runs of a series fit.

A *series* is one person's runs on one machine with one thing changed (a row of a table per run). A decoded token is
replayed as `recommend` does; `factor` makes misses so many times as dear, which is the unknown rate of the CPU, link or
disk, and `step` adds a fixed time, which is what else a token costs. Of a prompt each batch streams the experts of the
layers that lie in main memory, at `factor` times the link's price, and a token of it takes `step`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

from moereplay.simulator.capacity import RUNTIME
from moereplay.simulator.cards import card, recognised
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import NOMINAL, Machine, assembled, without_gpu
from moereplay.sweeps.recommend.answer import Parts, parts_of, replayed
from moereplay.sweeps.recommend.engines import GLOBAL_LRU, LAYERS, STATIC, UNIFORM, Engine, Mode, engine, engines
from moereplay.sweeps.recommend.load import Load, load_of
from moereplay.sweeps.recommend.settings import SYSTEM, Setting, of_layers
from moereplay.traces.checkpoints.found import model_of
from moereplay.traces.geometry import by_spelling
from moereplay.traces.schema import Geometry, TraceError

MIB, GIB = 1 << 20, 1 << 30
POSITIONS = 4096  #: in the KV cache, where neither prompt nor context are published; a context is allocated, not read
BATCH = 2048  #: tokens of a batch of a prompt, where neither the table nor the engine's description has it
PLACEMENTS = ("cpu_layers", "expert_share", "slots", "ssd_slots", "all_cpu")
#: An engine of which nothing is known but what a row says: each layer costs what a fitted step adds.
UNKNOWN = Mode(name="", flags="", holds="layers", miss="cpu", below="mmap", source="columns of the row")
Row = Mapping[str, str]


class RefusedError(Exception):
    """A run that no setting expresses."""


class Expressed(NamedTuple):
    """A run as a load and a setting of an engine."""

    load: Load
    setting: Setting

    @property
    def geometry(self) -> Geometry:
        """The model as stored."""
        return self.load.geometry

    @property
    def machine(self) -> Machine:
        """The machine, without its GPU if the run used none."""
        return self.setting.machine


class Sample(NamedTuple):
    """A measured run: its time at a factor and a step, what was measured, and how often the step counts."""

    row: Row
    time: Callable[[float, float], float]
    measured: float  #: nanoseconds
    steps: float = 1
    run: Expressed | None = None  #: of a decoded token

    def told(self, factor: float, step: float) -> float:
        """Return the predicted nanoseconds of a token."""
        return self.time(factor, step if self.steps == 1 else 0) / self.steps + (step if self.steps > 1 else 0)

    @property
    def each(self) -> float:
        """The measured nanoseconds of a token."""
        return self.measured / self.steps


def samples(rows: Iterable[Row], strict: bool) -> tuple[list[Sample], list[tuple[Row, str]]]:
    """Return the runs that can be expressed, and the others with the reason; `strict` if all of the time is known."""
    found, refused = [], []
    for row in rows:
        try:
            _check(row)
            found.append(prompt(row) if _of_a_prompt(row) and not strict else decoded(row, strict))
        except (RefusedError, ConfigError) as why:
            refused.append((row, str(why)))
    return found, refused


def _check(row: Row) -> None:
    """Raises RefusedError for a run that its table leaves out."""
    if row["excluded"]:
        raise RefusedError(row["excluded"])
    if row["clean"] == "C":
        raise RefusedError("incomplete, or several things changed")


def _of_a_prompt(row: Row) -> bool:
    if row["question"]:
        return row["question"] == "prefill"
    return not row["decode_tok_s"] and bool(row["prefill_tok_s"])


def decoded(row: Row, strict: bool) -> Sample:
    """Return the time of a decoded token. Raises RefusedError or ConfigError."""
    run = expressed(row, strict)
    measured = 1e9 / _number(row, "decode_tok_s")
    return Sample(row, lambda factor, step: spent(run, factor).total + step, measured, run=run)


def prompt(row: Row) -> Sample:
    """Return the time of a prompt of which each batch streams the experts that it uses. Raises RefusedError."""
    tokens, rate = _number(row, "prompt_tokens"), _number(row, "prefill_tok_s")
    if not tokens or not rate:
        raise RefusedError("no prefill rate, or no length of the prompt")
    if row["placement"] == "cpu_layers" and not row["cpu_moe_layers"]:
        raise RefusedError("placement cpu_layers without their number")
    made = _engine(row)
    batch = _number(row, "ubatch", made.prompt_batch if made and made.prompt_batch else BATCH)
    used = 1 - (1 - _number(row, "top_k", 1) / _number(row, "experts", 1)) ** min(batch, tokens)
    streamed = -(-tokens // batch) * used * _streamed(row)
    return Sample(row, lambda factor, step: factor * streamed + tokens * step, tokens / rate * 1e9, tokens)


def _streamed(row: Row) -> float:
    """Return the ns of moving every expert of the layers outside of VRAM, or all experts of VRAM where none is."""
    machine, geometry = _machine(row, False), _geometry(row, False)
    layers = _number(row, "cpu_moe_layers", geometry.layers)
    size = geometry.experts * (sum(geometry.expert_bytes) / geometry.layers) * (layers or geometry.layers)
    platform = machine.platform
    rate = platform.links[0].bytes_per_s if layers else getattr(platform.compute, "memory_bytes_per_s", 1e12)
    return size / min(rate, (machine.disk_bytes_per_s or rate) if "ssd" in row["load"] else rate) * 1e9


@cache
def spent(run: Expressed, factor: float = 1) -> Parts:
    """Return the parts of a token, with misses `factor` times as dear."""
    setting = replace(run.setting, slower=factor)
    return parts_of(run.load, setting, replayed(run.load, setting, 0))


def positions(row: Row) -> int:
    """Return the positions in the KV cache that a token reads: the prompt's, or some where it is not published."""
    return int(_number(row, "prompt_tokens") or min(_allocated(row), POSITIONS))


def _allocated(row: Row) -> int:
    return int(_number(row, "ctx", POSITIONS))


def _engine(row: Row) -> Engine | None:
    """Return the engine whose name is the first word of the row's, None if there is no description of it."""
    name = (row["engine"].lower().split() or [""])[0]
    return next((each for each in engines() if name in (each.name, *each.aliases)), None)


def _without_gpu(row: Row) -> bool:
    return row["gpu"].lower().split()[:1] == ["none"]


# -- a run as a setting


def expressed(row: Row, strict: bool) -> Expressed:
    """Return a run as a setting; `strict` if all of its time is to be known. Raises RefusedError, or ConfigError."""
    if row["draft"] not in ("", "none") or row["concurrency"] not in ("", "1"):
        raise RefusedError("drafts or several requests")
    if not _number(row, "decode_tok_s"):
        raise RefusedError("no decode rate")
    placement, alone = row["placement"], _without_gpu(row)
    if placement not in PLACEMENTS:
        raise RefusedError(f"placement {placement or 'not published'}: expected {', '.join(PLACEMENTS)}")
    geometry, machine, mode = _geometry(row, strict), _machine(row, strict), _mode(row, strict)
    if alone and not geometry.dense_bytes and not geometry.dense_params:
        raise RefusedError("no GPU, and dense weights of unknown size")
    load = load_of(row["model"], geometry, positions(row))
    if alone:
        machine = without_gpu(machine) if machine.has_main_memory else machine
        fast = min(load.expert_bytes, max(0, _ram_room(row, load)))
        return Expressed(load, Setting("", mode, "", machine, fast, 0, 0, load.expert_bytes - fast))
    if placement in ("cpu_layers", "all_cpu"):
        away = int(_number(row, "cpu_moe_layers", geometry.layers))
        held = geometry.layers - min(away, geometry.layers)
        mode = mode.model_copy(update={"holds": LAYERS, "overlap": False})
        fast, share = of_layers(load, held), None
    else:
        held, share = 0, _share(row, geometry)
        made = _engine(row)
        if share is None and (placement == "expert_share" or (placement == "slots" and made and made.fills)):
            share = _left(row, machine, load)
        if share is None:
            raise RefusedError(f"placement {placement} without a share")
        mode = mode.model_copy(update={"holds": _filled(row)})
        fast = round(share * load.expert_bytes)
    fetched = _number(row, "fetched_pct") / 100 if row["fetched_pct"] else None

    def holding(size: int) -> Setting:
        below = load.expert_bytes - size
        ram = 0 if placement == "ssd_slots" else min(below, _ram_room(row, load, of_process=True))
        return Setting("", mode, "", machine, size, held, ram, below - ram, fetched=fetched)

    if row["hit_pct"] and mode.holds != LAYERS:
        return Expressed(load, _hitting(load, holding, float(row["hit_pct"]) / 100))
    return Expressed(load, holding(fast))


def _hitting(load: Load, holding: Callable[[int], Setting], hit: float) -> Setting:
    """Return the setting with as much in fast memory as has the measured hits in a replay."""
    low, high = 0, load.expert_bytes
    for _ in range(10):
        middle = (low + high) // 2
        low, high = (middle, high) if replayed(load, holding(middle), 0).hit < hit else (low, middle)
    return holding(high)


def _ram_room(row: Row, load: Load, of_process: bool = False) -> int:
    """Return the bytes of RAM for experts: what the process may take, or all but the system's; all where unknown."""
    size = _number(row, "ram_limit_gib") or max(0, _number(row, "ram_gib") - SYSTEM / GIB)
    if not size:
        return load.expert_bytes
    return round(size * GIB) - (RUNTIME if of_process else load.fixed_bytes)


def _filled(row: Row) -> str:
    """Return what fast memory holds, by the words of the policy. Raises RefusedError for others."""
    words, made = set(re.findall("[a-z]+", row["policy"].lower())), _engine(row)
    if "lru" in words or "upload" in row["on_miss"] or (not words and row["placement"] != "expert_share"):
        return GLOBAL_LRU
    if words & {"random", "uniform", "front"}:
        return UNIFORM
    if words & {"frequency", "use"}:
        return STATIC
    if words - {"static"}:
        raise RefusedError(f"policy {row['policy']}: expected lru, static by frequency, uniform, random or front")
    return UNIFORM if made and made.uniform else STATIC


def _share(row: Row, geometry: Geometry) -> float | None:
    if row["gpu_expert_share"]:
        share = float(row["gpu_expert_share"])
        return share / 100 if share > 1 else share
    if row["slots_per_layer"]:
        return min(1.0, float(row["slots_per_layer"]) / geometry.experts)
    if row["cache_gib"]:
        return min(1.0, float(row["cache_gib"]) * GIB / geometry.total_bytes)
    return None


def _left(row: Row, machine: Machine, load: Load) -> float:
    """Return the share of the experts that fit where dense weights, KV cache and runtime leave room."""
    cards = _number(row, "n_gpu", 1)
    made = _engine(row)
    reserved = made.prompt_bytes * cards if made else 0
    kv_bytes = load.geometry.kv_held(_allocated(row)) - load.kv_bytes
    room = machine.memory_bytes * cards - load.fixed_bytes - kv_bytes - reserved
    return min(1.0, max(0, room) / load.expert_bytes)


def overfull(sample: Sample) -> bool:
    """Return whether the experts that a run keeps in VRAM are larger than that of its cards."""
    if sample.run is None or not sample.run.machine.has_main_memory:
        return False
    return sample.run.setting.fast_bytes > sample.run.machine.memory_bytes * max(1, _number(sample.row, "n_gpu", 1))


def _mode(row: Row, strict: bool) -> Mode:
    """Return what a row says of misses, at the costs of its engine. Raises RefusedError."""
    placement, made, alone = row["placement"], _engine(row), _without_gpu(row)
    if placement == "ssd_slots":
        return engine("crow").modes[0]
    if strict and made is None:
        raise RefusedError("an engine whose cost per layer is not known")
    miss = _miss(row, made)
    if row["fetched_pct"] and not float(row["fetched_pct"]):
        raise RefusedError("experts on the CPU and none read by the GPU")
    kind = "cpu" if alone else "gpu"
    modes = [each for each in (made.modes if made else ()) if kind in each.machines]
    modes = modes or [each for each in engine("llama.cpp").modes if kind in each.machines and (alone or made)]
    mode = next((each for each in modes if each.miss == miss), (modes or [UNKNOWN])[0])
    if alone:
        miss = mode.miss
    change: dict[str, object] = {"miss": miss}
    if "lru" in row["policy"].lower() or "direct" in row["load"]:
        change["below"] = "direct"
    if placement in ("slots", "expert_share") and miss == "cpu" and not alone:
        change |= {"holds": "static", "overlap": True}
    return mode.model_copy(update=change)


def _miss(row: Row, made: Engine | None) -> Literal["cpu", "fetch", "split"]:
    """Return who serves a miss. Raises RefusedError for a word that is not known."""
    word = (re.findall("[a-z]+", row["on_miss"].lower()) or [""])[0]
    if word == "hybrid":
        return "split"
    if word in ("cpu", "fetch"):
        return word
    if word:
        raise RefusedError(f"on_miss {row['on_miss']}: expected cpu, fetch or hybrid")
    if row["placement"] in ("cpu_layers", "all_cpu"):
        return "cpu"
    if made is None:
        raise RefusedError("what happens to a miss is not published (on_miss)")
    return made.modes[0].miss


def _geometry(row: Row, strict: bool) -> Geometry:
    sizes = [row[name] for name in ("moe_layers", "experts", "top_k", "expert_mib", "model_gib")]
    known = by_spelling().get(row["model"].lower())
    if known and row["quant"] and not all(sizes):
        return _known(row, known.name)
    if not all(sizes if strict else sizes[:4]):
        if strict or not (row["hit_pct"] and all(sizes[:3])):
            raise RefusedError("shape or bytes of the model not published")
        sizes[3] = "1"  # any size: a factor is fitted
    layers, experts, k, expert, model = (float(each or 0) for each in sizes)
    size = round(expert * MIB)
    dense = round(model * GIB) - int(layers * experts) * size
    if strict and row["dense_gib"] and not float(row["dense_gib"]):
        raise RefusedError("bytes of dense weights that a token reads not published")
    if row["dense_gib"]:
        dense = round(float(row["dense_gib"]) * GIB)
    elif not strict and not model:
        dense = 0  # a part of the fitted step
    elif dense <= 0:
        raise RefusedError("experts larger than the file")
    bits = _number(row, "bits", 4.5)
    return Geometry(
        layers=int(layers),
        experts=int(experts),
        k=int(k),
        expert_bytes=(size,) * int(layers),
        expert_bits=bits,
        dense_bytes=dense,
    )


def _known(row: Row, name: str) -> Geometry:
    """Return the geometry of a known model in the row's quantisation. Raises RefusedError."""
    quant = re.split(r"[ ,]|_R4\b", row["quant"])[0]
    try:
        found = model_of(name, "" if quant == "BF16" else quant).geometry
    except TraceError:
        raise RefusedError(f"quantisation {quant} of a known model") from None
    return found.model_copy(update={"k": int(_number(row, "top_k", found.k))})


def _machine(row: Row, strict: bool) -> Machine:
    if not row["gpu"] or (strict and _number(row, "n_gpu", 1) > 1):
        raise RefusedError("several GPUs, or none named")
    rate = _number(row, "ram_bw_gbs")
    if strict and not rate and row["on_miss"] != "fetch":
        raise RefusedError("rate of RAM not published")
    said = f"{rate * (1 if row['ram_bw_kind'].startswith('measured') else NOMINAL):.3f}GB/s" if rate else ""
    disk = f"{_number(row, 'ssd_gbs')}GB/s" if row["ssd_gbs"] else ""
    gpu, vram, pcie = card_of(row), "", _link(row["pcie"])
    if row["vram_gib"] and not _without_gpu(row):
        vram = f"{row['vram_gib']}GiB"
    counted = re.search(r"(?:(\d)x )?.*? (\d+)c\b", row["cpu"])
    cores = str(int(counted[1] or 1) * int(counted[2])) if counted else ""
    ram = f"{_number(row, 'ram_gib', 128)}GiB"
    return assembled(gpu=gpu, vram=vram, ram=ram, ram_rate=said, disk=disk, link=pcie, cores=cores)


def card_of(row: Row) -> str:
    """Return the name of the row's card without sizes, limits and remarks. Raises ConfigError or RefusedError."""
    if _without_gpu(row):
        return "RTX 3090"  # taken away again: what is left is the machine around it
    size = float(row["vram_gib"] or (re.search(r"\b(\d+) ?GB?\b", row["gpu"]) or ("", 0))[1])
    name = re.sub(r"\b\d+ ?GB?\b|\b\d+ ?W\b|[,(].*", "", row["gpu"]).strip()
    found = recognised(name, int(size * GIB))
    named = found.card if found and found.is_exact else card(name)
    if named.is_unified:
        raise RefusedError("memory shared with the GPU")
    return named.name


def _link(said: str) -> str:
    """Return a link's rate, if there is one, or its generation and width."""
    if rate := re.search(r"([\d.]+) ?GB/s", said):
        return f"{rate[1]}GB/s"
    return said if re.fullmatch(r"[345]\.0 x\d+", said) else ""


def _number(row: Row, name: str, default: float = 0) -> float:
    try:
        return float(row[name])
    except ValueError:
        return default
