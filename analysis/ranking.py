"""The table that the command line prints, made of results as they are: a frame would take longer than the replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cmp_to_key, partial
from statistics import mean, median
from typing import Any

from moereplay.analysis.ratios import RANKED, RATIOS, quotient
from moereplay.analysis.sentences import lines
from moereplay.analysis.verdict import Entry
from moereplay.results.remarks import synthetic_of
from moereplay.results.result import unknown
from moereplay.results.settings import POLICIES, bare_names
from moereplay.results.spent import spent

#: Settings that lead a table.
LEADING = ("model", "trace", "eviction", "prefetch", "miss", "routing", "capacity")

Row = Mapping[str, Any]


def ranking(rows: Sequence[Row], by: str = "hit_rate", called: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Per capacity, best first: identity, what varies, the columns of `RANKED`, and bytes read into lower tiers.

    A row is `Result.to_json()` with its `bounds`, or a row of a frame of results. `called` names rows by their
    identity: a column `preset` then stands for the settings that it fixes. Raises ResultError if `by` is no column.
    """
    table, shown = _sorted(rows, by, called)
    lower = ["gb_lower"] if any(line["gb_lower"] for line in table) else []
    return [{name: line[name] for name in ("identity", *shown, *RANKED, *lower)} for line in table]


def judged(
    rows: Sequence[Row], called: Mapping[str, str] | None = None, foresees: Callable[[Row], bool] = lambda row: False
) -> list[str]:
    """The last lines of that table: the best of its rows (`analysis/verdict.py`).

    `foresees` says whether the policies of a row know the future, by kind.
    """
    table, shown = _sorted(rows, "hit_rate", called)
    made = {row["about"]["identity"]: bool(synthetic_of(row["about"])) for row in rows}
    every = {row["about"]["identity"]: row["per_request"] for row in rows}
    requests = {name: [] if made[name] else kept for name, kept in every.items()}
    names = [name for name in shown if len({line[name] for line in table}) > 1]
    kept = [partial(requests.__getitem__, line["identity"]) for line in table]
    bare = {kind: bare_names({str(line[kind]) for line in table}) for kind in POLICIES}
    entries = [
        Entry(
            line | {kind: known[str(line[kind])] for kind, known in bare.items()},
            line["tokens_per_s"],
            line["hit_rate"],
            its,
            foresees(line),
            made[line["identity"]],
            partial(every.__getitem__, line["identity"]),
        )
        for line, its in zip(table, kept, strict=True)
    ]
    return lines(entries, names)


def best_of_each(rows: Sequence[Row], top: int) -> list[Row]:
    """The first `top` rows of each capacity of a ranking; all for 0."""
    taken = Counter[Any]()
    kept = []
    for row in rows:
        taken[row.get("capacity")] += 1
        if not top or taken[row.get("capacity")] <= top:
            kept.append(row)
    return kept


def _sorted(rows: Sequence[Row], by: str, called: Mapping[str, str] | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Every row with its settings and figures, the best of each capacity first, and the settings to show."""
    if by not in RANKED:
        raise unknown("ranking column", by, RANKED)
    table: list[dict[str, Any]] = [{**_settings(row), **_figures(row)} for row in rows]
    for line in table if called else ():
        line["preset"] = (called or {})[line["identity"]]
    shown = [field for field in _fields(rows[0]) if _tells_apart(table, field, bool(called))]
    shown.sort(key=lambda field: field != "capacity")  # what the rows are grouped by comes first
    keys = {"capacity_bytes": False, by: RANKED[by], "tpot_ms": False} | dict.fromkeys(shown, False)
    table.sort(key=cmp_to_key(lambda a, b: _compared(a, b, keys)))
    return table, [*(["preset"] if called else []), *shown]


def _fields(row: Row) -> list[str]:
    """What tells configurations apart, most telling first."""
    return list(dict.fromkeys([*LEADING, *row["config"], "semantics"]))


def _settings(row: Row) -> dict[str, Any]:
    settings = {name: _text(value) if isinstance(value, list) else value for name, value in row["config"].items()}
    return settings | {
        name: row["about"][name] for name in ("model", "trace", "semantics", "identity", "capacity_bytes")
    }


def _text(pairs: Sequence[Sequence[int]]) -> str:
    return " ".join(":".join(map(str, pair)) for pair in pairs)


def _figures(row: Row) -> dict[str, float | None]:
    """The columns of `RANKED`, times in ms, and what was read into lower tiers, of which older results know nothing."""
    totals, bounds, requests = row["totals"], row["bounds"] or {}, row["per_request"]
    counters = totals | {f"bound_{name}": value for name, value in bounds.items()}
    first, decode_ns, passes = spent(requests)
    compulsory, tpot = (
        quotient(counters.get("bound_compulsory"), counters.get("bound_accesses")),
        quotient(decode_ns, passes),
    )
    speed = quotient(passes, decode_ns)
    figures = {
        "compulsory_limit": None if compulsory is None else 1 - compulsory,
        "ttft_mean_ms": mean(map(float, first)) / 1e6 if first else None,
        "ttft_median_ms": median(first) / 1e6 if first else None,
        "tpot_ms": None if tpot is None else tpot / 1e6,
        "tokens_per_s": None if speed is None else speed * 1e9,
        "gb_moved": (totals["bytes_demand"] + totals["bytes_prefetch"]) / 1e9,
    }
    ranked = {name: figures[name] if name in figures else RATIOS[name].of(counters) for name in RANKED}
    return ranked | {"gb_lower": (totals.get("bytes_lower") or 0) / 1e9}


def _tells_apart(table: Sequence[Row], field: str, named: bool) -> bool:
    """Whether the field varies. Eviction is always shown, except where rows have names."""
    varies = len({line[field] for line in table}) > 1
    if not named:
        return field == "eviction" or varies
    within: dict[str, set[Any]] = {}
    for line in table:
        within.setdefault(line["preset"], set()).add(line[field])
    return any(len(values) > 1 for values in within.values()) or (field == "capacity" and varies)


def _compared(one: Row, other: Row, keys: Mapping[str, bool]) -> int:
    """Below 0 if `one` comes first: key by key, the larger first where that is true of a key, and None last."""
    for key, falling in keys.items():
        a, b = one[key], other[key]
        if a == b:
            continue
        if a is None or b is None:
            return 1 if a is None else -1
        return -1 if (a > b) == falling else 1
    return 0
