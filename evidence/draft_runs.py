"""A measured run as a platform and settings, to replay it with drafts or with several requests.

Where experts lie is read from the columns of the run; rates are the published ones, or those that `moereplay` assumes
of any machine; routing is drawn from a shipped routing model at the model's shape.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from moereplay.simulator.capacity import RUNTIME, of_layers
from moereplay.simulator.cards import card
from moereplay.simulator.config import configure
from moereplay.simulator.machine import CPU_LAUNCH_NS, LAUNCH_NS, assembled
from moereplay.simulator.platform import Measured, Platform, Roofline
from moereplay.simulator.platforms import as_toml
from moereplay.simulator.rates import Drafting
from moereplay.simulator.replay import replay
from moereplay.simulator.wires import Link, LowerTier
from moereplay.sweeps.recommend.measured import GIB, MIB, NOMINAL, Row, card_of
from moereplay.traces.checkpoints.found import model_of
from moereplay.traces.geometry import by_spelling
from moereplay.traces.recorder import from_arrays
from moereplay.traces.routing import draw, shipped
from moereplay.traces.schema import Geometry, Trace

TOKENS = 96  #: of each request
SEEDS = 8  #: draws of which drafts are right
#: Of a row beyond the first: whether llama.cpp's CPU computes an expert anew for it, and what it adds to the step.
COSTS = {"union": (False, 0.0), "rows apart": (True, 0.0), "and a tenth": (True, 0.1)}
SIZED_AS = {"glm-5.2": "glm-5", "qwen3-coder-next-80b-a3b": "qwen3-next-80b-a3b", "deepseek-r1/v3": "deepseek-v3"}
LIKE = {"Gemma-4-26B-A4B": "gemma-4-26b-a4b"}  #: models with a routing model of their own


class RefusedError(Exception):
    """A run that cannot be expressed."""


@cache
def _geometry(model: str, quant: str, sizes: tuple[str, ...], bits: str) -> Geometry:
    layers, experts, k, each, whole = (float(size or 0) for size in sizes)
    if model == "Qwen3.8-Flash-Next" and not each:
        each = 2.36 * float(bits) / 4.25  # of the rows that have both
    known, name = None, SIZED_AS.get(model.lower(), model.lower())
    if name in by_spelling() and not (each and whole):
        known = model_of(name, {"int4": "AWQ"}.get(quant, quant.split()[0])).geometry
    if not each and known is None:
        raise RefusedError("bytes of an expert not published")
    size = round(each * MIB) if each or known is None else known.expert_bytes[0]
    dense = round(whole * GIB) - int(layers * experts) * size if whole else known.dense_bytes if known else 0
    dense = 0 if model == "Qwen3.8-Flash-Next" else max(0, dense)  # tables per layer, of which a token reads few rows
    return Geometry(
        layers=int(layers), experts=int(experts), k=int(k), expert_bytes=(size,) * int(layers), dense_bytes=dense
    )


def geometry_of(row: Row) -> Geometry:
    """Return sizes as published, or those of the known model. Raises RefusedError."""
    names = ("moe_layers", "experts", "top_k", "expert_mib", "model_gib")
    return _geometry(row["model"], row["quant"], tuple(row[name] for name in names), row["bits"])


@cache
def _drawn(model: str, shape: tuple[int, int, int], requests: int) -> np.ndarray:
    like = LIKE.get(model, "qwen3-30b-a3b-general")
    return draw(shipped()[like].scaled(*shape), (TOKENS,) * (requests + 4))


class Routed(NamedTuple):
    """Requests, and the use of experts in others like them."""

    trace: Trace
    by_use: tuple[tuple[int, int], ...]  #: the most used of every layer, then the second most used, ...
    hits: np.ndarray  #: (E,) of these requests, if the 1, 2, ... most used experts of every layer are held


@cache
def _routed(model: str, shape: tuple[int, int, int], size: int, requests: int) -> Routed:
    """Return so many requests, and the use of experts in four others."""
    layers, experts, k = shape
    ids = _drawn(model, shape, requests)
    mine, others = ids[: requests * TOKENS], ids[requests * TOKENS :]
    own, used = (
        np.stack([np.bincount(of[:, at].ravel(), minlength=experts) for at in range(layers)]) for of in (mine, others)
    )
    ranks = np.argsort(-used, axis=1, kind="stable")
    by_use = tuple((layer, int(ranks[layer, at])) for at in range(experts) for layer in range(layers))
    geometry = Geometry(layers=layers, experts=experts, k=k, expert_bytes=(size,) * layers)
    hits = np.cumsum(np.take_along_axis(own, ranks, 1).sum(0)) / own.sum()
    return Routed(from_arrays(mine, geometry, lengths=[TOKENS] * requests), by_use, hits)


class Placed(NamedTuple):
    """Where experts lie, and the rates that a run waits for."""

    settings: dict[str, object]
    waited: frozenset[str]  #: of cpu, link, disk
    ram: int = 0  #: bytes of experts in RAM over a disk; 0: all


def placed(row: Row, geometry: Geometry, by_use: Sequence[tuple[int, int]], hits: np.ndarray) -> Placed:
    """Return the settings of a run's placement. Raises RefusedError."""
    layers, everything = geometry.layers, geometry.total_bytes
    placement, slots = row["placement"], int(row["slots_per_layer"] or 0)
    if placement in ("cpu_layers", "all resident"):
        if placement == "cpu_layers" and not row["cpu_moe_layers"]:
            raise RefusedError("how many layers the CPU computes is not published")
        away = int(row["cpu_moe_layers"] or 0)
        here = of_layers(f"layers:0-{layers - away - 1}") if away < layers else ()
        size = max(1, (layers - away) * geometry.experts)
        ram = int(float(row["ram_limit_gib"] or 1e6) * GIB) - RUNTIME
        over = ram < everything * away / layers
        settings = {"resident": here, "capacity": f"{size}experts", "miss": "cpu"}
        return Placed(settings, frozenset(["cpu"] * (away > 0) + ["disk"] * over), ram if over else 0)
    if placement in ("all_cpu", "ssd_slots") and not slots:
        room = float(row["ram_limit_gib"] or 0) * GIB - RUNTIME - geometry.dense_bytes
        slots = int(room / everything * geometry.experts)
    if slots <= 0:
        raise RefusedError(f"placement {placement}: what lies where is not published")
    held = by_use[: slots * layers]
    if row["on_miss"].startswith("cpu") and placement == "slots":
        if row["hit_pct"]:  # as many of the most used as have these hits
            held = held[: int(np.searchsorted(hits, float(row["hit_pct"]) / 100) + 1) * layers]
        return Placed({"resident": held, "capacity": f"{slots}/layer", "miss": "cpu"}, frozenset(["cpu"]))
    if placement == "slots" or placement in ("all_cpu", "ssd_slots"):
        cached = {"capacity": f"{slots}/layer", "scope": "per_layer", "warm": held, "miss": "fetch"}
        if row["policy"].startswith("static"):
            cached |= {"eviction": "static:profile=given", "profile": by_use}
        below = ("link",) if placement == "slots" else ("disk", "cpu") if placement == "all_cpu" else ("disk",)
        return Placed(cached, frozenset(below if slots < geometry.experts else below[1:]))
    raise RefusedError(f"placement {placement}: what lies where is not published")


class Fit(NamedTuple):
    """What runs fit: how much longer they wait than at their rates, and the step of a pass."""

    factor: float = 1.0
    step: float | None = None  #: nanoseconds; None: dense weights by their bytes, and launches
    drafter: int = 0  #: nanoseconds of a draft, of a drafter that is a model of its own

    @property
    def in_words(self) -> str:
        """The figures that were fitted."""
        words = [f"rates / {self.factor:.3g}"] if self.factor != 1 else []
        words += [] if self.step is None else [f"step {self.step / 1e6:.3g} ms"]
        return ", ".join(words + ([f"draft {self.drafter / 1e6:.3g} ms"] if self.drafter else []))


class Rates(NamedTuple):
    """Bytes/s of what a run may wait for, and which of them are published."""

    gpu: float
    cpu: float
    link: float
    disk: float
    known: frozenset[str]


def rates_of(row: Row) -> Rates:
    """Return the published rates, others as assumed for any machine. Raises ConfigError."""
    alone = row["placement"] == "all_cpu"
    said = float(row["ram_bw_gbs"] or 0) * (1 if "measured" in row["ram_bw_kind"] else NOMINAL)
    link = re.search(r"([\d.]+) GB/s", row["pcie"])
    made = assembled(
        gpu="" if alone else card_of(row),
        ram="64GB",
        ram_rate=f"{said:.3f}GB/s" if said else "",
        disk=f"{row['ssd_gbs']}GB/s" if row["ssd_gbs"] else "",
        link="" if alone else f"{link[1]}GB/s" if link else row["pcie"],
    )
    of, cpu = made.platform.compute, made.platform.cpu or made.platform.compute
    assert isinstance(of, Roofline) and isinstance(cpu, Roofline)
    known = {"cpu": row["ram_bw_gbs"], "link": row["pcie"], "disk": row["ssd_gbs"]}
    gpu = of.memory_bytes_per_s * (int(row["n_gpu"] or 1) if row["engine"].startswith("vLLM") else 1)
    disk = made.disk_bytes_per_s or 1e12
    wire = made.platform.links[0].bytes_per_s
    return Rates(gpu, cpu.memory_bytes_per_s, wire, disk, frozenset(name for name in known if known[name]))


def platform_of(row: Row, geometry: Geometry, at: Placed, fit: Fit, cost: str) -> Platform:
    """Return the machine of a run, with the figures that were fitted."""
    rates, factor, (apart, more) = rates_of(row), fit.factor, COSTS[cost]
    size, alone = geometry.expert_bytes[0], row["placement"] == "all_cpu"
    step = fit.step
    if step is None:  # dense weights by their bytes, and launches
        step = geometry.dense_bytes / (rates.cpu / factor if alone else rates.gpu) * 1e9
        step += 0 if alone else geometry.layers * card(card_of(row)).layer_ns
    read = size / (rates.cpu / factor if alone else rates.gpu) * 1e9
    below = rates.disk / factor if "disk" in at.waited else rates.disk
    link = below if alone or row["placement"] == "ssd_slots" else rates.link / (factor if "link" in at.waited else 1)
    tiers = (LowerTier(name="RAM", capacity=f"{at.ram}B", bytes_per_s=below, latency_ns=80_000),) if at.ram else ()
    cpu = size / rates.cpu * 1e9 * (factor if "cpu" in at.waited and "disk" not in at.waited else 1)
    return Platform(
        name="measured",
        links=(Link(bytes_per_s=link, latency_ns=10_000),),
        tiers=tiers,
        compute=Measured(
            kind="measured",
            dense_ns=round(step / geometry.layers),
            dense_by_tokens=((1, 1.0), (1001, 1 + 1000 * more)) if more else (),
            expert_ns=round(read + (CPU_LAUNCH_NS if alone else LAUNCH_NS)),
        ),
        cpu=Measured(
            kind="measured",
            expert_ns=round(cpu + CPU_LAUNCH_NS),
            rows_apart=apart and "llama.cpp" in row["engine"],
            tier="RAM" if tiers else "",
        ),
        draft=Drafting(ns_per_token=fit.drafter),
    )


class Bench(NamedTuple):
    """A run's machine and model, to replay on it."""

    row: Row
    geometry: Geometry
    folder: Path
    cost: str

    def _routed(self, requests: int) -> Routed:
        of = self.geometry
        return _routed(self.row["model"], (of.layers, of.experts, of.k), of.expert_bytes[0], requests)

    @property
    def placed(self) -> Placed:
        """Where the experts lie, the most used ones by other requests."""
        return placed(self.row, self.geometry, *self._routed(2)[1:])

    def token_ns(self, fit: Fit, drafts: str = "0", requests: int = 1) -> float:
        """Return nanoseconds per decoded token of all requests together."""
        trace, at = self._routed(max(2, requests)).trace, self.placed
        path = self.folder / "measured.toml"
        path.write_text(as_toml(platform_of(self.row, self.geometry, at, fit, self.cost)))
        passes = f"batch:{requests}" if requests > 1 else "token"
        how = {"platform": str(path), "passes": passes, "draft": drafts, **at.settings}
        seeds = range(SEEDS if drafts != "0" else 1)
        return fmean(replay(trace, configure(seed=seed, **how)).totals["time_ns"] for seed in seeds) / trace.tokens
