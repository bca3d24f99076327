"""Compare the closed form of `recommend` with measured runs of machines that use VRAM, RAM and SSD at once.

    python benchmarks/hybrid_cells.py FOLDER      # that holds cells.csv, a row per run

Each run of one request without drafts is expressed as a setting of an engine on a machine made of the card's name and
the published rates; nothing is fitted. Prints measured over predicted time by engine and placement, then within each
series the ratio of every change to its middle run. Runs that cannot be expressed are counted by reason.

Then two runs of each series, the slowest and the fastest by prediction, fit a factor on the rate of misses and a fixed
step (dense weights of unknown size, launches, several GPUs), and the other runs of the series are predicted. Here files
whose dense weights are unknown and machines of several cards take part.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import Machine, assembled
from moereplay.sweeps.recommend.engines import Mode, engine
from moereplay.sweeps.recommend.hits import Hits, of_model
from moereplay.sweeps.recommend.quick import Load, without_gpu
from moereplay.sweeps.recommend.token_time import Parts, prices, token
from moereplay.traces.checkpoints.found import model_of
from moereplay.traces.routing import shipped
from moereplay.traces.schema import Geometry, TraceError

MIB, GIB = 1 << 20, 1 << 30
RUNTIME = 500_000_000  #: bytes, as `recommend` assumes
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
    "Qwen3.6-35B-A3B": "qwen3.6-35b-a3b",
    "Qwen3.5-35B-A3B": "qwen3.5-35b-a3b",
    "Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "Qwen3.5-122B-A10B": "qwen3.5-122b-a10b",
    "DeepSeek-V4-Flash": "deepseek-v4-flash",
    "MiniMax-M2.1": "minimax-m2.1",
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


#: A row, how it is expressed, tokens/s predicted and measured, and the parts of the prediction.
Found = tuple[Row, Expressed, float, float, Parts]


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", action="store_true", help="print every run")
    asked = parser.parse_args()
    with (asked.folder / "cells.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    routings: dict[tuple[int, int, int], list[Hits]] = {}
    found, refused = every(rows, routings, strict=True)
    more, still = every(rows, routings, strict=False)
    if asked.rows:
        for row, _, predicted, measured, parts in found:
            ms = ", ".join(f"{name} {value / 1e6:.1f}" for name, value in parts._asdict().items() if value)
            print(f"{row['id']:22} {predicted:8.1f} {measured:8.1f} {predicted / measured:5.2f}  {ms}")
    for line in ("Nothing fitted", *levels(found), "", *changes(found), "", *why_not(refused)):
        print(line)
    print("\nA factor and a fixed step from two runs of each series")
    for line in (*fitted(more, print_rows=asked.rows), "", *why_not(still)):
        print(line)


def every(
    rows: list[dict[str, str]], routings: dict[tuple[int, int, int], list[Hits]], strict: bool
) -> tuple[list[Found], Counter[str]]:
    """Return the runs that can be expressed with their predictions, and why the others cannot."""
    refused: Counter[str] = Counter()
    found = []
    for row in rows:
        try:
            run = expressed(row, routings, strict)
        except (RefusedError, ConfigError) as why:
            refused[str(why)[:90]] += 1
            continue
        parts = spent(run, _context(row))
        found.append((row, run, 1e9 / parts.total, _number(row, "decode_tok_s"), parts))
    return found, refused


def why_not(refused: Counter[str]) -> Iterator[str]:
    """Yield how many runs were refused for each reason."""
    yield from (f"{count:4} not expressed: {why}" for why, count in refused.most_common())


def fitted(found: list[Found], print_rows: bool) -> Iterator[str]:
    """Yield, by series and by question, how the runs are predicted that took no part in fitting."""
    series: dict[tuple[str, ...], list[Found]] = defaultdict(list)
    for each in found:
        series[tuple(each[0][name] for name in ("series", "prompt_tokens", "question"))].append(each)
    questions = defaultdict(list)
    for (name, prompt, question), runs in series.items():
        order = sorted(runs, key=lambda run: -run[4].total)
        if len(order) < 3 or order[0][4].total < 1.1 * order[-1][4].total:
            continue
        factor, step = fit(order[0], order[-1])
        errors = []
        for row, run, _, measured, _ in order[1:-1]:
            told = 1e9 / spent(run, _context(row), factor, step).total
            errors.append(told / measured)
            questions[question].append((measured / order[0][3], told / order[0][3]))
            if print_rows:
                print(f"{row['id']:22} {told:8.1f} {measured:8.1f} {told / measured:5.2f}")
        worst = max(abs(each - 1) for each in errors)
        yield (
            f"{name} {prompt and 'prompt ' + prompt:12} {len(errors):3} runs: median error "
            f"{median(abs(each - 1) for each in errors):.1%}, largest {worst:.1%}; misses cost {factor:.2f} times, "
            f"step {step / 1e6:+.1f} ms"
        )
    yield ""
    yield from (_sentence(question, pairs) for question, pairs in sorted(questions.items()))


def fit(slow: Found, fast: Found) -> tuple[float, float]:
    """Return the factor on the price of misses, and the step in ns, with which both runs are as measured."""
    wanted = 1e9 / slow[3] - 1e9 / fast[3]

    def apart(factor: float) -> float:
        first, second = (spent(each[1], _context(each[0]), factor).total for each in (slow, fast))
        return first - second

    low, high = 1e-3, 1e3
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if apart(middle) < wanted else (low, middle)
    return low, 1e9 / fast[3] - spent(fast[1], _context(fast[0]), low).total


def _context(row: Row) -> int:
    return int(_number(row, "ctx", 4096))


def levels(found: list[Found]) -> Iterator[str]:
    """Yield measured over predicted time per token by engine and placement."""
    groups = defaultdict(list)
    for row, run, predicted, measured, _ in found:
        groups[run.engine, row["placement"]].append(predicted / measured)
    groups["all", ""] = [each for ratios in list(groups.values()) for each in ratios]
    for (name, placement), ratios in sorted(groups.items()):
        near = sum(abs(ratio - 1) <= 0.25 for ratio in ratios)
        times = f"measured {min(ratios):.2f} to {max(ratios):.2f} times the predicted time, median {median(ratios):.2f}"
        yield f"{name:20} {placement:20} {len(ratios):4} runs, {times}; within 25%: {near}"


def changes(found: list[Found]) -> Iterator[str]:
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
        yield _sentence(question, pairs)


def _sentence(question: str, pairs: list[tuple[float, float]]) -> str:
    """Say how well changes, measured and predicted, agree in sign and in size."""
    moved = [(truth, told) for truth, told in pairs if abs(truth - 1) > 0.03]
    signs = sum((truth > 1) == (told > 1) and abs(told - 1) > 0.003 for truth, told in moved)
    errors = [abs(told / truth - 1) for truth, told in pairs]
    told = f"sign {signs} of {len(moved)}, median error of the ratio {median(errors):.1%}"
    return f"{question:12} {len(pairs):4} changes: {told}"


def spent(run: Expressed, context: int, factor: float = 1, step: float = 0) -> Parts:
    """Return the parts of a token, with misses `factor` times as dear and `step` ns more."""
    price = prices(run.machine, run.geometry, context)
    dearer = {name: of and of * factor for name in ("cpu", "link", "disk") for of in [getattr(price, name)]}
    price = replace(price, **dearer, dense=price.dense + step)
    return token(price, run.mode, run.hit, run.missing, run.in_memory)


# -- a run as a setting


def expressed(row: Row, routings: dict[tuple[int, int, int], list[Hits]], strict: bool) -> Expressed:
    """Return a run as a setting; `strict` if all of its time is to be known. Raises RefusedError, or ConfigError."""
    if row["clean"] == "C":
        raise RefusedError("incomplete, or several things changed")
    if strict and row["model"] == "Qwen3.8-Flash-Next":
        raise RefusedError("a file with embedding tables per layer, of which a token reads a few rows")
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
    if share is None and row["placement"] == "slots" and name == "freetoken":
        share = _left(machine, geometry, _context(row))
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


def _left(machine: Machine, geometry: Geometry, context: int) -> float:
    """Return the share of the experts that fit where dense weights, KV cache and runtime leave room."""
    room = machine.memory_bytes - Load(geometry, context, RUNTIME, ()).fixed_bytes
    return min(1.0, max(0, room) / (geometry.experts * sum(geometry.expert_bytes)))


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


def _geometry(row: Row, strict: bool) -> Geometry:
    sizes = [row[name] for name in ("moe_layers", "experts", "top_k", "expert_mib", "model_gib")]
    if row["model"] in NAMED and row["quant"] and not all(sizes):
        return _known(row)
    if not all(sizes if strict else sizes[:4]):
        raise RefusedError("shape or bytes of the model not published")
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
        return model_of(NAMED[row["model"]], "" if quant == "BF16" else quant).geometry
    except TraceError:
        raise RefusedError(f"quantisation {quant} of a known model") from None


def _machine(row: Row, strict: bool) -> Machine:
    gpu = re.sub(r"\b\d+G\b.*|\d+ ?W\b|,.*", "", row["gpu"].replace("Laptop 8G", "Laptop")).strip()
    gpu = {"RTX 2060": "RTX 2060 12GB", "RTX 4090D": "RTX 4090"}.get(gpu, gpu)
    if not gpu or "+" in row["gpu"] or (strict and _number(row, "n_gpu", 1) > 1):
        raise RefusedError("several GPUs, or none named")
    rate = _number(row, "ram_bw_gbs")
    if each := re.match(r"(\d) socket\(s\).*\((\d+) GB/s each", row["ram_bw_kind"]):
        rate = float(each[1]) * float(each[2])
    if strict and not rate and row["on_miss"] != "fetch":
        raise RefusedError("rate of RAM not published")
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
