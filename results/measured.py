"""The file of `measure --out`: one JSON document of real runs and their replays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from moereplay.results.errors import ResultError
from moereplay.traces.documents import DocumentError, content, from_json, json_text
from moereplay.traces.files import write_whole

FILE = "measured.json"
SIDES = ("measured", "simulated", "closure")


def write(folder: Path, document: Mapping[str, object]) -> Path:
    """Write the document atomically, replacing an earlier one. Raises ResultError."""
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json_text(document, indent=1) + "\n").encode())
    except OSError as error:
        raise ResultError(f"cannot write {path}: {error.strerror}; make room, or choose another folder") from None
    return path


def load(folder: Path) -> pl.DataFrame:
    """Return a row per run, with `tpot_ms`, per-token times (`tokens_ms`) and `hits` of each side, and the device.

    Raises ResultError if the file is missing or is not a measurement.
    """
    path = folder / FILE
    try:
        document = from_json(content(path))
        runs = document["runs"]
        return pl.DataFrame([_row(run) | {"device": str(document["device"])} for run in runs])
    except (OSError, DocumentError, KeyError, TypeError, ValueError) as wrong:
        raise ResultError(f"invalid measurement {path} ({wrong}); make one with: moereplay measure --out DIR") from None


def _row(run: Mapping[str, Any]) -> dict[str, Any]:
    config = {name: str(run["config"][name]) for name in ("eviction", "prefetch", "miss", "routing", "capacity")}
    tpot = {f"{side}_tpot_ms": float(run[side]["tpot_ms"]) for side in SIDES}
    tokens = {f"{side}_tokens_ms": [float(ms) for ms in run["per_token"][f"{side}_ms"]] for side in SIDES}
    throttle = run["throttle_bytes_per_s"]
    about = {"throttle_bytes_per_s": None if throttle is None else float(throttle), "repeat": int(run["repeat"])}
    return config | about | tpot | tokens
