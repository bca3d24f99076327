"""Fit what machines reach of their rates, by class, on published decoding speeds, and leave each machine out once.

Last changed in commit 5af69504. How far are decoded tokens from what the prices of a machine say, at which figures?
Answer: `simulator/cards.toml`.

    python -m studies.machine_rates speeds/cells.csv hybrid/cells.csv

A token is the sum of the prices that a replay charges (`simulator/times.py`): dense parts, KV cache and launches of
every layer, experts on the card or on the CPU, and 65 us of synchronisation for each layer on the CPU (llama.cpp's).
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from math import log
from pathlib import Path
from statistics import median
from typing import NamedTuple

from moereplay.simulator.cards import card, several
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import Cores, Machine, assembled
from moereplay.simulator.rates import Loading, Roofline
from moereplay.simulator.times import times_of
from moereplay.traces.checkpoints.found import model_of
from moereplay.traces.schema import Geometry, TraceError

SYNC_NS = 65_000
METAL_NS = 105_000  #: 30 kernels of 3.5 us, not fitted
REACH, GRAPHS = [part / 100 for part in range(40, 91, 5)], list(range(5_000, 151_000, 5_000))
KERNELS = [part * 0.5e9 for part in range(4, 33)]
#: Series whose CPU is named: card, RAM, cores.
NAMED = {
    "llmfit-2080": ("RTX 2080", "102GB/s", "10xAVX512"),
    "ibra-layers": ("RTX 4060 Laptop", "40.5GB/s", "6xVNNI"),
    "ibra-threads": ("RTX 4060 Laptop", "40.5GB/s", "6xVNNI"),
    "i7-8700": ("none", "DDR4-2666", "6xAVX2"),
    "ik-r1": ("RTX A6000", "8xDDR5-4800", "24xAVX512"),
    "kt-r1-sockets": ("RTX 4090 D", "8xDDR5-4800", "32xAMX"),
}
ONLY = {"ik-r1": ("ik-r1-01",), "kt-r1-sockets": ("kt-r1-sockets-03", "kt-r1-sockets-04")}  #: not repacked; one socket
NAMES = {"DeepSeek-R1/V3": "deepseek-v3", "UD-Q2_K_XL": "Q2_K"}


class Run(NamedTuple):
    """A published run."""

    name: str
    owner: str  #: the machine that is left out together
    machine: Machine
    geometry: Geometry
    context: int
    on_cpu: int  #: layers
    ns: float  #: of a token, measured

    def told(self, machine: Machine | None = None) -> float:
        """Return the nanoseconds that a replay of resident layers charges."""
        of, geometry = machine or self.machine, self.geometry
        times, layers = times_of(of.replayable, geometry, (geometry.expert_bytes,)), range(geometry.layers)
        spent = times.pass_ns(1) + sum(times.dense_ns(layer, 1) + times.kv_ns(self.context) for layer in layers)
        for layer in layers:
            on_cpu = layer < self.on_cpu
            spent += geometry.k * (times.cpu_ns(layer, 0, 1) if on_cpu else times.expert_ns(layer, 0, 1))
        return spent + self.on_cpu * SYNC_NS

    def off(self, machine: Machine | None = None) -> float:
        """Return the predicted over the measured time, less one."""
        return self.told(machine) / self.ns - 1

    def at(self, reach: float, layer_ns: int) -> Machine:
        """Return the machine whose card reaches this share of its rate and launches a layer in `layer_ns`."""
        platform, rate = self.machine.platform, float(round(reach * card(several(self.owner)[1]).gb_per_s * 1e9))
        compute = platform.compute.model_copy(update={"memory_bytes_per_s": rate, "kv_bytes_per_s": rate})
        change = {"compute": compute, "loading": Loading(gate_ns=layer_ns)}
        return self.machine._replace(platform=platform.model_copy(update=change))

    def decoding(self, weights_per_s: float) -> Machine:
        """Return the machine whose cores decode so many weights."""
        cores, cpu = self.machine.cores, self.machine.platform.cpu or self.machine.platform.compute
        assert cores and isinstance(cpu, Roofline)
        rate = cpu.kv_bytes_per_s or cpu.memory_bytes_per_s
        return self.machine.with_cpu(rate, Cores(cores.many, cores.kind, cores.many * weights_per_s))


def geometry_of(name: str, quant: str) -> Geometry:
    """Return a model's geometry with its KV cache."""
    known = model_of(NAMES.get(name, name).lower(), NAMES.get(quant, quant))
    return known.geometry.model_copy(update={"kv_bytes": known.kv_bytes, "kv_windows": known.kv_windows})


def of_speeds(path: Path) -> Iterator[Run]:
    """Yield the runs of `speeds`."""
    for row in csv.DictReader(path.open(newline="")):
        geometry, layers = geometry_of(row["model"], row["quant"]), int(row["n_cpu_moe"])
        machine = assembled(gpu=row["gpu"], ram=row["ram"], ram_rate=row["ram_rate"], cores=row["cores"])
        ns = 1e9 / float(row["tokens_per_s"])
        yield Run(row["id"], row["gpu"], machine, geometry, int(row["context"]), min(layers, geometry.layers), ns)


def of_hybrid(path: Path) -> Iterator[Run]:
    """Yield the runs of `hybrid` whose CPU and model are known, without drafts."""
    for row in csv.DictReader(path.open(newline="")):
        series = row["series"]
        if series not in NAMED or row["id"] not in ONLY.get(series, (row["id"],)) or not row["engine"].strip("plugin"):
            continue
        gpu, rate, cores = NAMED[series]
        try:
            geometry = geometry_of(row["model"], row["quant"])
        except (TraceError, ConfigError):
            continue
        machine, ns = assembled(gpu=gpu, ram="512GB", ram_rate=rate, cores=cores), 1e9 / float(row["decode_tok_s"])
        layers = 0 if gpu == "none" else int(row["cpu_moe_layers"])
        yield Run(row["id"], row["cpu"], machine, geometry, int(row["prompt_tokens"] or 512), layers, ns)


def classes(run: Run) -> tuple[str, str]:
    """Return whose share of the rate and whose launches a run shows."""
    of = card(several(run.owner)[1])
    newer = of.family in ("ada", "hopper", "blackwell")
    reach = "unified" if of.is_unified else "ada_and_later" if newer else "others"
    return "two_dies" if of.family == "apple_ultra" else reach, "kernels" if "apple" in of.family else "graphs"


def kind_of(run: Run) -> str:
    """Return the kind of the CPU's cores."""
    return run.machine.cores.kind if run.machine.cores else ""


def fitted(runs: Sequence[Run]) -> tuple[dict[str, float], int]:
    """Return the shares by class and the launches of graphs with the least sum of |log| errors."""
    best: tuple[float, dict[str, float], int] | None = None
    for graphs in GRAPHS:
        shares, loss = {}, 0.0
        for name in {classes(run)[0] for run in runs}:
            of = [run for run in runs if classes(run)[0] == name]
            tried = {share: sum(abs(log(1 + off)) for off in offs(of, share, graphs)) for share in REACH}
            shares[name] = min(tried, key=tried.__getitem__)
            loss += tried[shares[name]]
        if best is None or loss < best[0]:
            best = loss, shares, graphs
    assert best
    return best[1], best[2]


def offs(runs: Sequence[Run], share: float, graphs: int) -> list[float]:
    """Return the errors of runs at a share and launches."""
    return [run.off(run.at(share, METAL_NS if classes(run)[1] == "kernels" else graphs)) for run in runs]


def show(title: str, errors: dict[str, float]) -> None:
    """Print errors of times, their median and how many are within 25 % of the measured speed."""
    speeds = [abs(1 / (1 + off) - 1) for off in errors.values()]
    within = sum(off <= 0.25 for off in speeds)
    print(f"{title}: median {median(speeds):.1%} of tokens/s, {within} of {len(speeds)} within 25 %")
    print("   ", ", ".join(f"{name} {1 / (1 + off) - 1:+.0%}" for name, off in errors.items()))


def main() -> None:
    """Print fits and errors."""
    speeds, hybrid = (Path(each) for each in sys.argv[1:3])
    every = list(of_speeds(speeds))
    whole = [run for run in every if not run.on_cpu]
    print("fitted", *fitted(whole))
    show("before", {run.name: run.off(run.at(1, METAL_NS)) for run in whole})
    show("as in cards.toml", {run.name: run.off() for run in whole})
    left = dict[str, float]()
    for owner in dict.fromkeys(run.owner for run in whole):
        shares, graphs = fitted([run for run in whole if run.owner != owner])
        of = [run for run in whole if run.owner == owner]
        near = shares["unified"] if card(owner).is_unified else sum(shares.values()) / len(shares)
        share = shares.get(classes(of[0])[0], near)
        left |= dict(zip([run.name for run in of], offs(of, share, graphs), strict=True))
    for kind in ("unified", "resident"):
        of = [run.name for run in whole if card(run.owner).is_unified == (kind == "unified")]
        show(f"{kind}, each machine left out", {name: left[name] for name in of})
    show("all of them", left)
    named = list(of_hybrid(hybrid))
    show("hybrid, as in cards.toml", {run.name: run.off() for run in named})
    show("hybrid, the CPU at its RAM's rate", {run.name: run.off(run.decoding(1e12)) for run in named})
    best = {run.name: min(KERNELS, key=lambda rate, run=run: abs(run.off(run.decoding(rate)))) for run in named}
    print("weights/s of a core that fit each:", ", ".join(f"{name} {rate / 1e9:g}e9" for name, rate in best.items()))
    out = dict[str, float]()
    for owner in dict.fromkeys(run.owner for run in named):
        of = [run for run in named if run.owner == owner]
        alike = [run for run in named if run.owner != owner]
        same = [run for run in alike if kind_of(run) == kind_of(of[0])] or alike
        others = {run.owner: [best[each.name] for each in same if each.owner == run.owner] for run in same}
        rate = median(median(rates) for rates in others.values())
        out |= {run.name: run.off(run.decoding(rate)) for run in of}
    show("hybrid, each machine left out", out)
    unknown = [run for run in every if run.on_cpu and run.machine.ends]
    for run in unknown:
        ends = [1e9 / run.told(end) for end in run.machine.range()]
        inside = ends[0] <= 1e9 / run.ns <= ends[1]
        print(
            f"{run.name}: {ends[0]:.1f} to {ends[1]:.1f}, measured {1e9 / run.ns:.1f}: {'in' if inside else 'out'}side"
        )
    show("hybrid, a CPU that nobody names", {run.name: run.off() for run in unknown})


if __name__ == "__main__":
    main()
