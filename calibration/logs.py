"""Per-token logs of one engine as runs: what a row of cells.csv would say of them comes from options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from moereplay.calibration.columns import MOST_MIB
from moereplay.calibration.files import Line, read_series
from moereplay.calibration.refusal import RefusalError
from moereplay.calibration.runs import Run, run_from
from moereplay.calibration.sizes import MIB
from moereplay.simulator.capacity import parse_size
from moereplay.simulator.errors import ConfigError
from moereplay.traces.geometry import known
from moereplay.traces.weight_formats import check_format

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
