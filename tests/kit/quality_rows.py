"""Folders of `moereplay quality` made by hand: counters and losses are a test's choice, and no model runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import polars as pl

from moereplay.analysis.forecast_fit import Change
from moereplay.results.files import write_frame
from moereplay.results.quality import FILE, UNMODIFIED, to_frame
from moereplay.results.result import Row
from moereplay.simulator.config import KINDS, configure
from tests.kit.tiny_runs import NO_COUNT

MASS, ASSIGNMENTS = 10**9, 10**6
TASK, DTYPE = "perplexity:text.txt", "float32"
TOKENS = 100.0  #: of an example
TIMES = dict.fromkeys(("time_ns", "ttft_ns", "ttft_requests", "decode_ns", "decode_passes"), 0)
Loss = Callable[[Change], float]


def changed(
    variation: float, substitution: float, dropping: float, displacement: float = 0, rounding: float = 0
) -> Change:
    """A change in which every lost assignment weighs as much as a mean one."""
    return Change(substitution + dropping, variation, substitution, dropping, displacement, rounding)


def counters_of(change: Change, low: float = 0.0) -> Row:
    """Counters whose ratios are a change; `low` is the share of gate weight below the first precision."""
    shares = {
        "mass": 1.0,
        "variation": change.variation,
        "mass_substituted": change.substitution,
        "mass_dropped": change.dropping,
        "mass_kept": 1 - change.substitution - change.dropping,
        "mass_low_precision": low,
    }
    lost = (change.substitution + change.dropping) ** 2 / change.lost if change.lost else 0
    ranks = {
        "assignments": ASSIGNMENTS,
        "assignments_kept": round((1 - lost) * ASSIGNMENTS),
        "rank_displacement": round(change.displacement * ASSIGNMENTS),
    }
    return NO_COUNT | TIMES | ranks | {name: round(share * MASS) for name, share in shares.items()}


def quality_frame(
    sets: Mapping[str, tuple[Change, dict[str, str]]],
    losses: Mapping[str, Loss],
    noise: float = 0.001,
    examples: int = 8,
) -> pl.DataFrame:
    """The unmodified model, and sets of the given changes and settings, in one task.

    A set's measure is above the unmodified model's by a loss of its change, in every example with noise of its own.
    """
    drawn = np.random.default_rng(5)
    rows = [_row(UNMODIFIED, None, None, {name: np.full(examples, 2.0) for name in losses})]
    for name, (change, settings) in sets.items():
        values = {each: 2 + loss(change) + noise * drawn.standard_normal(examples) for each, loss in losses.items()}
        rows.append(_row(name, change, settings, values))
    return to_frame(rows)


def written(folder: Path, frame: pl.DataFrame) -> Path:
    """The folder with such a frame in it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_frame(frame, folder / FILE)
    return folder


def _row(name: str, change: Change | None, settings: dict[str, str] | None, values: Mapping[str, np.ndarray]) -> Row:
    config = None if settings is None else configure(**settings)
    chosen = config.policy_set() if config else None
    spelled = [getattr(chosen, kind).text(full=True) for kind in KINDS] if chosen else []
    counted = counters_of(change) if change else None
    return {
        "set": name,
        "task": TASK,
        "changes_output": change is not None and any(change),
        "config": config.model_dump(mode="json") if config else None,
        "about": {"model": "miniature", "dtype": DTYPE, "policies": ", ".join(spelled)},
        "texts": len(next(iter(values.values()))),
        "tokens": 1000,
        "live": counted,
        "replayed": counted,
        "measures": [_measure(each, found) for each, found in values.items()],
        "examples": [row for each, found in values.items() for row in _examples(each, found)],
    }


def _measure(name: str, values: np.ndarray) -> Row:
    return {"name": name, "value": float(values.mean()), "higher_is_better": False}


def _examples(measure: str, values: np.ndarray) -> list[Row]:
    same = {"prompt_sha256": "", "measure": measure, "weight": TOKENS}
    return [{"example": str(at), "value": float(value)} | same for at, value in enumerate(values)]
