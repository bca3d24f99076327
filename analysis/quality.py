"""Quality of policy sets compared with the unmodified model: paired differences over examples, with 95 % CI."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

import polars as pl

from moereplay.analysis.forecast_fit import mass_changed, stored_bits
from moereplay.analysis.statistics import Pairs, difference, spearman
from moereplay.results.quality import UNMODIFIED
from moereplay.results.result import METRICS, MISS_RATE, Row
from moereplay.results.settings import KINDS, POLICIES

NLL, KL = "nll", "kl"  #: the measure behind perplexity, and the least noisy one
#: Preferred leading measures, best first.
LEADING = ("acc_norm", "acc", "exact_match,strict-match", "exact_match", "mc2", NLL, "perplexity")


class Judged(NamedTuple):
    """One measure of a policy set in a task."""

    set: str
    task: str
    measure: str
    value: float
    base: float  #: the unmodified model's
    higher_is_better: bool
    change: float | None  #: mean of value - base over shared examples; None without any
    off: float | None  #: half the 95 % CI of `change`, if known
    examples: int

    @property
    def loss(self) -> float | None:
        """Loss compared with the unmodified model, in units of the measure."""
        if self.change is None:
            return None
        return 0.0 - self.change if self.higher_is_better else self.change


def judged(frame: pl.DataFrame) -> list[Judged]:
    """Return every measure of every row, compared with the unmodified model."""
    base = {row["task"]: row for row in frame.iter_rows(named=True) if row["set"] == UNMODIFIED}
    rows = [row for row in frame.iter_rows(named=True) if row["set"] != UNMODIFIED]
    return [each for row in rows for each in _compared(row, base[row["task"]])]


def _compared(row: Row, base: Row) -> list[Judged]:
    """Compare the measures that both have; infinite and undefined measures are missing from a task."""
    known = {measure["name"] for measure in base["measures"]}
    return [_judged(row, base, measure) for measure in row["measures"] if measure["name"] in known]


def leading(frame: pl.DataFrame, task: str) -> str:
    """Return the measure that a task is drawn by: the first known one that varies between sets."""
    measures = frame.filter(pl.col("task") == task).select("measures").explode("measures").unnest("measures")
    names = measures["name"].unique(maintain_order=True).to_list()
    varying = [name for name in names if measures.filter(pl.col("name") == name)["value"].n_unique() > 1]
    order = [name for name in (*LEADING, *names) if name in names]
    return next((name for name in order if name in varying), order[0])


def tables(frame: pl.DataFrame) -> dict[str, list[Row]]:
    """Return a table per task: a row per set with misses, time per token and measures; the unmodified model first."""
    found = {(each.set, each.task, each.measure): each for each in judged(frame)}
    return {
        task: [_table_row(row, leading(frame, task), found) for row in frame.filter(pl.col("task") == task).to_dicts()]
        for task in frame["task"].unique(maintain_order=True)
    }


def document(frame: pl.DataFrame) -> Row:
    """Return everything but the examples as one JSON-ready document; an infinite perplexity becomes null."""
    found = judged(frame)
    rows = []
    for row in frame.drop("examples", "rows_version", "digest").iter_rows(named=True):
        own = [each for each in found if (each.set, each.task) == (row["set"], row["task"])]
        more = {"figures": figures(row), "mass_changed": _changed(row)}
        rows.append(row | more | {"differences": [_as_row(each) for each in own]})
    return _finite({"rows": rows})


def _finite(value: Any) -> Any:
    """Replace numbers that JSON cannot express by None."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def figures(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Return miss rate, TTFT and TPOT of the live run and of its replay; None for the unmodified model."""
    sides = {side: row[side] or {} for side in ("live", "replayed")}
    return {f"{side}_{name}": value for side, counted in sides.items() for name, value in _rates(counted).items()}


def _rates(counted: Mapping[str, int]) -> dict[str, float | None]:
    if not counted:
        return dict.fromkeys(("miss_rate", "ttft_ms", "tpot_ms"))
    return {
        "miss_rate": MISS_RATE.value(counted),
        "ttft_ms": METRICS["ttft_mean_ms"].value({**counted, "prefills": counted["ttft_requests"]}),
        "tpot_ms": METRICS["tpot_ms"].value({**counted, "decode_tokens": counted["decode_passes"]}),
    }


def _table_row(row: Row, first: str, found: Mapping[tuple[str, str, str], Judged]) -> Row:
    values = {measure["name"]: measure["value"] for measure in row["measures"]}
    rates, own = figures(row), found.get((row["set"], row["task"], first))
    rest = {name: value for name, value in values.items() if name != first}
    return {
        "set": shown(row["set"]),
        "miss rate": rates["live_miss_rate"],
        "TPOT ms": rates["live_tpot_ms"],
        first: values.get(first),
        "loss": own.loss if own else None,
        "±": own.off if own else None,
        "mass changed": _changed(row),
        **rest,
    }


def order_of(frame: pl.DataFrame, task: str) -> str:
    """Return a sentence on how the replays' gate mass changed orders the sets of a task; empty where nothing varies.

    The live order is that of KL, the least noisy measure, or of the measure that leads where no KL was measured.
    """
    changed = {row["set"]: _changed(row) for row in frame.iter_rows(named=True) if row["task"] == task}
    losses = {(each.measure, each.set): each.loss for each in judged(frame) if each.task == task}
    first = KL if any(measure == KL for measure, _ in losses) else leading(frame, task)
    pairs = [(changed[name], loss) for (measure, name), loss in losses.items() if measure == first]
    known = [(share, loss) for share, loss in pairs if share is not None and loss is not None and isfinite(loss)]
    found = spearman(*zip(*known, strict=True)) if known else None
    if found is None:
        return ""
    return f"mass changed, of the replays: rank correlation with {first} {found:.2f}, {len(known)} sets"


def _changed(row: Mapping[str, Any]) -> float | None:
    return mass_changed(*replayed(row)) if row["replayed"] else None


def replayed(row: Mapping[str, Any]) -> tuple[Mapping[str, int | None], str, float]:
    """Return what changed in a set's replay: its totals, the miss policy in full spelling and the stored bits."""
    spelled = row["about"]["policies"].split(", ")  # a policy per kind, then the storage of low-bit experts
    return row["replayed"], dict(zip(KINDS, spelled, strict=False))["miss"], stored_bits(row["about"]["dtype"])


def shown(name: str) -> str:
    """Shorten a set's name: `prior routing=max_rank:m=6` becomes `prior max_rank:m=6`."""
    family, *varied = re.sub(rf" ({'|'.join(POLICIES)})=", " ", name).split(" ")
    return " ".join(varied if varied and varied[0].startswith(family) else [family, *varied])


def _judged(row: Row, base: Row, measure: Row) -> Judged:
    name = measure["name"]
    values = {each["name"]: each["value"] for each in base["measures"]}
    ours, theirs = _pairs(row, name), _pairs(base, name)
    both = [key for key in ours if key in theirs]
    change, off = _change([ours[key] for key in both], [theirs[key] for key in both])
    own = row["set"], row["task"], name
    return Judged(*own, measure["value"], values[name], measure["higher_is_better"], change, off, len(both))


def _change(ours: Pairs, theirs: Pairs) -> tuple[float | None, float | None]:
    """Return the mean difference and half its 95 % CI, which is None if a value is not finite (float16 overflows)."""
    if not ours:
        return None, None
    if not all(isfinite(value) for value, _ in (*ours, *theirs)):
        return _mean(ours) - _mean(theirs), None
    made = difference(ours, theirs)
    return made.value, made.off


def _mean(pairs: Pairs) -> float:
    return sum(value for value, _ in pairs) / sum(weight for _, weight in pairs)


def _pairs(row: Row, measure: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Return (value * weight, weight) by example identity."""
    return {
        (example["example"], example["prompt_sha256"]): (example["value"] * example["weight"], example["weight"])
        for example in row["examples"]
        if example["measure"] == measure
    }


def _as_row(each: Judged) -> Row:
    return {name: value for name, value in each._asdict().items() if name not in ("set", "task")} | {"loss": each.loss}
