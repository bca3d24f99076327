"""A row of evidence as a run that can be priced: what a token reads, misses and computes."""

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
from moereplay.simulator.platform import MIB
from moereplay.traces.dense import TABLE_BITS, dense_of, resolved, with_bytes
from moereplay.traces.geometry import KnownModel, known
from moereplay.traces.schema import Geometry, TraceError
from moereplay.traces.weight_formats import BITS_PER_WEIGHT, check_format, named_in

#: What `clean` says of rows whose time means nothing.
NO_TIME = "hits and bytes only"
#: What it says of rows whose time is not the machine's: page faults, throttling, paging.
FOREIGN_TIME = (
    *("use hits, bytes", "compute is mostly fault service", "compute inflated", "compute is throttled"),
    *("paging", "machine pages", "do not compare"),
)
TIMES = ("tpot_median_ms", "tpot_ms", "tok_s")
OFF = "cache off"
#: Columns that are of a whole run, and not of some of its tokens.
AMOUNTS_OF_ALL = (*TIMES, "compute_ms", "io_ms", "stall_ms", "mgmt_ms", "hit_pct", "read_mib_per_token")


@dataclass(frozen=True)
class Run:
    """One cell: its sizes, its settings, and what was logged of it."""

    name: str
    device: str
    cell: Line
    sizes: Sizes
    series: Series | None
    lanes: int | None
    serial: bool  #: reads first, then computes
    cached: bool  #: experts are kept: pages are committed for those that come, released for those that leave
    demand_bytes: float  #: of experts that a token computes
    missed_bytes: np.ndarray  #: (T,) read by each decoded token, or (1,) their mean

    @property
    def missed_share(self) -> np.ndarray:
        """(T,) of the demanded bytes."""
        return self.missed_bytes / self.demand_bytes

    @property
    def foreign_time(self) -> str | None:
        """What is wrong with the run's time, in the words of its row; None if nothing is."""
        said = self.cell.text("clean")
        return said if any(words in said for words in FOREIGN_TIME) else None

    def part(self, kept: slice) -> Run:
        """Some of the logged tokens as a run of their own; without published figures. Raises ConfigError if none is."""
        if self.series is None:
            raise ConfigError(f"{self.name} has no log of its tokens")
        cells = {name: text for name, text in self.cell.cells.items() if name not in AMOUNTS_OF_ALL}
        series = self.series.part(kept)
        return replace(self, series=series, missed_bytes=series.read_bytes, cell=replace(self.cell, cells=cells))

    def mean(self, column: str) -> float | None:
        """Milliseconds per token of a column, from the log where there is one, else as published."""
        rows = getattr(self.series, column, None)
        return self._published(column) if rows is None else float(rows.mean())

    def median(self, column: str) -> float | None:
        """The same of the median token."""
        rows = getattr(self.series, column, None)
        return self._published(column) if rows is None else float(np.median(rows))

    def _published(self, column: str) -> float | None:
        return self.cell.amount(column) if column in CELLS else None  # or only logs have it


def run_of(evidence: Evidence, cell: Line) -> Run:
    """The cell as a run. Raises RefusalError with the reason, ConfigError for a file that is wrong."""
    return run_from(cell, evidence.model(cell), evidence.series(cell))


def run_from(cell: Line, model: Line | None, series: Series | None) -> Run:
    """The same of a row, its model's row and its log."""
    _refuse_untimed(cell, series)
    sizes = sizes_of(cell, model)
    said = cell.amount("token_demand_mib")
    demand = said * MIB if said else sizes.demand_bytes
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
        raise RefusalError(f"its row says {NO_TIME!r}")
    if series is None and not any(cell.amount(name) for name in TIMES):
        raise RefusalError("no time per decoded token is published")
    if "CPU" in cell.text("policy"):
        raise RefusalError(f"misses are computed on the CPU ({cell.text('policy')}), which needs a replay")
    if "page cache" in cell.text("engine") + cell.text("policy"):
        raise RefusalError("the kernel's page cache is its cache, which no price describes")


def _missed(cell: Line, demand: float, series: Series | None) -> np.ndarray:
    """Bytes that decoded tokens fetched: as logged, as published, or from the published hits. 0 is a measurement."""
    if cell.text("prefetch") not in ("", "none"):
        raise RefusalError(f"it prefetches ({cell.text('prefetch')}): what it read does not tell what it waited for")
    if series is not None:
        return series.read_bytes
    read = cell.amount("read_mib_per_token")
    if read is not None:
        return np.array([read * MIB])
    if OFF in cell.text("policy"):
        return np.array([demand])
    hits = cell.amount("hit_pct")
    if hits is None:
        raise RefusalError("neither its hits nor its bytes are published")
    return np.array([demand * (1 - hits / 100)])


# -- Why a run is not predicted.


class RefusalError(Exception):
    """A cell that cannot be predicted, or not fitted on; the message is the reason, in words."""


# -- How large the model of a run is: its experts, and what every token reads beside them.


@dataclass(frozen=True)
class Sizes:
    """Of one model as one run stored it."""

    layers: int
    experts: int
    k: int  #: of the run, which may use fewer than the model's own
    expert_bytes: float  #: mean over layers
    dense_bytes: float | None  #: that a token reads and that are no routed expert; None if nobody says
    dense_from: str  #: where the dense bytes are from
    weight_format: str  #: of the experts

    @property
    def demand_bytes(self) -> float:
        """Of all experts that one token is routed to."""
        return self.layers * self.k * self.expert_bytes


def sizes_of(cell: Line, model: Line | None) -> Sizes:
    """The sizes of a cell's model, from its row, models.csv and known models. Raises RefusalError."""
    like = _known(cell.text("model"))
    geometry = like.geometry if like else None
    layers = _whole(cell, "moe_layers", geometry and geometry.layers)
    experts = _whole(cell, "experts", geometry and geometry.experts)
    k = _whole(cell, "k", geometry and geometry.k)
    if k > experts:
        raise ConfigError(f"{cell.where}: k is {k}; expected at most the {experts} experts of a layer")
    each = _expert_bytes(cell, geometry)
    dense, said = _dense(cell, model, like, layers * experts * each, each)
    return Sizes(layers, experts, k, each, dense, said, named_in(cell.text("quant")) or "")


def _known(name: str) -> KnownModel | None:
    try:
        return known(name)
    except TraceError:
        return None


def _whole(cell: Line, column: str, otherwise: int | None) -> int:
    value = cell.amount(column) or otherwise
    if not value:
        raise RefusalError(f"{column} is not said, and {cell.text('model')} is no known model")
    return int(value)


def _expert_bytes(cell: Line, geometry: Geometry | None) -> float:
    """Mean bytes of an expert: the row's, else the known model's in the format that the row names."""
    if said := cell.amount("expert_bytes_mean"):
        return said
    stored = named_in(cell.text("quant"))
    if geometry is None or geometry.expert_params is None or stored is None:
        raise RefusalError("expert_bytes_mean is not said, and model and quant do not tell it")
    if known_bytes := geometry.bytes_by_bits.get(int(BITS_PER_WEIGHT[stored])):
        return sum(known_bytes) / len(known_bytes)
    return geometry.expert_params * BITS_PER_WEIGHT[stored] / 8


def _dense(
    cell: Line, model: Line | None, like: KnownModel | None, all_experts: float, each: float
) -> tuple[float | None, str]:
    """Bytes that a token reads beside its experts, and where the figure is from."""
    if model and (read := model.amount("dense_read_per_token_mib")):
        return read * MIB, "models.csv"
    if model and (whole := model.amount("file_bytes")) and whole > all_experts:
        return whole - all_experts - _embedding(like), "the file's bytes without its experts"
    if held := cell.amount("dense_mib"):
        return _read_of(held * MIB, like), "dense_mib"
    if like and like.geometry.dense_params and like.geometry.expert_params:
        weights = like.geometry.dense_params * like.geometry.layers + (like.geometry.head_params or 0)
        return weights * each / like.geometry.expert_params, "its weights, stored as the experts are"
    return None, "not said"


def _read_of(held: float, like: KnownModel | None) -> float:
    """Bytes that a token reads of so many dense ones: all but an embedding table apart from the head."""
    if like is None:
        return held
    return dense_of(resolved(with_bytes(like.geometry, round(held)), like.name)).read


def _embedding(like: KnownModel | None) -> float:
    """Bytes of an embedding table apart from the head, of which a token reads one row."""
    return 0.0 if like is None else like.embedding_params * TABLE_BITS / 8


# -- Per-token logs of one engine as runs: what a row of cells.csv would say of them comes from options.

FEWEST_TOKENS = 10


class Logged(NamedTuple):
    """What the logs do not say of themselves."""

    model: str
    memory: str  #: of the expert cache, as 4000MiB; 0: nothing is kept
    k: int | None
    lanes: int
    serial: bool
    quant: str
    dense: str | None  #: bytes of all that is no routed expert, as 1816MiB
    device: str


def runs_of_logs(files: Sequence[Path], abouts: Sequence[Logged], fewest: int = FEWEST_TOKENS) -> list[Run]:
    """Return a run for each file, of which `abouts` say the rest. Raises ConfigError."""
    runs = []
    for file, name, about in zip(files, _names(files), abouts, strict=True):
        cells = _cells(about)
        series = read_series(file)
        if series.tokens < fewest:
            raise ConfigError(f"{file}: {series.tokens} tokens; a calibration needs at least {fewest}")
        try:
            runs.append(run_from(Line(file, 0, {**cells, "cell": name}), None, series))
        except RefusalError as refusal:
            raise ConfigError(f"{file}: {refusal}") from None
    return runs


def _names(files: Sequence[Path]) -> list[str]:
    """Each log's name without its ending, or its path where others are called so too. Raises ConfigError."""
    file, times = Counter(files).most_common(1)[0]
    if times > 1:
        raise ConfigError(f"{file} is named {times} times, and would count as so many runs; name each log once")
    stems = Counter(file.stem for file in files)
    return [file.stem if stems[file.stem] == 1 else str(file) for file in files]


def _cells(about: Logged) -> Mapping[str, str]:
    """The columns of a row. Raises ConfigError, and TraceError for an unknown model."""
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
    """The first tokens of each log to fit on, the last ones to predict: of each the share that is held out."""
    firsts, lasts = [], []
    for run in runs:
        tokens = run.series.tokens if run.series else 0
        kept = max(1, tokens - round(tokens * hold_out))
        firsts.append(run.part(slice(0, kept)))
        if kept < tokens:
            lasts.append(run.part(slice(kept, None)))
    return firsts, lasts
