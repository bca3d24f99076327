"""A folder of evidence made up by the closed form from known prices, with noise from a seeded generator."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from moereplay.calibration.prediction import StepPrices, mean_waiting

MIB = 2**20
LAYERS, EXPERTS, K, EXPERT_BYTES, DENSE_MIB = 20, 64, 4, 2 * MIB, 500
TOKENS = 200
#: What the machine of the folder costs: bytes/s, and nanoseconds per MiB of a first read and of a loaded expert.
RATE, LINK, LANE, START_PER_MIB, NS_PER_MIB = 20e9, 2.4e9, 0.9e9, 200_000, 120_000
#: cell -> lanes, overlap, bytes of a token that miss.
RUNS: Mapping[str, tuple[int, str, float]] = {
    "made-off": (4, "no", 1.0),
    "made-off-ov": (4, "yes", 1.0),
    "made-half": (4, "no", 0.5),
    "made-half-ov": (4, "yes", 0.45),
    "made-two-lanes": (2, "no", 0.5),
    "made-fifth-ov": (4, "yes", 0.2),
    "made-tenth-ov": (8, "yes", 0.1),
}
COLUMNS = (
    *("cell", "date", "device", "model", "quant", "moe_layers", "experts", "k", "expert_bytes_mean", "dense_mib"),
    *("cache_mib", "cache_scope", "policy", "lanes", "overlap", "prefetch", "per_token_file", "trace_file", "hit_pct"),
    *("read_mib_per_token", "tok_s", "tpot_ms", "tpot_median_ms", "compute_ms", "io_ms", "stall_ms", "mgmt_ms"),
    *("clean", "notes", "engine", "source"),
)
LOGGED = ("token", "wall_ms", "io_ms", "compute_ms", "stall_ms", "mgmt_ms", "read_bytes")


def made(folder: Path, noise: float = 0.0, more: Sequence[Mapping[str, object]] = ()) -> Path:
    """The folder, its times off by `noise` of themselves (a standard deviation); `more` rows come last."""
    (folder / "tokens").mkdir(parents=True)
    draw = np.random.default_rng(7)
    rows = [_run(folder, name, noise, draw) for name in RUNS]
    with (folder / "cells.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows([*rows, *more])
    return folder


def route(file: Path, layers: int, decoded: str) -> Path:
    """A route trace of one prompt token; `decoded` are rows' experts of a token after it: empty for none, -1, 0, ..."""
    file.parent.mkdir(exist_ok=True)
    sizes = [f"# layer={layer} expert_bytes={EXPERT_BYTES}" for layer in range(layers)]
    facts = f"# model=made.gguf arch=made n_layer={layers} n_expert={EXPERTS} n_expert_used={K}"
    cells = [(layer, slot) for layer in range(layers) for slot in range(K)]
    rows = [f"0,0,0,{layer},{slot},{slot}" for layer, slot in cells]
    rows += [f"0,1,1,{layer},{slot},{decoded}" for layer, slot in cells] if decoded else []
    file.write_text("\n".join(["# route_trace v1", facts, *sizes, "turn,phase,step,layer,slot,expert", *rows]) + "\n")
    return file


def prices(lanes: int, serial: bool, loads: bool) -> StepPrices:
    """Of one step on the machine of the folder."""
    return StepPrices(
        k=K,
        load=NS_PER_MIB * EXPERT_BYTES / MIB if loads else 0,
        latency=0,
        start=START_PER_MIB * EXPERT_BYTES / MIB,
        wire=EXPERT_BYTES / min(LINK, LANE * lanes) * 1e9,
        depth=lanes,
        expert=EXPERT_BYTES / RATE * 1e9,
        waits_for_all=serial,
    )


def _run(folder: Path, name: str, noise: float, draw: np.random.Generator) -> dict[str, object]:
    lanes, overlap, share = RUNS[name]
    off = share == 1
    each = _tokens(prices(lanes, overlap == "no", not off), share, noise, draw)
    with (folder / "tokens" / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(LOGGED)
        writer.writerows(zip(range(1, TOKENS + 1), *(each[column] for column in LOGGED[1:]), strict=True))
    return row(
        name,
        lanes=lanes,
        overlap=overlap,
        policy="none (cache off)" if off else "lru",
        cache_mib=0 if off else 100,
        per_token_file=f"tokens/{name}.csv",
        tpot_ms=each["wall_ms"].mean(),
    )


def row(name: str, **said: object) -> dict[str, object]:
    """A row of cells.csv; what is not said is empty, the model apart."""
    model = {
        "moe_layers": LAYERS,
        "experts": EXPERTS,
        "k": K,
        "expert_bytes_mean": EXPERT_BYTES,
        "dense_mib": DENSE_MIB,
    }
    about = {"cell": name, "date": "2026-01-02", "device": "desk", "model": "Made-Up", "quant": "Q4_K_M"}
    return {**about, **model, "cache_scope": "global", "prefetch": "none", **said}


def _tokens(step: StepPrices, share: float, noise: float, draw: np.random.Generator) -> dict[str, np.ndarray]:
    """Columns of a log; misses vary between tokens unless all miss."""
    demand = LAYERS * K * EXPERT_BYTES
    shares = np.full(TOKENS, share) if share == 1 else np.clip(draw.normal(share, share / 5, TOKENS), 0.01, 0.99)
    read = shares * demand
    waited = LAYERS * mean_waiting(step, shares) / 1e6
    loading = read / EXPERT_BYTES * step.load / 1e6
    compute = np.full(TOKENS, (DENSE_MIB * MIB + demand) / RATE * 1e3)
    waited, loading, compute = (rows * draw.normal(1, noise, TOKENS) for rows in (waited, loading, compute))
    nothing = np.zeros(TOKENS)
    columns = {"wall_ms": waited + loading + compute, "compute_ms": compute, "mgmt_ms": loading, "read_bytes": read}
    return columns | {"io_ms": waited, "stall_ms": nothing if step.waits_for_all else waited}
