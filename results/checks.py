"""The checks of a sweep: configurations that were measured or run live, each with a replay of the same tokens.

OUT/checks/3f2a90c1d2e4b567-8c1d2e4f.json    one check, written atomically; its name gives the configuration and the
kind of check
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from moereplay.results.errors import ResultError
from moereplay.results.result import Result, values_of
from moereplay.traces.documents import DocumentError, Frozen, canonical_digest, content, from_json, json_text
from moereplay.traces.files import write_whole
from moereplay.traces.units import MS

FOLDER = "checks"
VERSION = 1  #: of the file


class How(Frozen):
    """The method of a check, and the part of the trace that it covers."""

    way: Literal["measured", "live"]
    device: str
    model: str = ""  #: live: what ran
    slow_tier: str = ""  #: measured: disk, disk:buffered or pinned
    throttle_bytes_per_s: float | None = None  #: measured: of the slow tier
    layers: int  #: the first ones
    requests: int = 1  #: the first ones
    prompt: int  #: tokens of them that went through in one pass, together
    tokens: int  #: all of them


class Side(Frozen):
    """Figures of a run or of its replay; null where undefined."""

    hit_rate: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    stall_ms: float | None  #: per token
    bytes_per_token: float | None


class Check(Frozen):
    """A configuration with its measured or live results and its replay."""

    checks_version: int = VERSION
    identity: str  #: the configuration's, in the sweep
    trace: str  #: digest
    config: Mapping[str, Any]
    how: How
    load: float  #: of the machine before it: processes that ran or waited, on average over a minute
    checked: Side
    replayed: Side

    @property
    def error(self) -> float | None:
        """replayed / checked - 1 of the time per decoded token; of the TTFT where nothing is decoded."""
        for name in ("tpot_ms", "ttft_ms"):
            ran, simulated = getattr(self.checked, name), getattr(self.replayed, name)
            if ran and simulated is not None:
                return simulated / ran - 1
        return None

    @property
    def hit_rate_error(self) -> float | None:
        """replayed - checked."""
        ran, simulated = self.checked.hit_rate, self.replayed.hit_rate
        return None if ran is None or simulated is None else simulated - ran


def side_of(result: Result, tokens: int) -> Side:
    """Return the figures of a run over a number of tokens."""
    totals, own = result.totals, values_of(result)
    return Side(
        hit_rate=own["hit_rate"],
        ttft_ms=own["ttft_mean_ms"],
        tpot_ms=own["tpot_ms"],
        stall_ms=totals["stall_ns"] / tokens / MS,
        bytes_per_token=(totals["bytes_demand"] + totals["bytes_prefetch"]) / tokens,
    )


def path_of(folder: Path, identity: str, how: How) -> Path:
    """Return the file of a check, in the folder of its sweep."""
    return folder / FOLDER / f"{identity}-{canonical_digest(how.model_dump())[:8]}.json"


def write(folder: Path, check: Check) -> None:
    """Write the file atomically. Raises ResultError."""
    path, document = path_of(folder, check.identity, check.how), check.model_dump(mode="json")
    try:
        write_whole(path, (json_text(document | {"sha256": canonical_digest(document)}, indent=1) + "\n").encode())
    except OSError as error:
        said = f"{error.strerror}; the checks before it stay, make room and run it again"
        raise ResultError(f"cannot write {path}: {said}") from None


def load(folder: Path) -> list[Check]:
    """Load the checks of a sweep, sorted by identity; the list may be empty. Raises ResultError for a damaged one."""
    return [_read(path) for path in sorted((folder / FOLDER).glob("*.json"))]


def _read(path: Path) -> Check:
    try:
        document = from_json(content(path))
        digest = document.pop("sha256")
        if digest != canonical_digest(document):
            raise ValueError("its content was changed")
        if document["checks_version"] > VERSION:
            raise ResultError(f"{path} has version {document['checks_version']}; upgrade moereplay to read it")
        return Check.model_validate(document)
    except (OSError, DocumentError, ValidationError, KeyError, TypeError, AttributeError, ValueError) as wrong:
        said = "other fields" if isinstance(wrong, ValidationError) else wrong
        raise ResultError(
            f"invalid check {path} ({said}): expected a file written by a check; remove it and run the checks again"
        ) from None
