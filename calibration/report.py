"""Documents and table rows of calibrations and predictions."""

from __future__ import annotations

from collections.abc import Sequence

from moereplay.calibration.fitting import Fitted
from moereplay.calibration.prediction import TIMES, Prediction, miss_ns, step_prices, summary
from moereplay.traces.units import GB, MS, US

#: Columns that a narrow table drops, in this order.
SPARE = ("loading", "waiting", "compute", "time", "basis")
SHOWN = 2  #: cells listed per reason
#: Divisor and unit of a figure by the end of its name.
UNITS = {
    "bytes_per_s": (GB, "GB/s"),
    "ns_per_mib": (US, "us/MiB"),
    "_ns": (US, "us"),
    "ns_per_token": (US, "us"),
    "contention": (1, ""),
}


def document(found: Fitted, held: Sequence[Prediction]) -> dict[str, object]:
    """Return the document of `moereplay calibrate --json`."""
    about = found.platform.calibration
    fitted = found.on_itself
    return {
        "method": about.method if about else "",
        "device": found.device,
        "platform": found.platform.name,
        "figures": {name: figure._asdict() for name, figure in found.figures.items()},
        "fit": {"cells": len(found.runs), "mape": summary(fitted)["mape"], "names": [run.name for run in found.runs]},
        "misses": miss_rows(found),
        "held_out": summary(held),
        "warnings": list(found.warnings),
        "residuals": [each.document() for each in (*fitted, *held)],
    }


def figure_rows(found: Fitted) -> list[dict[str, object]]:
    """Return one row per figure: value and spread in a readable unit."""
    return [figure_row(name, figure.value, figure.spread, figure.n) for name, figure in found.figures.items()]


def figure_row(name: str, value: float, spread: float | None, n: int) -> dict[str, object]:
    """Return a figure in the unit of its name; rates are in bytes per second."""
    fits = [of for end, of in UNITS.items() if name.endswith(end)]
    divisor, unit = (fits or [(GB, "GB/s")])[0]
    shown = name.replace("ns_per", "time_per").removesuffix("_ns")  # the unit is not ns
    apart = None if spread is None else spread / divisor
    return {"figure": shown, "value": value / divisor, "spread": apart, "unit": unit, "samples": n}


def miss_rows(found: Fitted) -> list[dict[str, object]]:
    """Return the price of a step's first miss and of each further one, by size of an expert."""
    known = {(run.sizes.expert_bytes, run.sizes.k): step_prices(found.platform, run.sizes) for run in found.runs}
    names = ("first_miss_ms", "further_miss_ms")
    prices = {size: dict(zip(names, miss_ns(of), strict=True)) for size, of in known.items()}
    return [
        {"expert_bytes": size, "k": k} | {name: ns / MS for name, ns in prices[size, k].items()} for size, k in prices
    ]


def warning_lines(warnings: Sequence[str]) -> list[str]:
    """Return the warnings, grouped by their common ending."""
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
    """Return one row per predicted cell: predicted/measured ms per token, the error, and the parts of the time."""
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
    """Format with three digits, or without decimals."""
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def refusal_rows(found: Sequence[Prediction]) -> list[dict[str, object]]:
    """Return one row per reason with the cells that it refuses."""
    by_reason: dict[str, list[str]] = {}
    for each in found:
        if each.refused:
            by_reason.setdefault(each.reason, []).append(each.cell)
    return [{"refused": len(cells), "reason": reason, "cells": _listed(cells)} for reason, cells in by_reason.items()]


def _listed(cells: Sequence[str]) -> str:
    more = f", ... ({len(cells) - SHOWN} more)" if len(cells) > SHOWN else ""
    return ", ".join(cells[:SHOWN]) + more


def summary_line(found: Sequence[Prediction]) -> str:
    """Summarise the errors in one line."""
    of = summary(found)
    if not of["cells"]:
        return "no run with a compared time"
    errors = {name: float(str(of[name])) for name in ("median_abs_error", "mape", "bias", "worst")}
    return (
        f"{of['cells']} runs: median |error| {errors['median_abs_error']:.1%}, mean |error| {errors['mape']:.1%}, "
        f"bias {errors['bias']:+.1%}, worst {errors['worst']:+.1%} ({of['worst_cell']})"
    )


#: Quantities of a single run: column, words and unit.
QUANTITIES = (
    ("tpot_ms", "time per token, mean", "ms"),
    ("tpot_median_ms", "time per token, median", "ms"),
    ("tok_s", "tokens per second", ""),
    ("hit_pct", "hits", "%"),
    ("read_mib_per_token", "read per token", "MiB"),
    ("compute_ms", "compute", "ms"),
    ("io_ms", "waiting for reads", "ms"),
    ("stall_ms", "waiting for reads", "ms"),
    ("mgmt_ms", "loading", "ms"),
)


def quantity_rows(found: Prediction) -> list[dict[str, object]]:
    """Return one row per quantity of a single run: predicted, measured and the error."""
    return [
        {
            "log": found.cell,
            "what": f"{words}, {unit}" if unit else words,
            "predicted": found.predicted[name],
            "measured": found.measured.get(name),
            "error": _error(name, found),
        }
        for name, words, unit in QUANTITIES
        if name in found.predicted
    ]


def _error(name: str, found: Prediction) -> str:
    """Return the error: points for hits, percent for other quantities."""
    if name == "hit_pct" and name in found.measured:
        return f"{found.predicted[name] - found.measured[name]:+.1f} points"
    return f"{found.error[name]:+.1%}" if name in found.error else "-"
