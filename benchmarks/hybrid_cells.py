"""Compare the closed form of `recommend` with measured runs of machines that use VRAM, RAM and SSD at once.

    python benchmarks/hybrid_cells.py FOLDER      # that holds cells.csv, a row per run

Each run of one request without drafts is expressed as a setting of an engine on a machine made of the card's name and
the published rates; nothing is fitted. Prints predicted over measured tokens/s by engine and placement, then within
each series the ratio of every change to its middle run. Runs that cannot be expressed are counted by reason.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import Machine, assembled
from moereplay.sweeps.recommend.engines import Mode, engine
from moereplay.sweeps.recommend.hits import Hits, of_model
from moereplay.sweeps.recommend.quick import without_gpu
from moereplay.sweeps.recommend.token_time import Parts, prices, token
from moereplay.traces.geometry import known
from moereplay.traces.routing import shipped
from moereplay.traces.schema import Geometry

MIB, GIB = 1 << 20, 1 << 30
NOMINAL = 0.7  #: of a nominal rate of RAM that CPU kernels reach
#: Known models by their names in the table.
NAMED = {
    "Qwen3-Next-80B-A3B": "qwen3-next-80b-a3b",
    "Qwen3-Coder-Next-80B-A3B": "qwen3-next-80b-a3b",
    "DeepSeek-R1/V3": "deepseek-v3",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "gpt-oss-120b": "gpt-oss-120b",
    "Gemma-4-26B-A4B": "gemma-4-26b-a4b",
}
Row = Mapping[str, str]


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


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", action="store_true", help="print every run")
    asked = parser.parse_args()
    with (asked.folder / "cells.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    routings: dict[tuple[int, int, int], list[Hits]] = {}
    refused: Counter[str] = Counter()
    found = []
    for row in rows:
        try:
            run = expressed(row, routings)
        except (RefusedError, ConfigError) as why:
            refused[str(why)[:90]] += 1
            continue
        parts = spent(run, int(_number(row, "ctx", 4096)))
        found.append((row, run, 1e9 / parts.total, _number(row, "decode_tok_s"), parts))
        if asked.rows:
            ms = ", ".join(f"{name} {value / 1e6:.1f}" for name, value in parts._asdict().items() if value)
            print(f"{row['id']:22} {found[-1][2]:8.1f} {found[-1][3]:8.1f} {found[-1][2] / found[-1][3]:5.2f}  {ms}")
    for line in (
        *levels(found),
        "",
        *changes(found),
        "",
        *(f"{count:4} not expressed: {why}" for why, count in refused.most_common()),
    ):
        print(line)


def levels(found: list[tuple[Row, Expressed, float, float, Parts]]) -> Iterator[str]:
    """Yield measured over predicted time per token by engine and placement."""
    groups = defaultdict(list)
    for row, run, predicted, measured, _ in found:
        groups[run.engine, row["placement"]].append(predicted / measured)
    groups["all", ""] = [each for ratios in list(groups.values()) for each in ratios]
    for (name, placement), ratios in sorted(groups.items()):
        near = sum(abs(ratio - 1) <= 0.25 for ratio in ratios)
        times = f"measured {min(ratios):.2f} to {max(ratios):.2f} times the predicted time, median {median(ratios):.2f}"
        yield f"{name:20} {placement:20} {len(ratios):4} runs, {times}; within 25%: {near}"


def changes(found: list[tuple[Row, Expressed, float, float, Parts]]) -> Iterator[str]:
    """Yield, by question, how well changes within a series are predicted."""
    series = defaultdict(list)
    for row, _, predicted, measured, _ in found:
        series[row["question"], row["series"]].append((predicted, measured))
    questions = defaultdict(list)
    for (question, _), points in series.items():
        first = sorted(points, key=lambda point: point[1])[len(points) // 2]
        for point in (each for each in points if each is not first):
            truth, told = point[1] / first[1], point[0] / first[0]
            questions[question].append((truth, told))
    for question, pairs in sorted(questions.items()):
        moved = [(truth, told) for truth, told in pairs if abs(truth - 1) > 0.03]
        signs = sum((truth > 1) == (told > 1) and abs(told - 1) > 0.003 for truth, told in moved)
        errors = [abs(told / truth - 1) for truth, told in pairs]
        told = f"sign {signs} of {len(moved)}, median error of the ratio {median(errors):.1%}"
        yield f"{question:12} {len(pairs):4} changes: {told}"


def spent(run: Expressed, context: int) -> Parts:
    """Return the parts of a token."""
    return token(prices(run.machine, run.geometry, context), run.mode, run.hit, run.missing, run.in_memory)


# -- a run as a setting


def expressed(row: Row, routings: dict[tuple[int, int, int], list[Hits]]) -> Expressed:
    """Return a run as a setting. Raises RefusedError, or ConfigError for an unknown card."""
    if row["clean"] == "C":
        raise RefusedError("incomplete, or several things changed")
    if row["model"] == "Qwen3.8-Flash-Next":
        raise RefusedError("a file with embedding tables per layer, of which a token reads a few rows")
    if row["draft"] not in ("", "none") or row["concurrency"] not in ("", "1"):
        raise RefusedError("drafts or several requests")
    if not row["decode_tok_s"]:
        raise RefusedError("no decode rate")
    geometry, machine = _geometry(row), _machine(row)
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
    if row["placement"] in ("all_cpu", "all experts on cpu"):
        hit, missing = (1.0, 0.0) if row["gpu"].startswith("none") else (0.0, 1.0)
    elif row["placement"] == "cpu_layers":
        hit, missing = 1 - layers / geometry.layers, layers / geometry.layers
    elif share is not None:
        held = _held(row, share, hits)
        hit, missing = held, 1 - held**geometry.k
    else:
        raise RefusedError(f"placement {row['placement']} without a share")
    in_memory = _in_memory(row, geometry, hit, hits)
    return Expressed(name, mode, machine, geometry, hit, missing, in_memory)


def _held(row: Row, share: float, hits: list[Hits]) -> float:
    policy = row["policy"]
    if row["hit_pct"]:
        return float(row["hit_pct"]) / 100
    filled = "layers" if ("random" in policy or "uniform" in policy or "front" in policy) else "static"
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


def _in_memory(row: Row, geometry: Geometry, hit: float, hits: list[Hits]) -> float:
    """Return the share of experts outside of VRAM that RAM holds."""
    everything = geometry.experts * sum(geometry.expert_bytes)
    size = _number(row, "ram_limit_gib") or max(0, _number(row, "ram_gib") - 2)
    if not size or (row["placement"] == "cpu_layers" and not row["ram_limit_gib"] and size * GIB > everything):
        return 1.0
    layers = _number(row, "cpu_moe_layers", geometry.layers)
    below = everything * (layers / geometry.layers if row["placement"] == "cpu_layers" else 1)
    share = min(1.0, size * GIB / below)
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
    if name not in known or "ssd" in placement or "tier" in placement or "rows by the GPU" in miss or "+" in placement:
        raise RefusedError(f"{name}, {placement or 'no placement'}{', ' + miss if miss else ''}")
    modes = {mode.name: mode for mode in engine(known[name]).modes}
    mode = next(iter(modes.values()))
    if name == "freetoken" and ("hybrid" in miss or "cpu" in miss):
        mode = modes["hybrid"]
    if "lru" in row["policy"] or row["load"] == "direct":
        mode = mode.model_copy(update={"below": "direct"})
    if row["gpu"].startswith("none"):
        mode = {each.name: each for each in engine("llama.cpp").modes}["CPU only"]
    if name == "llama.cpp" and placement in ("slots", "expert_share") and "cpu" in miss:
        mode = mode.model_copy(update={"holds": "static", "overlap": True})
    return known[name], mode


def _geometry(row: Row) -> Geometry:
    sizes = [row[name] for name in ("moe_layers", "experts", "top_k", "expert_mib", "model_gib")]
    if row["model"] in NAMED and row["bits"] and not all(sizes):
        return _known(row)
    if not all(sizes):
        raise RefusedError("shape or bytes of the model not published")
    layers, experts, k, expert, model = map(float, sizes)
    size = round(expert * MIB)
    dense = round(model * GIB) - int(layers * experts) * size
    if dense <= 0:
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
    """Return the geometry of a known model, dense weights at the bits of the experts or at 8."""
    whole, bits = known(NAMED[row["model"]]).geometry, float(row["bits"])
    params = (whole.dense_params or 0) * whole.layers + (whole.head_params or 0)
    size = round(params * max(bits, 8) / 8)
    return whole.model_copy(update={"expert_bytes": whole.bytes_at(bits), "expert_bits": bits, "dense_bytes": size})


def _machine(row: Row) -> Machine:
    gpu = re.sub(r"\b\d+G\b.*|\d+ ?W\b|,.*", "", row["gpu"].replace("Laptop 8G", "Laptop")).strip()
    gpu = {"RTX 2060": "RTX 2060 12GB", "RTX 4090D": "RTX 4090"}.get(gpu, gpu)
    if not gpu or "+" in row["gpu"] or _number(row, "n_gpu", 1) > 1:
        raise RefusedError("several GPUs, or none named")
    rate = _number(row, "ram_bw_gbs")
    said = f"{rate * (1 if 'measured' in row['ram_bw_kind'] else NOMINAL):.3f}GB/s" if rate else ""
    disk = f"{_number(row, 'ssd_gbs')}GB/s" if row["ssd_gbs"] else ""
    pcie = row["pcie"] if re.fullmatch(r"[345]\.0 x\d+", row["pcie"]) else ""
    if gpu.startswith("none") or gpu in ("Radeon 780M iGPU", "GB10", "M3 Max"):
        gpu = "RTX 3090" if gpu.startswith("none") else "none"
        if gpu == "none":
            raise RefusedError("memory shared with the GPU")
    return assembled(gpu=gpu, vram="", ram=f"{_number(row, 'ram_gib', 128)}GiB", ram_rate=said, disk=disk, link=pcie)


def _number(row: Row, name: str, default: float = 0) -> float:
    try:
        return float(row[name])
    except ValueError:
        return default


if __name__ == "__main__":
    main()
