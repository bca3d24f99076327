"""Predict a run by replaying its routing: hits, bytes and times of its own experts and tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from moereplay.calibration.prediction import as_run
from moereplay.calibration.runs import MIB, RefusalError, Run, Sizes
from moereplay.results.result import Event, Result
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Platform
from moereplay.simulator.platforms import as_toml
from moereplay.simulator.replay import replay
from moereplay.traces.dense import NOT_STORED
from moereplay.traces.geometry import recognised
from moereplay.traces.importers import registry as importers
from moereplay.traces.importers.contract import Options
from moereplay.traces.schema import Geometry, Header, Request, Trace, memory_trace
from moereplay.traces.store import open_trace
from moereplay.traces.units import MS
from moereplay.traces.weight_formats import BITS_PER_WEIGHT

#: Eviction policies by their names in rows.
POLICIES = {"lru": "lru", "lfu with recency (LFRU), sampled eviction": "lfru", "lfu with recency (LFRU)": "lfru"}
BITS = 16.0  #: precision at which dense bytes are converted to weights
#: A routing file that column `notes` names.
NAMED = re.compile(r"\broutes/[\w.-]+\.(?:csv|jsonl)\b")


@dataclass(frozen=True)
class Replayed:
    """Columns of cells.csv as replayed, and the correlation with the per-token log."""

    columns: Mapping[str, float]
    more: Mapping[str, object]


def routing_of(folder: Path, run: Run) -> Path | None:
    """Return the file of the run's own routing, None if it is not named or missing."""
    return _present(folder, run.cell.text("trace_file"))


def model_routing_of(folder: Path, run: Run) -> Path | None:
    """Return the routing of the same model that the row's notes name, None without one. Its prompt may differ."""
    found = NAMED.search(run.cell.text("notes"))
    return _present(folder, found[0]) if found else None


def _present(folder: Path, named: str) -> Path | None:
    path = folder / named
    try:
        return path if named and path.exists() else None
    except ValueError:  # a zero byte
        return None


def replayed(platform: Platform, run: Run, routing: Path) -> Replayed:
    """Replay the run's routing on the platform. Raises RefusalError, TraceError or ConfigError."""
    trace = _trace(routing, run)
    trace.geometry.refuse_uneven("a comparison with measured runs")
    with TemporaryDirectory() as folder:
        machine = Path(folder) / "machine.toml"
        machine.write_text(as_toml(as_run(platform, run)), "utf-8")
        config = configure(**_settings(run), platform=str(machine))
        result = replay(trace, config, log=True)
    return _compared(result, run, trace.geometry.expert_bytes)


def _settings(run: Run) -> dict[str, str]:
    """Return the policy, capacity and scope of the run. Raises RefusalError for a policy that cannot be replayed."""
    eviction = POLICIES.get(run.cell.text("policy"))
    if eviction is None:
        raise RefusalError(f"policy {run.cell.text('policy')!r} cannot be replayed")
    scope = "per_layer" if run.cell.text("cache_scope").startswith("per layer") else "global"
    if memory := run.cell.amount("cache_mib"):
        return {"eviction": eviction, "capacity": f"{memory:.6f}MiB", "scope": scope}
    if slots := run.cell.amount("cache_slots"):
        return {"eviction": eviction, "capacity": f"{slots:.0f}experts", "scope": scope}
    raise RefusalError("missing cache_mib or cache_slots")


def _trace(routing: Path, run: Run) -> Trace:
    header, requests = _requests(routing, run.sizes)
    return memory_trace(header, list(requests))


@cache
def _requests(routing: Path, sizes: Sizes) -> tuple[Header, Sequence[Request]]:
    """Read the first request of a trace or of another tool's file. Cached, as several runs may name one file."""
    header, rows = _stored(routing) if is_trace(routing) else _foreign(routing, sizes)
    found = header.geometry
    if (found.layers, found.k) != (sizes.layers, sizes.k):
        raise ConfigError(f"{routing} {_difference(found, sizes)}")
    requests = list(islice(rows, 1))
    return header.model_copy(update={"geometry": _sized(found, sizes)}), requests


def _difference(found: Geometry, sizes: Sizes) -> str:
    """Say by which numbers a trace is not the run's routing, and what to do."""
    if found.layers != sizes.layers:
        return (
            f"has {found.layers} MoE layers, the run's model {sizes.layers}: give the model that was traced (--model)"
        )
    text = f"was recorded with k = {found.k}, but the run states k = {sizes.k} (--k, column k or the model's)"
    return f"{text}: give the routing of that run, or --k {found.k} if the run had it"


def _stored(path: Path) -> tuple[Header, Iterator[Request]]:
    trace = open_trace(path)
    return trace.header, (trace.request(index) for index in range(trace.requests))


def _foreign(path: Path, sizes: Sizes) -> tuple[Header, Iterator[Request]]:
    each = (round(sizes.expert_bytes),) * sizes.layers
    given = Geometry(layers=sizes.layers, experts=sizes.experts, k=sizes.k, expert_bytes=each)
    foreign = importers.read(path, Options(geometry=given))
    return foreign.header, iter(foreign.requests)


def model_of(routings: Sequence[Path], machine: Platform) -> str | None:
    """Return the known model that the headers of all traces name, else the only one that the machine was fitted to.

    Raises TraceError for a damaged trace.
    """
    headers = [open_trace(routing).header for routing in routings if is_trace(routing)]
    models = [recognised(header.provenance.model, header.geometry) for header in headers]
    names = {model.name if model else None for model in models}
    fitted = list(machine.calibration.models) if machine.calibration else []
    return (names.pop() if len(names) == 1 else None) or (fitted[0] if len(fitted) == 1 else None)


def is_trace(path: Path) -> bool:
    """Return True for a trace folder, False for a file of another tool."""
    return path.is_dir() and (path / "zarr.json").exists()


def _sized(geometry: Geometry, sizes: Sizes) -> Geometry:
    """Return the trace's geometry with the dense bytes and the weight format of the run."""
    mean = sum(geometry.expert_bytes) / geometry.layers
    dense = round((sizes.dense_bytes or 0) * 8 / BITS / geometry.layers)
    bits = BITS_PER_WEIGHT.get(sizes.weight_format, BITS)
    stored = {"dense_params": dense, "head_params": 0, "dense_bits": BITS, "weight_format": sizes.weight_format}
    stored |= {"matrices": sizes.matrices} if sizes.matrices_stated else {}
    return geometry.model_copy(update=NOT_STORED | stored | {"expert_params": round(mean * 8 / bits)})


def _compared(result: Result, run: Run, sizes: Sequence[int]) -> Replayed:
    decode = [row for row in result.per_layer if row["phase"] == "decode"]
    passes = sum(row["decode_passes"] for row in result.per_request)

    def total(name: str) -> int:
        return sum(row[name] for row in decode)

    if not total("accesses"):
        raise RefusalError("its routing has no decoded tokens with experts; record decode steps")
    tpot = sum(row["decode_ns"] for row in result.per_request) / passes / MS
    tokens = _tokens(result.events, passes, sizes)
    columns = {
        "tpot_ms": tpot,
        **({"tok_s": 1000 / tpot} if tpot else {}),
        "tpot_median_ms": float(np.median(tokens.wall_ms)),
        "compute_ms": (total("dense_ns") + total("expert_ns")) / passes / MS,
        "io_ms" if run.serial else "stall_ms": total("stall_ns") / passes / MS,
        "mgmt_ms": total("loading_ns") / passes / MS,
        "read_mib_per_token": total("bytes_demand") / passes / MIB,
        "hit_pct": _hits(result, run),
    }
    return Replayed(columns, {"per_token": _correlations(run, tokens)})


def _hits(result: Result, run: Run) -> float:
    """Return hits in percent over decoded tokens, and over the prompt if the row includes it."""
    phases = ("decode",) if run.cell.text("hit_scope").startswith("decode") else ("decode", "prefill")
    rows = [row for row in result.per_layer if row["phase"] in phases]
    return 100 * sum(row["hits"] for row in rows) / sum(row["accesses"] for row in rows)


class Tokens(NamedTuple):
    """Per decoded token, (T,)."""

    wall_ms: np.ndarray  #: since the end of the previous token
    busy_ms: np.ndarray  #: compute of dense layers and experts in that time
    read_bytes: np.ndarray


def _tokens(events: Sequence[Event], passes: int, sizes: Sequence[int]) -> Tokens:
    """Sum events over the last `passes` passes; `sizes` are bytes of an expert by layer."""
    last = max(event.step_pass for event in events)
    ends, busy, read = np.zeros((3, last + 1))
    for event in events:
        if event.kind in ("dense", "expert", "cpu"):
            ends[event.step_pass] = max(ends[event.step_pass], event.t1)
            busy[event.step_pass] += event.t1 - event.t0
        elif event.kind == "transfer":
            read[event.step_pass] += sizes[event.layer]
    decoded = slice(last - passes + 1, None)
    return Tokens(np.diff(ends, prepend=0)[decoded] / MS, busy[decoded] / MS, read[decoded])


def _correlations(run: Run, tokens: Tokens) -> dict[str, object]:
    """Return Pearson's r with the log over tokens: bytes read, waiting with loading, and the whole time.

    Empty if the log has another length; None for a series that does not vary.
    """
    series = run.series
    if series is None or series.tokens != len(tokens.wall_ms):
        return {}
    found = {"read_r": _r(tokens.read_bytes, series.read_bytes), "wall_r": _r(tokens.wall_ms, series.wall_ms)}
    if series.stall_ms is not None and series.mgmt_ms is not None:
        found["waiting_r"] = _r(tokens.wall_ms - tokens.busy_ms, series.stall_ms + series.mgmt_ms)
    return {"tokens": series.tokens, **found}


def _r(ours: np.ndarray, theirs: np.ndarray) -> float | None:
    if ours.std() == 0 or theirs.std() == 0:
        return None
    return float(np.corrcoef(ours, theirs)[0, 1])
