"""Runs to fit or predict, from rows of evidence or per-token logs: bytes that a token computes, misses and reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moereplay.calibration.columns import CELLS, MOST_MIB
from moereplay.calibration.files import Evidence, Line, Series, read_series
from moereplay.simulator.capacity import parse_size
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.rates import MIB
from moereplay.traces.dense import TABLE_BITS, dense_of, resolved, with_bytes
from moereplay.traces.geometry import KnownModel, known
from moereplay.traces.schema import Geometry, TraceError
from moereplay.traces.weight_formats import BITS_PER_WEIGHT, check_format, named_in

#: Text in column `clean` of rows without a usable time.
NO_TIME = "hits and bytes only"
#: Text in `clean` of rows whose time contains page faults, throttling or paging; it is not compared.
FOREIGN_TIME = (
    *("use hits, bytes", "compute is mostly fault service", "compute inflated", "compute is throttled"),
    *("paging", "machine pages", "do not compare"),
)
TIMES = ("tpot_median_ms", "tpot_ms", "tok_s")
OFF = "cache off"
#: Columns that describe a whole run; a part of its tokens does not inherit them.
AMOUNTS_OF_ALL = (*TIMES, "compute_ms", "io_ms", "stall_ms", "mgmt_ms", "hit_pct", "read_mib_per_token")


@dataclass(frozen=True)
class Run:
    """One cell: sizes, settings and log."""

    name: str
    device: str
    cell: Line
    sizes: Sizes
    series: Series | None
    lanes: int | None
    serial: bool  #: the engine does not overlap reads with compute
    cached: bool  #: has an expert cache, so that loading an expert commits and releases pages
    demand_bytes: float  #: of the experts that a token computes
    missed_bytes: np.ndarray  #: (T,) read by each decoded token, or (1,) their mean

    @property
    def missed_share(self) -> np.ndarray:
        """(T,) missed bytes as shares of the demanded bytes."""
        return self.missed_bytes / self.demand_bytes

    @property
    def foreign_time(self) -> str | None:
        """Reason in the row why the time is not the machine's, or None."""
        reason = self.cell.text("clean")
        return reason if any(words in reason for words in FOREIGN_TIME) else None

    def part(self, kept: slice) -> Run:
        """Return a run of some logged tokens, without published figures. Raises ConfigError without a log."""
        if self.series is None:
            raise ConfigError(f"{self.name} has no log of its tokens")
        cells = {name: text for name, text in self.cell.cells.items() if name not in AMOUNTS_OF_ALL}
        series = self.series.part(kept)
        return replace(self, series=series, missed_bytes=series.read_bytes, cell=replace(self.cell, cells=cells))

    def mean(self, column: str) -> float | None:
        """Return a column's mean per token in ms, from the log if there is one, else as published."""
        rows = getattr(self.series, column, None)
        return self._published(column) if rows is None else float(rows.mean())

    def median(self, column: str) -> float | None:
        """Return a column of the median token in ms, from the log if there is one, else as published."""
        rows = getattr(self.series, column, None)
        return self._published(column) if rows is None else float(np.median(rows))

    def _published(self, column: str) -> float | None:
        return self.cell.amount(column) if column in CELLS else None  # other columns exist in logs only


def run_of(evidence: Evidence, cell: Line) -> Run:
    """Build the run of a cell. Raises RefusalError with the reason, ConfigError for an invalid file."""
    return run_from(cell, evidence.model(cell), evidence.series(cell))


def run_from(cell: Line, model: Line | None, series: Series | None) -> Run:
    """Build a run from its row, the row of its model and its log. Raises RefusalError or ConfigError."""
    _refuse_untimed(cell, series)
    sizes = sizes_of(cell, model)
    stated = cell.amount("token_demand_mib")
    demand = stated * MIB if stated else sizes.demand_bytes
    return Run(
        name=cell.text("cell"),
        device=cell.text("device"),
        cell=cell,
        sizes=sizes,
        series=series,
        lanes=int(cell.amount("lanes") or 0) or None,
        serial=cell.text("overlap") == "no",
        cached=OFF not in cell.text("policy") and cell.amount("cache_mib") != 0,
        demand_bytes=demand,
        missed_bytes=_missed(cell, demand, series),
    )


def _refuse_untimed(cell: Line, series: Series | None) -> None:
    if NO_TIME in cell.text("clean"):
        raise RefusalError(f"column clean has {NO_TIME!r}")
    if series is None and not any(cell.amount(name) for name in TIMES):
        raise RefusalError("no time per decoded token")
    if "CPU" in cell.text("policy"):
        raise RefusalError(f"misses run on the CPU ({cell.text('policy')}), which requires a replay")
    if "page cache" in cell.text("engine") + cell.text("policy"):
        raise RefusalError("experts are cached by the kernel's page cache, which is not modelled")


def _missed(cell: Line, demand: float, series: Series | None) -> np.ndarray:
    """Return the bytes that decoded tokens fetched: as logged, as published, or from hits. 0 counts as measured."""
    if cell.text("prefetch") not in ("", "none"):
        raise RefusalError(f"prefetching run ({cell.text('prefetch')}): bytes read do not determine stall time")
    if series is not None:
        return series.read_bytes
    read = cell.amount("read_mib_per_token")
    if read is not None:
        return np.array([read * MIB])
    if OFF in cell.text("policy"):
        return np.array([demand])
    hits = cell.amount("hit_pct")
    if hits is None:
        raise RefusalError("no hits and no bytes read")
    return np.array([demand * (1 - hits / 100)])


class RefusalError(Exception):
    """A cell that cannot be predicted or fitted on; the message is the reason."""


# -- sizes of the model of a run


#: Matrices of an expert by the number of reads that it takes: gate and up are one matrix of two thirds, or two.
MATRICES = {1: (1,), 2: (2, 1), 3: (1, 1, 1)}
EVEN = MATRICES[3]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model as a run stored it."""

    layers: int
    experts: int
    k: int  #: experts per token in this run, which may be fewer than the model's
    expert_bytes: float  #: mean over layers
    dense_bytes: float | None  #: read per token in addition to routed experts; None if unknown
    dense_from: str  #: source of dense_bytes
    weight_format: str  #: of the experts
    matrices: tuple[int, ...] = EVEN  #: relative sizes of an expert's matrices, in the order of reading
    matrices_stated: bool = False  #: by models.csv

    @property
    def demand_bytes(self) -> float:
        """Bytes of all experts that one token is routed to."""
        return self.layers * self.k * self.expert_bytes


def sizes_of(cell: Line, model: Line | None) -> Sizes:
    """Return the sizes of a cell's model, from its row, models.csv and known models. Raises RefusalError."""
    like = _known(cell.text("model"))
    geometry = like.geometry if like else None
    layers = _whole(cell, "moe_layers", geometry and geometry.layers)
    experts = _whole(cell, "experts", geometry and geometry.experts)
    k = _whole(cell, "k", geometry and geometry.k)
    if k > experts:
        raise ConfigError(f"{cell.where}: invalid k {k}: expected at most {experts}, the experts of a layer")
    each = _expert_bytes(cell, geometry)
    dense, source = _dense(cell, model, like, layers * experts * each, each)
    reads = int((model and model.amount("reads_per_expert")) or 0)
    stored = named_in(cell.text("quant")) or ""
    return Sizes(layers, experts, k, each, dense, source, stored, MATRICES.get(reads, (1,) * reads) or EVEN, reads > 0)


def _known(name: str) -> KnownModel | None:
    try:
        return known(name)
    except TraceError:
        return None


def _whole(cell: Line, column: str, otherwise: int | None) -> int:
    value = cell.amount(column) or otherwise
    if not value:
        raise RefusalError(f"missing {column}: {cell.text('model')} is not a known model")
    return int(value)


def _expert_bytes(cell: Line, geometry: Geometry | None) -> float:
    """Return the mean bytes of an expert: from the row, else of the known model in the row's format."""
    if stated := cell.amount("expert_bytes_mean"):
        return stated
    stored = named_in(cell.text("quant"))
    if geometry is None or geometry.expert_params is None or stored is None:
        raise RefusalError("missing expert_bytes_mean: it does not follow from model and quant")
    if known_bytes := geometry.bytes_by_bits.get(int(BITS_PER_WEIGHT[stored])):
        return sum(known_bytes) / len(known_bytes)
    return geometry.expert_params * BITS_PER_WEIGHT[stored] / 8


def _dense(
    cell: Line, model: Line | None, like: KnownModel | None, all_experts: float, each: float
) -> tuple[float | None, str]:
    """Return the dense bytes that a token reads, and their source."""
    if model and (read := model.amount("dense_read_per_token_mib")):
        return read * MIB, "models.csv"
    if model and (whole := model.amount("file_bytes")) and whole > all_experts:
        return whole - all_experts - _embedding(like), "file_bytes without experts"
    if held := cell.amount("dense_mib"):
        return _read_of(held * MIB, like), "dense_mib"
    if like and like.geometry.dense_params and like.geometry.expert_params:
        weights = like.geometry.dense_params * like.geometry.layers + (like.geometry.head_params or 0)
        return weights * each / like.geometry.expert_params, "known weights in the experts' format"
    return None, "unknown"


def _read_of(held: float, like: KnownModel | None) -> float:
    """Return the bytes that a token reads of the dense bytes held: all but a separate embedding table."""
    if like is None:
        return held
    return dense_of(resolved(with_bytes(like.geometry, round(held)), like.name)).read


def _embedding(like: KnownModel | None) -> float:
    """Return the bytes of a separate embedding table; a token reads one row of it."""
    return 0.0 if like is None else like.embedding_params * TABLE_BITS / 8


# -- runs of per-token logs: options supply the columns of a row

FEWEST_TOKENS = 10


class Logged(NamedTuple):
    """Facts that per-token logs do not contain."""

    model: str
    memory: str  #: size of the expert cache, as 4000MiB; 0 for none
    k: int | None
    lanes: int
    serial: bool
    quant: str
    dense: str | None  #: size of all weights except routed experts, as 1816MiB
    device: str


def runs_of_logs(files: Sequence[Path], abouts: Sequence[Logged], fewest: int = FEWEST_TOKENS) -> list[Run]:
    """Return a run per log; `abouts` supply the facts that logs lack. Raises ConfigError."""
    runs = []
    for file, name, about in zip(files, _names(files), abouts, strict=True):
        cells = _cells(about)
        series = read_series(file)
        if series.tokens < fewest:
            raise ConfigError(f"{file}: {series.tokens} tokens: expected at least {fewest}")
        try:
            runs.append(run_from(Line(file, 0, {**cells, "cell": name}), None, series))
        except RefusalError as refusal:
            raise ConfigError(f"{file}: {refusal}") from None
    return runs


def _names(files: Sequence[Path]) -> list[str]:
    """Name each log by its stem, or by its path if stems collide. Raises ConfigError for a repeated log."""
    file, times = Counter(files).most_common(1)[0]
    if times > 1:
        raise ConfigError(f"{file} is given {times} times: pass each log once")
    stems = Counter(file.stem for file in files)
    return [file.stem if stems[file.stem] == 1 else str(file) for file in files]


def _cells(about: Logged) -> Mapping[str, str]:
    """Return the columns of a row. Raises ConfigError, or TraceError for an unknown model."""
    memory = _mib("--memory", about.memory)
    try:
        stored = check_format(about.quant)
    except ValueError as wrong:
        raise ConfigError(f"--quant {about.quant}: {wrong}") from None
    return {
        "device": about.device,
        "model": known(about.model).name,
        "quant": stored,
        "k": str(about.k or ""),
        "lanes": str(about.lanes),
        "overlap": "no" if about.serial else "yes",
        "cache_mib": str(memory),
        "policy": "lru" if memory else "none (cache off)",
        "dense_mib": str(_mib("--dense", about.dense)) if about.dense else "",
        "hit_scope": "decode",  # a log has decoded tokens alone
    }


def _mib(option: str, text: str) -> float:
    size = parse_size(text) if text != "0" else 0
    if size is None:
        raise ConfigError(f"invalid {option} {text[:40]!r}: expected a size such as 4000MiB or 2GB, or 0")
    if size / MIB > MOST_MIB:
        raise ConfigError(f"invalid {option} {text[:40]!r}: expected at most {MOST_MIB:,.0f}MiB")
    return float(size / MIB)


def split(runs: Sequence[Run], hold_out: float) -> tuple[list[Run], list[Run]]:
    """Split each log: fit on the first tokens, predict the last share `hold_out`."""
    firsts, lasts = [], []
    for run in runs:
        tokens = run.series.tokens if run.series else 0
        kept = max(1, tokens - round(tokens * hold_out))
        firsts.append(run.part(slice(0, kept)))
        if kept < tokens:
            lasts.append(run.part(slice(kept, None)))
    return firsts, lasts
