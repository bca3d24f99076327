"""The printed table of serving figures: settings that vary, latencies, throughput and goodput."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moereplay.analysis.tables import csv, folded, markdown, table
from moereplay.results.result import Result
from moereplay.results.serving import LATENCIES, PERCENTILES, Holding, Level, figures, shortened
from moereplay.results.settings import LEADING, setting_kinds

Row = dict[str, Any]
WORDS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "e2e"}
#: Heads of the terminal's table; others are printed with --csv alone.
HEADS = {
    "rate": "rate/s",
    **{f"{name}_p{each}_ms": f"{WORDS[name]} p{each}" for name in LATENCIES for each in PERCENTILES},
    "requests_per_s": "req/s",
    "throughput_tokens_per_s": "tok/s",
    "slo_share": "meet",
    "goodput_per_s": "goodput/s",
}
#: Columns that a narrow terminal drops, first to go first.
SPARE = ("TPOT p90", "e2e p90", "TTFT p90", "req/s", "e2e p50", "tok/s")
MEANING = (
    "TTFT and e2e from arrival, in ms; req/s, tok/s and goodput (requests that meet --slo) per second from the first "
    "arrival to the last end"
)


def rows(results: Sequence[Result], level: Level | None) -> list[Row]:
    """Return a row per result: its capacity, arrivals and settings that vary, then its figures."""
    varying = _varying(results)
    return [_settings(result, varying) | figures(result.per_request, level) for result in results]


def found(holdings: Sequence[Holding], level: Level) -> list[Row]:
    """Return a row per search: settings that vary, the largest rate that holds the level, and the figures there.

    The rate is null if none holds, or if every rate does.
    """
    varying = [name for name in _varying([each.result for each in holdings]) if name != "arrivals"]
    return [
        _settings(each.result, varying)
        | {"rate": each.rate, "holds": each.rate is not None or not each.bounded, "bounded": each.bounded}
        | figures(each.result.per_request, level)
        for each in holdings
    ]


def _varying(results: Sequence[Result]) -> list[str]:
    names = [*dict.fromkeys([*LEADING, *setting_kinds()])]
    return [
        name
        for name in names
        if name in results[0].config
        and (name == "capacity" or len({str(result.config[name]) for result in results}) > 1)
    ]


def _settings(result: Result, names: Sequence[str]) -> Row:
    return {name: shortened(str(result.config[name])) for name in names}


def printed(made: Sequence[Row], form: str) -> list[str]:
    """Return the lines of a table: of a terminal, or `csv` or `markdown` with all columns."""
    if form:
        return [(csv if form == "csv" else markdown)(made)]
    shown = [
        {HEADS.get(name, name): value for name, value in row.items() if name in HEADS or _is_setting(name)}
        for row in made
    ]
    return ["", table(shown, spare=SPARE), folded(MEANING), *_unbounded(made)]


def _is_setting(name: str) -> bool:
    return name in setting_kinds()


def _unbounded(made: Sequence[Row]) -> list[str]:
    """Return what a search without a largest rate found."""
    lines = []
    for row in made:
        if row.get("rate", 0) is None:
            where = ", ".join(f"{name} {value}" for name, value in row.items() if _is_setting(name))
            all_hold = "every rate holds the level: it is met with all requests at the start"
            lines.append(f"{where}: {all_hold if row['holds'] else 'no rate that was tried holds the level'}")
    return lines
