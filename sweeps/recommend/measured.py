"""A measured run as a setting of an engine, and its time in closed form: what one or two runs of a series fit.

A *series* is one person's runs on one machine with one thing changed (a row of a table per run). Of a decoded token the
form is that of `recommend`; `factor` makes misses so many times as dear, which is the unknown rate of the CPU, link or
disk, and `step` adds a fixed time, which is what else a token costs. Of a prompt each batch streams the experts of the
layers that lie in main memory, at `factor` times the link's price, and a token of it takes `step`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import NOMINAL, Machine, assembled, without_gpu
from moereplay.sweeps.recommend.engines import Mode, engine
from moereplay.sweeps.recommend.hits import Hits, of_model
from moereplay.sweeps.recommend.token_time import Load, Parts, prices, token
from moereplay.traces.checkpoints.found import model_of
from moereplay.traces.routing import shipped
from moereplay.traces.schema import Geometry, TraceError

MIB, GIB = 1 << 20, 1 << 30
RUNTIME = 500_000_000  #: bytes, as `recommend` assumes
POSITIONS = 4096  #: in the KV cache, where neither prompt nor context are published; a context is allocated, not read
BATCH = 2048  #: tokens of a batch of a prompt, where it is not published
#: ktransformers, by its tutorials (doc/en/kt-kernel: Qwen3-Coder-Next, Native-Precision, MiniMax-M2.1, experts-sched):
#: `--chunked-prefill-size 16384`; 3.6 GB of each card are for prompts; experts are placed uniformly by default.
KT_BATCH, KT_PROMPTS = 16384, 3_600_000_000
#: Known models by their names in the table.
NAMED = {
    "Qwen3-Next-80B-A3B": "qwen3-next-80b-a3b",
    "Qwen3-Coder-Next-80B-A3B": "qwen3-next-80b-a3b",
    "DeepSeek-R1/V3": "deepseek-v3",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "gpt-oss-120b": "gpt-oss-120b",
    "Gemma-4-26B-A4B": "gemma-4-26b-a4b",
    "Qwen3.6-35B-A3B": "qwen3.6-35b-a3b",
    "Qwen3.5-35B-A3B": "qwen3.5-35b-a3b",
    "Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "Qwen3.5-122B-A10B": "qwen3.5-122b-a10b",
    "DeepSeek-V4-Flash": "deepseek-v4-flash",
    "MiniMax-M2.1": "minimax-m2.1",
}
Row = Mapping[str, str]
Routings = dict[tuple[int, int, int], list[Hits]]


#: What no closed form has, by how a row begins to name what was varied, or how weights are loaded.
REFUSED = {
    "threads": "a change of threads",
    "what is in VRAM": "a change of where dense weights lie",
    "lookup table": "a change of where dense weights lie",
    "concurrency": "drafts or several requests",
    "madvise": "advice to the kernel about pages",
    "user cache": "advice to the kernel about pages",
}


class RefusedError(Exception):
    """A run that the closed form cannot express."""


class Expressed(NamedTuple):
    """A run as a setting: mode of an engine, machine, model, and what fast memory holds."""

    engine: str
    mode: Mode
    machine: Machine
    geometry: Geometry
    hit: float
    missing: float
    in_memory: float


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


def samples(rows: Iterable[Row], routings: Routings, strict: bool) -> tuple[list[Sample], list[tuple[Row, str]]]:
    """Return the runs that can be expressed, and the others with the reason; `strict` if all of the time is known."""
    found, refused = [], []
    for row in rows:
        try:
            found.append(prompt(row) if _of_a_prompt(row) and not strict else decoded(row, routings, strict))
        except (RefusedError, ConfigError) as why:
            refused.append((row, str(why)))
    return found, refused


def _of_a_prompt(row: Row) -> bool:
    if row["question"]:
        return row["question"] == "prefill"
    return not row["decode_tok_s"] and bool(row["prefill_tok_s"])


def decoded(row: Row, routings: Routings, strict: bool) -> Sample:
    """Return the time of a decoded token. Raises RefusedError or ConfigError."""
    run = expressed(row, routings, strict)
    measured = 1e9 / _number(row, "decode_tok_s")
    return Sample(row, lambda factor, step: spent(run, positions(row), factor, step).total, measured, run=run)


def prompt(row: Row) -> Sample:
    """Return the time of a prompt of which each batch streams the experts that it uses. Raises RefusedError."""
    tokens, rate = _number(row, "prompt_tokens"), _number(row, "prefill_tok_s")
    if not tokens or not rate:
        raise RefusedError("no prefill rate, or no length of the prompt")
    if "working set" in row["notes"]:
        raise RefusedError("a change of the mapping's working set in a prompt")
    if "cpu +" in row["notes"] or (row["series"] == "kt-codernext" and tokens < 2048):
        raise RefusedError("a prompt that the CPU computes")
    if row["placement"] == "cpu_layers" and not row["cpu_moe_layers"]:
        raise RefusedError("placement cpu_layers without their number")
    batch = _number(row, "ubatch", KT_BATCH if _is_kt(row) else BATCH)
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


def spent(run: Expressed, context: int, factor: float = 1, step: float = 0) -> Parts:
    """Return the parts of a token, with misses `factor` times as dear and `step` ns more."""
    price = prices(run.machine, run.geometry, context)
    slower = ("cpu", "cpu_apart", "link", "disk")
    dearer = {name: of and of * factor for name in slower for of in [getattr(price, name)]}
    price = replace(price, **dearer, dense=price.dense + step)
    return token(price, run.mode, run.hit, run.missing, run.in_memory)


def positions(row: Row) -> int:
    """Return the positions in the KV cache that a token reads: the prompt's, or some where it is not published."""
    return int(_number(row, "prompt_tokens") or min(_allocated(row), POSITIONS))


def _allocated(row: Row) -> int:
    return int(_number(row, "ctx", POSITIONS))


def _is_kt(row: Row) -> bool:
    return row["engine"].lower().startswith(("kt-kernel", "ktransformers"))


# -- a run as a setting


def expressed(row: Row, routings: Routings, strict: bool) -> Expressed:
    """Return a run as a setting; `strict` if all of its time is to be known. Raises RefusedError, or ConfigError."""
    if row["clean"] == "C":
        raise RefusedError("incomplete, or several things changed")
    if strict and row["model"] == "Qwen3.8-Flash-Next":
        raise RefusedError("a file with embedding tables per layer, of which a token reads a few rows")
    if "dense trunk on CPU" in row["notes"]:
        raise RefusedError(REFUSED["lookup table"])
    for varied, what in REFUSED.items():
        if row["varied"].startswith(varied) or row["load"].startswith(varied):
            raise RefusedError(what)
    if row["draft"] not in ("", "none") or row["concurrency"] not in ("", "1"):
        raise RefusedError("drafts or several requests")
    if not _number(row, "decode_tok_s"):
        raise RefusedError("no decode rate")
    geometry, machine = _geometry(row, strict), _machine(row, strict)
    if not geometry.dense_bytes and row["gpu"].startswith("none") and not geometry.dense_params:
        raise RefusedError("no GPU, and dense weights of unknown size")
    shape = geometry.layers, geometry.experts, geometry.k
    if shape not in routings:
        models = [each for name, each in shipped().items() if name != "miniature"]
        routings[shape] = [of_model(each.scaled(*shape)) for each in models]
    hits = routings[shape]
    name, mode = _mode(row, machine)
    if row["gpu"].startswith("none"):
        machine = without_gpu(machine) if machine.has_main_memory else machine
    layers = _number(row, "cpu_moe_layers", geometry.layers if "cpu" in row["placement"] else 0)
    share = _share(row, geometry)
    if row["hit_pct"] and row["gpu"].startswith("none"):
        hit = float(row["hit_pct"]) / 100
        return Expressed(name, mode, machine, geometry, hit, 1 - hit**geometry.k, 0.0)
    if share is None and (row["placement"] == "expert_share" or name in ("freetoken", "colibri")):
        share = _left(row, machine, geometry)
    if row["placement"] in ("all_cpu", "all experts on cpu"):
        hit = _cached(row, geometry, hits) if row["gpu"].startswith("none") else 0.0
        missing = 1 - hit**geometry.k
    elif split := re.match(r"(\d+) of 10 rows by the GPU", row["on_miss"]):
        if split[1] == "0":
            raise RefusedError("experts on the CPU and none read by the GPU")
        hit, missing = 1 - layers / geometry.layers * int(split[1]) / 10, layers / geometry.layers
    elif row["placement"] == "cpu_layers":
        hit, missing = 1 - layers / geometry.layers, layers / geometry.layers
    elif share is not None:
        held = _held(row, share, hits)
        hit, missing = held, 1 - held**geometry.k
    else:
        raise RefusedError(f"placement {row['placement']} without a share")
    over_disk = row["placement"] == "ssd_slots" or row["gpu"].startswith("none")  # what fast memory lacks, the disk has
    in_memory = 0.0 if over_disk else _in_memory(row, geometry, hit, hits)
    return Expressed(name, mode, machine, geometry, hit, missing, in_memory)


def _held(row: Row, share: float, hits: list[Hits]) -> float:
    policy = row["policy"]
    if row["hit_pct"]:
        return float(row["hit_pct"]) / 100
    by_use = "frequency" in policy or not (_is_kt(row) and policy == "static")
    filled = "static" if by_use and not re.search("random|uniform|front", policy) else "layers"
    if "lru" in policy or "upload" in row["on_miss"] or "admit" in policy:
        filled = "lru in one pool"
    return median(each.at(filled, share) for each in hits)


def _share(row: Row, geometry: Geometry) -> float | None:
    if row["gpu_expert_share"]:
        share = float(row["gpu_expert_share"])
        return share / 100 if share > 1 else share
    if row["slots_per_layer"]:
        return min(1.0, float(row["slots_per_layer"]) / geometry.experts)
    if row["cache_gib"]:
        return min(1.0, float(row["cache_gib"]) * GIB / (geometry.experts * sum(geometry.expert_bytes)))
    return None


def _left(row: Row, machine: Machine, geometry: Geometry) -> float:
    """Return the share of the experts that fit where dense weights, KV cache and runtime leave room."""
    cards = _number(row, "n_gpu", 1)
    reserved = KT_PROMPTS * cards if _is_kt(row) else 0
    room = machine.memory_bytes * cards - Load(geometry, _allocated(row), RUNTIME, ()).fixed_bytes - reserved
    return min(1.0, max(0, room) / (geometry.experts * sum(geometry.expert_bytes)))


def _cached(row: Row, geometry: Geometry, hits: list[Hits]) -> float:
    """Return the hits of what RAM holds beside dense weights, KV cache and runtime, without a GPU."""
    size = _number(row, "ram_limit_gib") or max(0, _number(row, "ram_gib") - 2)
    room = size * GIB - Load(geometry, _allocated(row), RUNTIME, ()).fixed_bytes
    share = room / (geometry.experts * sum(geometry.expert_bytes))
    return 1.0 if share >= 1 or not size else median(each.at("lru in one pool", max(0.0, share)) for each in hits)


def _in_memory(row: Row, geometry: Geometry, hit: float, hits: list[Hits]) -> float:
    """Return the share of experts outside of VRAM that RAM holds beside the runtime."""
    everything = geometry.experts * sum(geometry.expert_bytes)
    size = _number(row, "ram_limit_gib") or max(0, _number(row, "ram_gib") - 2)
    if not size or (row["placement"] == "cpu_layers" and not row["ram_limit_gib"] and size * GIB > everything):
        return 1.0
    layers = _number(row, "cpu_moe_layers", geometry.layers)
    below = everything * (layers / geometry.layers if row["placement"] == "cpu_layers" else 1)
    share = max(0.0, min(1.0, (size * GIB - RUNTIME) / below))
    return 1.0 if share >= 1 else median(each.at("lru in one pool", share) for each in hits)


def _mode(row: Row, machine: Machine) -> tuple[str, Mode]:
    """Return the engine and the mode that come closest to a run's. Raises RefusedError."""
    name, placement, miss = row["engine"].split()[0].lower(), row["placement"], row["on_miss"]
    known = {
        "kt-kernel": "ktransformers",
        "ktransformers": "ktransformers",
        "freetoken": "freetoken",
        "vllm": "vllm-expert-cache",
    }
    known |= {"llama.cpp": "llama.cpp", "ik_llama.cpp": "ik_llama.cpp", "colibri": "colibri", "plugin": "llama.cpp"}
    if placement == "ssd_slots":
        return "crow", engine("crow").modes[0]
    if "rows by the GPU" in miss:
        return name, engine("freetoken").modes[0]
    if name not in known or "ssd" in placement or "tier" in placement or "+" in placement:
        raise RefusedError(f"{name}, {placement or 'no placement'}{', ' + miss if miss else ''}")
    modes = {mode.name: mode for mode in engine(known[name]).modes}
    mode = next(iter(modes.values()))
    if name == "freetoken" and ("hybrid" in miss or "cpu" in miss):
        mode = modes["hybrid"]
    if row["gpu"].startswith("none"):
        mode = {each.name: each for each in engine("llama.cpp").modes}["CPU only"]
    if "lru" in row["policy"] or "direct" in row["load"]:
        mode = mode.model_copy(update={"below": "direct"})
    if name in ("llama.cpp", "colibri") and placement in ("slots", "expert_share") and "cpu" in miss:
        mode = mode.model_copy(update={"holds": "static", "overlap": True})
    return known[name], mode


def _geometry(row: Row, strict: bool) -> Geometry:
    sizes = [row[name] for name in ("moe_layers", "experts", "top_k", "expert_mib", "model_gib")]
    if row["model"] in NAMED and row["quant"] and not all(sizes):
        return _known(row)
    if not all(sizes if strict else sizes[:4]):
        if strict or not (row["hit_pct"] and all(sizes[:3])):
            raise RefusedError("shape or bytes of the model not published")
        sizes[3] = "1"  # any size: a factor is fitted
    layers, experts, k, expert, model = (float(each or 0) for each in sizes)
    size = round(expert * MIB)
    dense = round(model * GIB) - int(layers * experts) * size
    if not strict and (not model or row["model"] == "Qwen3.8-Flash-Next"):
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


def _known(row: Row) -> Geometry:
    """Return the geometry of a known model in the row's quantisation. Raises RefusedError."""
    quant = re.split(r"[ ,]|_R4\b", row["quant"])[0]
    try:
        found = model_of(NAMED[row["model"]], "" if quant == "BF16" else quant).geometry
    except TraceError:
        raise RefusedError(f"quantisation {quant} of a known model") from None
    return found.model_copy(update={"k": int(_number(row, "top_k", found.k))})


def _machine(row: Row, strict: bool) -> Machine:
    gpu = re.sub(r"\b\d+G\b.*|\d+ ?W\b|,.*", "", row["gpu"].replace("Laptop 8G", "Laptop")).strip()
    gpu = {"RTX 2060": "RTX 2060 12GB", "RTX 4090D": "RTX 4090"}.get(gpu, gpu)
    gpu = gpu if strict else gpu.partition(" + ")[0]
    if not gpu or "+" in gpu or (strict and _number(row, "n_gpu", 1) > 1):
        raise RefusedError("several GPUs, or none named")
    rate = _number(row, "ram_bw_gbs")
    if each := re.match(r"(\d) socket\(s\).*\((\d+) GB/s each", row["ram_bw_kind"]):
        rate = float(each[1]) * float(each[2])
    if strict and not rate and row["on_miss"] != "fetch":
        raise RefusedError("rate of RAM not published")
    said = f"{rate * (1 if 'measured' in row['ram_bw_kind'] else NOMINAL):.3f}GB/s" if rate else ""
    disk = f"{_number(row, 'ssd_gbs')}GB/s" if row["ssd_gbs"] else ""
    pcie = _link(row["pcie"])
    if gpu.startswith("none") or gpu in ("Radeon 780M iGPU", "GB10", "M3 Max"):
        gpu = "RTX 3090" if gpu.startswith("none") else "none"
        if gpu == "none":
            raise RefusedError("memory shared with the GPU")
    counted = re.search(r"(?:(\d)x )?.*? (\d+)c\b", row["cpu"])
    cores = str(int(counted[1] or 1) * int(counted[2])) if counted else ""
    ram = f"{_number(row, 'ram_gib', 128)}GiB"
    return assembled(gpu=gpu, vram="", ram=ram, ram_rate=said, disk=disk, link=pcie, cores=cores)


def _link(said: str) -> str:
    """Return a link's generation and width, or the rate that was measured of it: of cold slices, if it says so."""
    if re.fullmatch(r"[345]\.0 x\d+", said):
        return said
    rates = (re.search(rf"([\d.]+) ?{of}", said) for of in ("cold", "gather", "GB/s"))
    return next((f"{rate[1]}GB/s" for rate in rates if rate), "")


def _number(row: Row, name: str, default: float = 0) -> float:
    try:
        return float(row[name])
    except ValueError:
        return default
