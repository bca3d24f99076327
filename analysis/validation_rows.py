"""Comparisons as rows: for the terminal, as one JSON document, and as a Parquet file that figures are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import polars as pl

from moereplay.analysis.divergence import Divergence
from moereplay.analysis.heading import capacities, of_trace
from moereplay.analysis.ratios import MISS_RATE
from moereplay.analysis.tables import LONG
from moereplay.analysis.validation import Comparison, Measure
from moereplay.results import validation
from moereplay.results.result import Row
from moereplay.results.schema import ROWS_VERSION
from moereplay.results.settings import POLICIES
from moereplay.traces.schema import Trace

#: Settings that head a table; the others are in the document.
SHOWN = (*POLICIES, "platform", "contract", "scope")


def document(comparisons: Sequence[Comparison]) -> Row:
    """Everything as one JSON-ready document."""
    return {"passed": all(each.passed for each in comparisons), "sets": [_row(each) for each in comparisons]}


def to_frame(comparisons: Sequence[Comparison]) -> pl.DataFrame:
    """One row per comparison, as `results.validation` stores them."""
    return validation.to_frame([_row(each) | {"config": _flat(each.config)} for each in comparisons])


def heading(trace: Trace, comparisons: Sequence[Comparison]) -> list[str]:
    """Title lines: what was run, and how to read the table."""
    alike = {name for name in SHOWN if len({each.config[name] for each in comparisons}) == 1}
    first = comparisons[0].config
    return [
        f"LIVE, emulated, beside SIMULATED: {of_trace(trace)}",
        "; ".join(f"{name} {first[name]}" for name in SHOWN if name in alike),
        *(f"set {each.name}: {said}" for each in comparisons if (said := _settings(each, alike))),
        *capacities([(each.config, each.about) for each in comparisons]),
        "replayed: the trace, without the model; closed loop: what the live run itself recorded, replayed",
        "allowed 0: policies that leave the output alone may not differ at all; the others are replayed open loop",
        "",
    ]


def measure_rows(comparisons: Sequence[Comparison]) -> list[Row]:
    """A table row per set and measure; the set's name stands in the first, a long one goes down, word by word."""
    outside = any(not measure.within for each in comparisons for measure in each.measures)
    return [
        {"set": words, **_shown(measure, outside)}
        for each in comparisons
        for words, measure in zip(_down(each.name, len(each.measures)), each.measures, strict=True)
    ]


def _down(name: str, rows: int) -> list[str]:
    """A name for each row: whole in the first, or if it is long its words, in the last row all that are left."""
    words = name.split(maxsplit=rows - 1) if len(name) > LONG else [name]
    return words + [""] * (rows - len(words))


def quality_rows(comparisons: Sequence[Comparison]) -> list[Row]:
    """A table row per set that changes the model's output: misses saved, and quality of the output."""
    return [
        {
            "set": each.name,
            "lam": each.lam,
            "miss rate live": miss_rate(each, "live"),
            "miss rate replayed": miss_rate(each, "replayed"),
            "tokens scored": each.quality["tokens"],
            "perplexity": each.quality["perplexity"],
            "of the model alone": each.quality["perplexity_base"],
            "mean KL, nats": each.quality["mean_kl"],
            "same top-1": each.quality["top1"],
        }
        for each in comparisons
        if each.quality and not each.exact
    ]


def lines(comparisons: Sequence[Comparison]) -> list[str]:
    """One line per set, and one for each tolerance that it exceeds."""
    verdicts = []
    for each in comparisons:
        verdicts.append(f"{each.name}: {each.verdict()}{_compared(each)}")
        if each.open_loop is not None and not each.exact:
            verdicts.append(f"  open loop first differs at {each.open_loop.text()}")
        verdicts += [f"  not allowed: {complaint}" for complaint in each.complaints()]
    return verdicts


def miss_rate(each: Comparison, side: str) -> float | None:
    """Misses per access of a side, `live` or `replayed`; None without accesses."""
    sums = {name: sum(layer[f"{side}_{name}"] for layer in each.layers) for name in ("misses", "accesses")}
    return MISS_RATE.of(sums)


def _settings(each: Comparison, alike: AbstractSet[str]) -> str:
    """What neither all sets share nor the name of this one says."""
    named = each.name.split()
    own = {name: each.config[name] for name in SHOWN if name not in alike}
    return "; ".join(f"{name} {value}" for name, value in own.items() if f"{name}={value}" not in named)


def _compared(each: Comparison) -> str:
    closed = "; closed loop identical" if each.closed_ran and each.closed_loop is None else ""
    return f" ({each.events:,} events of either log{closed})" if each.events else f" (counters only{closed})"


def _shown(measure: Measure, outside: bool) -> Row:
    shown: Row = {
        "what": measure.name,
        "live": measure.live,
        "replayed": measure.replayed,
        "error": _spelled(measure, measure.error),
        "allowed": _spelled(measure, measure.allowed),
    }
    return shown | ({"": "" if measure.within else "outside"} if outside else {})


def _spelled(measure: Measure, share: float | None) -> str:
    if share is None:
        return "-"
    return f"{100 * share:.3g} %" if measure.relative else f"{share:.3g}"


def _row(each: Comparison) -> Row:
    return {
        "rows_version": ROWS_VERSION,
        "name": each.name,
        "verdict": each.verdict(),
        "passed": each.passed,
        "exact": each.exact,
        "lam": each.lam,
        "config": each.config,
        "about": each.about,
        "measures": [_measure(measure) for measure in each.measures],
        "layers": list(each.layers),
        "events": each.events,
        "open_loop": _divergence(each.open_loop),
        "closed_ran": each.closed_ran,
        "closed_loop": _divergence(each.closed_loop),
        "quality": dict(each.quality) or None,
    }


def _measure(measure: Measure) -> Row:
    row: Row = {**measure._asdict(), "error": measure.error}
    numbers = ("live", "replayed", "error", "allowed")
    return row | {name: None if row[name] is None else float(row[name]) for name in numbers}


def _divergence(found: Divergence | None) -> Row | None:
    if found is None:
        return None
    return found._asdict() | {"tokens": None if found.tokens is None else list(found.tokens)}


def _flat(config: Row) -> Row:
    """Lists of experts as text, as `results.read` spells them."""
    lists = {name: value for name, value in config.items() if isinstance(value, list)}
    return config | {name: " ".join(f"{layer}:{expert}" for layer, expert in value) for name, value in lists.items()}
