"""What is printed of a calibration and of predictions: documents, and rows of tables."""

from __future__ import annotations

from collections.abc import Sequence

from moereplay.calibration.fitting import Fitted
from moereplay.calibration.prediction import TIMES, Prediction, summary

#: Columns of predicted cells that may be left out of a table, first to go first.
SPARE = ("loading", "waiting", "compute", "time", "basis")
SHOWN = 2  #: cells of a reason
#: What a figure is shown in, by the end of its name: divisor and unit.
UNITS = {
    "bytes_per_s": (1e9, "GB/s"),
    "ns_per_mib": (1e3, "us/MiB"),
    "_ns": (1e3, "us"),
    "ns_per_token": (1e3, "us"),
    "contention": (1, ""),
}


def document(found: Fitted, held: Sequence[Prediction]) -> dict[str, object]:
    """As `moereplay calibrate --json` prints it."""
    about = found.platform.calibration
    fitted = found.on_itself
    return {
        "method": about.method if about else "",
        "device": found.device,
        "platform": found.platform.name,
        "figures": {name: figure._asdict() for name, figure in found.figures.items()},
        "fit": {"cells": len(found.runs), "mape": summary(fitted)["mape"], "names": [run.name for run in found.runs]},
        "held_out": summary(held),
        "warnings": list(found.warnings),
        "residuals": [each.document() for each in (*fitted, *held)],
    }


def figure_rows(found: Fitted) -> list[dict[str, object]]:
    """One row per figure: value and spread in a unit that a reader knows."""
    return [figure_row(name, figure.value, figure.spread, figure.n) for name, figure in found.figures.items()]


def figure_row(name: str, value: float, spread: float | None, n: int) -> dict[str, object]:
    """A figure in the unit that its name ends in; rates are bytes per second."""
    fits = [of for end, of in UNITS.items() if name.endswith(end)]
    divisor, unit = (fits or [(1e9, "GB/s")])[0]
    shown = name.replace("ns_per", "time_per").removesuffix("_ns")  # the unit is not ns
    apart = None if spread is None else spread / divisor
    return {"figure": shown, "value": value / divisor, "spread": apart, "unit": unit, "samples": n}


def warning_lines(warnings: Sequence[str]) -> list[str]:
    """Each warning; those that end in the same words below these."""
    alike: dict[str, list[str]] = {}
    for each in warnings:
        what, _, why = each.rpartition("; ")
        alike.setdefault(why, []).append(what)
    return [line for why, each in alike.items() for line in _warning(why, each)]


def _warning(why: str, what: Sequence[str]) -> list[str]:
    if len(what) == 1:
        return [f"warning: {'; '.join(filter(None, (*what, why)))}"]
    return [f"warning: {why}:", *(f"  {each}" for each in what)]


def residual_rows(found: Sequence[Prediction]) -> list[dict[str, object]]:
    """One row per predicted cell: predicted/measured ms of a token, the error, and what the time is made of."""
    return [_residual_row(each) for each in found if not each.refused]


def _residual_row(each: Prediction) -> dict[str, object]:
    name = next((name for name in TIMES if name in each.measured), TIMES[-1])
    error = each.time_error
    row: dict[str, object] = {
        "cell": each.cell,
        "role": each.role.replace("_", " "),
        "basis": each.basis,
        "time": name,
        "predicted/ measured ms": _both(each, name),
        "error": "-" if error is None else f"{error:+.1%}",
    }
    waits = "io_ms" if "io_ms" in each.predicted else "stall_ms"
    return row | {
        "compute": _both(each, "compute_ms"),
        "waiting": _both(each, waits),
        "loading": _both(each, "mgmt_ms"),
    }


def _both(each: Prediction, name: str) -> str:
    was = each.measured.get(name)
    return f"{_three(each.predicted[name])}/{'-' if was is None else _three(was)}"


def _three(ms: float) -> str:
    """With three digits, or all before the point."""
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def refusal_rows(found: Sequence[Prediction]) -> list[dict[str, object]]:
    """One row per reason, with the cells that it refuses; the document names each of them."""
    by_reason: dict[str, list[str]] = {}
    for each in found:
        if each.refused:
            by_reason.setdefault(each.reason, []).append(each.cell)
    return [{"refused": len(cells), "reason": reason, "cells": _listed(cells)} for reason, cells in by_reason.items()]


def _listed(cells: Sequence[str]) -> str:
    more = f", ... ({len(cells) - SHOWN} more)" if len(cells) > SHOWN else ""
    return ", ".join(cells[:SHOWN]) + more


def summary_line(found: Sequence[Prediction]) -> str:
    """How far these are off, in words."""
    of = summary(found)
    if not of["cells"]:
        return "no run whose time counts"
    errors = {name: float(str(of[name])) for name in ("median_abs_error", "mape", "bias", "worst")}
    return (
        f"{of['cells']} runs: median |error| {errors['median_abs_error']:.1%}, mean |error| {errors['mape']:.1%}, "
        f"bias {errors['bias']:+.1%}, worst {errors['worst']:+.1%} ({of['worst_cell']})"
    )
