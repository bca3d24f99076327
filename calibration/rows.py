"""Rows of the table of predictions and measurements, and the rows that people file of their own runs.

A filed row is a line of JSON that `verify --row` or `calibrate series --row` appends to a file: a run, what was
measured and predicted of it, and which code predicted it. `python -m evidence` makes its page from such files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from moereplay.simulator.errors import ConfigError
from moereplay.traces.documents import (
    DocumentError,
    Frozen,
    Name,
    Text,
    canonical_digest,
    first_fault,
    json_lines,
    json_text,
    package_version,
)
from moereplay.traces.files import sha256_of, write_whole

PRESET, HELD_OUT = "preset", "held out"  #: roles of rows whose prediction was not fitted on their run
HITS, TIME, MEDIAN = "hits, %", "mean time per token, ms", "time of the median token, ms"
PROMPT = "mean time per token of the prompt, ms"
CLOSED = "replay of a token"  #: basis of the rows of a series


@dataclass(frozen=True)
class Row:
    """One quantity of one run, predicted and measured."""

    id: str
    source: str
    machine: str
    model: str
    quantity: str
    predicted_from: str
    role: str  #: fit, held out, preset or refused
    basis: str
    predicted: float | None
    measured: float | None
    compared: bool  #: counts in summaries
    remark: str

    @property
    def error(self) -> float | None:
        """predicted / measured - 1, at full size."""
        return self.predicted / self.measured - 1 if self.predicted is not None and self.measured else None


COLUMNS = (
    *("id", "source", "machine", "model", "quantity", "predicted_from", "role", "basis"),
    *("predicted", "measured", "error", "compared", "remark"),
)


def as_records(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return the rows of the CSV file."""
    return [{name: _cell(getattr(row, name)) for name in COLUMNS} for row in rows]


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else float(f"{value:.4g}") if isinstance(value, float) else value


def about_series(run: Mapping[str, str]) -> tuple[str, str, str, str]:
    """Return id, source, machine and model of a row of `calibrate series`."""
    machine = ", ".join(filter(None, (run["series"], run["gpu"] if run["gpu"] != "none" else run["cpu"])))
    return run["id"], run["source"], machine, run["model"]


# -- rows that people file

ROOT = Path(__file__).resolve().parents[1]
PREDICTING = ("calibration", "policies", "results", "simulator", "sweeps/recommend", "traces")
DIGITS = 16  #: of the digest of the code
Said = Annotated[Name, Field(min_length=1)]


class Code(Frozen):
    """The code that predicted."""

    version: Annotated[str, StringConstraints(pattern=r"^[0-9][0-9A-Za-z.+]{0,40}$")]
    commit: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{40}(-dirty)?)?$")]  #: "" without a checkout
    digest: Annotated[str, StringConstraints(pattern=rf"^[0-9a-f]{{{DIGITS}}}$")]  #: of the sources of PREDICTING


class Filed(Frozen):
    """A measured run beside its prediction, on which nothing was fitted."""

    id: Said
    machine: Said
    model: Said
    engine: Said  #: and its version
    settings: dict[str, Text]
    quantity: Literal["hits, %", "mean time per token, ms", "mean time per token of the prompt, ms"]
    measured: float = Field(ge=0, le=1e9)
    predicted: float = Field(ge=0, le=1e9)
    predicted_from: Text
    role: Literal["held out", "preset"]
    basis: Said
    code: Code
    predicted_on: date
    source: Text = ""  #: where the run was published before
    public: date | None = None  #: since when the measurement may have been known; None if that is not stated

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        for name in ("measured", "predicted"):
            value = getattr(self, name)
            if self.quantity == HITS and value > 100:
                raise ValueError(f"{name} {value:g}: expected 0 to 100, percent of accesses")
            if self.quantity != HITS and not value:
                raise ValueError(f"{name} 0: expected a time, more than 0 ms")
        if self.public and self.public > self.predicted_on:
            raise ValueError(f"public {self.public}: expected a day until {self.predicted_on}, that of the prediction")
        return self

    def row(self, remark: str) -> Row:
        """Return the row of the table."""
        shared = {name: getattr(self, name) for name in COLUMNS if name in Filed.model_fields}
        return Row(**shared, compared=True, remark=remark)


class Filing(NamedTuple):
    """The origin of all rows that a command files: the code, the engine, and when the run was published."""

    code: Code
    engine: str
    day: str = ""  #: of a run that was published before

    def filed(self, row: Row, settings: Mapping[str, Any]) -> Filed:
        """Return a predicted row with its origin. Raises ConfigError for a fact that a row may not hold."""
        today = datetime.now(UTC).date()
        facts = {name: getattr(row, name) for name in COLUMNS if name in Filed.model_fields}
        facts |= {"engine": self.engine, "settings": {name: str(value) for name, value in settings.items()}}
        facts |= {"code": self.code, "predicted_on": today, "public": _day(self.day) if row.source else today}
        try:
            return Filed.model_validate(facts)
        except ValidationError as wrong:
            raise ConfigError(f"--row: invalid row of {row.id}: {first_fault(wrong)}") from None


def code(commit: str | None) -> Code:
    """Return what names the code that runs."""
    files = sorted(path for room in PREDICTING for path in (ROOT / room).rglob("*") if path.suffix in (".py", ".toml"))
    digest = canonical_digest([[path.relative_to(ROOT).as_posix(), sha256_of(path)] for path in files])
    return Code(version=package_version(), commit=commit or "", digest=digest[:DIGITS])


def _day(text: str) -> date | None:
    try:
        return date.fromisoformat(text)
    except ValueError:
        return None


def read_filed(path: Path) -> list[Filed]:
    """Read a file of rows. Raises ConfigError naming the line that is not a row."""
    try:
        return [row for _, row, _ in json_lines(path, Filed, "a row that `--row` of verify or calibrate series wrote")]
    except DocumentError as wrong:
        raise ConfigError(str(wrong)) from None


def append(path: Path, rows: Iterable[Filed]) -> int:
    """Append rows to a file, and return how many. Raises ConfigError for a file of something else, or no rows."""
    before, new = read_filed(path) if path.exists() else [], list(rows)
    if not new:
        raise ConfigError("--row: every run was fitted, and only predictions are filed: pass more runs, or fit fewer")
    lines = [json_text(row.model_dump(mode="json"), ensure_ascii=False) for row in [*before, *new]]
    write_whole(path, "".join(f"{line}\n" for line in lines).encode())
    return len(new)
