"""The printed tables of replays: heading, rows, and verdict; and of their serving figures.

It is made from results directly, because building a data frame takes longer than a replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cmp_to_key, partial
from typing import Any

from moereplay.analysis.tables import csv, folded, markdown, table
from moereplay.results.counters import nanojoules
from moereplay.results.remarks import assumptions, one_label, seconds_in_words, synthetic_of, with_routing
from moereplay.results.result import RANKED, Result, quotient, ranking_column, values
from moereplay.results.serving import (
    LATENCIES,
    PERCENTILES,
    SETTLED,
    WORDS,
    Holding,
    Level,
    figures,
    shortened,
    slowest,
)
from moereplay.results.settings import EXPERTS, LEADING, OF_CACHE, POLICIES, SETTINGS, bare_names, setting_kinds
from moereplay.traces.schema import Trace
from moereplay.traces.summary import synthetic
from moereplay.traces.texts import counted, digits

Row = Mapping[str, Any]
#: Columns of a machine with lower tiers, and of one whose watts are known.
WHERE_KNOWN = ("gb_lower", "mj_per_token")


def ranking(
    rows: Sequence[Row], by: str = "hit_rate", presets: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return rows sorted by capacity, then best first: identity, settings that vary, columns of `RANKED`, and those of
    `WHERE_KNOWN` that any row has.

    A row is `Result.to_json()` with its `bounds`, or a row of a frame of results. `presets` names rows by their
    identity: a column `preset` then replaces the settings that it fixes. Raises ResultError if `by` is not a ranking
    column.
    """
    table, shown = _sorted(rows, by, presets)
    known = [name for name in WHERE_KNOWN if any(line[name] for line in table)]
    return [{name: line[name] for name in ("identity", *shown, *RANKED, *known)} for line in table]


def judged(
    rows: Sequence[Row], presets: Mapping[str, str] | None = None, foresees: Callable[[Row], bool] = lambda row: False
) -> list[str]:
    """Return the verdict lines below that table (`analysis/verdict.py`).

    `foresees` maps a kind of policy to whether a row's policy knows the future.
    """
    table, shown = _sorted(rows, "hit_rate", presets)
    if len(table) == 1 and table[0]["tokens_per_s"] is not None:
        return []
    from moereplay.analysis.verdict import Entry, lines  # and statistics, which one row does without

    by_identity = {row["about"]["identity"]: row for row in rows}
    names = [name for name in shown if len({line[name] for line in table}) > 1]
    bare = {kind: bare_names({str(line[kind]) for line in table}) for kind in POLICIES}
    entries = [
        Entry(
            line | {kind: known[str(line[kind])] for kind, known in bare.items()},
            line["tokens_per_s"],
            line["hit_rate"],
            partial(by_identity[line["identity"]].__getitem__, "per_request"),
            foresees(line),
            bool(synthetic_of(by_identity[line["identity"]]["about"])),
        )
        for line in table
    ]
    return lines(entries, names)


def best_of_each(rows: Sequence[Row], top: int) -> list[Row]:
    """Return the first `top` rows of each capacity of a ranking; all rows if `top` is 0."""
    taken = Counter[Any]()
    kept = []
    for row in rows:
        taken[row.get("capacity")] += 1
        if not top or taken[row.get("capacity")] <= top:
            kept.append(row)
    return kept


def _sorted(rows: Sequence[Row], by: str, presets: Mapping[str, str] | None) -> tuple[list[dict[str, Any]], list[str]]:
    by = ranking_column(by)
    table: list[dict[str, Any]] = [{**_settings(row), **_figures(row)} for row in rows]
    for line in table if presets else ():
        line["preset"] = (presets or {})[line["identity"]]
    names = dict.fromkeys([*LEADING, *rows[0]["config"], "semantics"])
    shown = [field for field in names if _tells_apart(table, field, bool(presets))]
    shown.sort(key=lambda field: field != "capacity")  # rows are grouped by capacity
    keys = {"capacity_bytes": False, by: RANKED[by], "tpot_ms": False} | dict.fromkeys(shown, False)
    table.sort(key=cmp_to_key(lambda a, b: _compared(a, b, keys)))
    return table, [*(["preset"] if presets else []), *shown]


def _settings(row: Row) -> dict[str, Any]:
    settings = {
        name: " ".join(":".join(map(str, pair)) for pair in value) if isinstance(value, list) else value
        for name, value in row["config"].items()
    }
    return settings | {
        name: row["about"][name] for name in ("model", "trace", "semantics", "identity", "capacity_bytes")
    }


def _figures(row: Row) -> dict[str, float | None]:
    """Return the columns of `RANKED`, times in ms, and of `WHERE_KNOWN`; older results lack lower-tier bytes."""
    bounds = {f"bound_{name}": value for name, value in (row["bounds"] or {}).items()}
    energy = nanojoules(row["about"], row["totals"], row["per_layer"])
    found = values({**row["totals"], **bounds, **energy}, row["per_request"])
    return {name: found[name] for name in (*RANKED, *WHERE_KNOWN)} | {"gb_lower": found["gb_lower"] or 0.0}


def _tells_apart(table: Sequence[Row], field: str, named: bool) -> bool:
    """Return whether a field gets a column. Eviction always does, unless rows have names."""
    varies = len({line[field] for line in table}) > 1
    if not named:
        return field == "eviction" or varies
    within: dict[str, set[Any]] = {}
    for line in table:
        within.setdefault(line["preset"], set()).add(line[field])
    return any(len(values) > 1 for values in within.values()) or (field == "capacity" and varies)


def _compared(one: Row, other: Row, keys: Mapping[str, bool]) -> int:
    """Compare two rows key by key for sorting; True in `keys` sorts larger values first, and None sorts last."""
    for key, falling in keys.items():
        a, b = one[key], other[key]
        if a == b:
            continue
        if a is None or b is None:
            return 1 if a is None else -1
        return -1 if (a > b) == falling else 1
    return 0


# -- Lines above a table of replays: label, trace, platform, capacities in every form, warnings.

#: Settings that are echoed after the policies. Capacity has its own lines, and lists of experts are too long.
OTHERS = [
    setting.name for setting in SETTINGS if setting.name not in (*POLICIES, "capacity") and setting.kind != EXPERTS
]
#: Newer settings, which are not repeated above a table where they have no effect.
QUIET = {setting.name: [str(setting.default)] for setting in SETTINGS if setting.added}

OPEN_LOOP = "open-loop: recorded logits do not react to a changed mixture; a live run measures the error"


def heading(trace: Trace, results: Sequence[Result]) -> list[str]:
    """Return the lines above the table: the replayed trace, and how to read the columns."""
    label = one_label(result.about["label"] for result in results)
    lines = [
        *simulated(trace, label),
        *settings(results),
        *_seconds(results),
        *dict.fromkeys(filter(None, (result.about.get("assumed") for result in results))),
    ]
    return [*lines, *([OPEN_LOOP] if "open-loop" in label else []), ""]


def simulated(trace: Trace, label: str = "SIMULATED") -> list[str]:
    """Return the first lines of a table over one trace: model, size, digest, and a note on synthetic routing."""
    made = synthetic(trace.header.provenance)
    return [f"{with_routing(label, made)}: {of_trace(trace)}", *assumptions([made])]


def of_trace(trace: Trace) -> str:
    """Return the model, size and digest of a trace in words."""
    much = f"{counted(trace.requests, 'request')}, {counted(trace.tokens, 'token')}"
    return f"{trace.header.provenance.model}, {much}, trace {trace.digest[:12]}"


def settings(results: Sequence[Result]) -> list[str]:
    """Return every setting, the capacities in every unit with their warnings, and side buffers."""
    return [
        _echo(results, POLICIES),
        _echo(results, OTHERS),
        *capacities([(result.config, result.about) for result in results]),
        *_each_side_buffer(results),
    ]


def _seconds(results: Sequence[Result]) -> list[str]:
    platforms: dict[str, dict[str, None]] = {}
    for result in results:
        platforms.setdefault(seconds_in_words(result.about), {})[result.config["platform"]] = None
    return [f"seconds of {', '.join(names)}: {of}" for of, names in platforms.items()]


def capacities(cached: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    """Return each capacity in its other units, then each warning once, from (configuration, `about`) pairs."""
    forms = dict.fromkeys((config["capacity"], about["capacity_forms"]) for config, about in cached)
    return [
        *(f"capacity {capacity}: {text.removeprefix(f'{capacity} = ')}" for capacity, text in forms),
        *warnings((config["capacity"], about["warning"]) for config, about in cached),
    ]


def warnings(found: Iterable[tuple[str, str | None]]) -> list[str]:
    """Return each warning once with its capacities, from (capacity, warning) pairs."""
    capacities: dict[str, dict[str, None]] = {}  # a warning can concern one platform only
    for capacity, warning in found:
        if warning:
            capacities.setdefault(warning, {})[capacity] = None
    return [f"warning for {', '.join(texts)}: {warning}" for warning, texts in capacities.items()]


def _each_side_buffer(results: Sequence[Result]) -> list[str]:
    """Return the bytes of each side buffer, which are not part of the capacity."""
    held = {result.about["policies"]["prefetch"]: result.about["side_bytes"] for result in results}
    return [
        f"side buffers of {prefetch}: {size:,} bytes on top of the capacity" for prefetch, size in held.items() if size
    ]


def _echo(results: Sequence[Result], names: Sequence[str]) -> str:
    values = {name: list(dict.fromkeys(str(result.config[name]) for result in results)) for name in names}
    return "; ".join(
        f"{name} {', '.join(each)}" for name, each in values.items() if each not in ([""], QUIET.get(name))
    )


# -- Serving figures: settings that vary, latencies, throughput and goodput


#: Heads of the terminal's table; others are printed with --csv alone.
HEADS = {
    "rate": "rate/s",
    "most_per_s": "max/s",
    "rate_over_resident": "rate / resident",
    **{f"{name}_p{percentile}_ms": f"{WORDS[name]} p{percentile}" for name in LATENCIES for percentile in PERCENTILES},
    "requests_per_s": "req/s",
    "throughput_tokens_per_s": "tok/s all",
    "slo_share": "meet",
    "goodput_per_s": "goodput/s",
    "e2e_over_resident": "e2e / resident",
}
#: Columns that a narrow terminal drops, first to go first.
SPARE = ("TPOT p90", "e2e p90", "TTFT p90", "req/s", "e2e p50", "max/s", "tok/s all", "TPOT p50", "TTFT p50")
MEANING = (
    "TTFT and e2e from arrival, waiting included, in ms; tok/s all, req/s and goodput (requests that meet --slo) per "
    "second from the first arrival to the last end"
)
MEANING_OF_RATES = (
    "rate/s: the largest Poisson rate at which the queue is stable and the SLO holds; max/s: requests that end while "
    "others always wait: above it the queue grows without end. The trace is repeated until rate/s moves by less than "
    f"{SETTLED:.0%} when requests double; the first eighth of a run (cold cache, short queue) is left out"
)
MEANING_ALONE = "above: prefill from the first pass, without waiting; tok/s each of one request, 1 / TPOT"
ALIKE = {1.0}, {0.0}  #: shares of requests that meet a level, if those of all rows are said in a line
RESIDENT = "resident"  #: in place of a capacity: every expert is in the fast tier from the start


def served(results: Sequence[Result], level: Level | None, residents: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a row per result: its capacity, arrivals and settings that vary, then its figures.

    `residents` are the results with every expert in the fast tier, of each result. They have rows below, and each
    row has its median e2e as a multiple of theirs.
    """
    varying = _varying(results)
    rows = [_named(result, varying) | figures(result.per_request, level) for result in results]
    below = [_named(each, varying, RESIDENT) | figures(each.per_request, level) for each in residents]
    for row, resident in zip(rows, below, strict=True):
        row["e2e_over_resident"] = quotient(row["e2e_p50_ms"], resident["e2e_p50_ms"])
    return [*rows, *_unlike(below)]


def served_at(holdings: Sequence[Holding], level: Level, residents: Sequence[Holding]) -> list[dict[str, Any]]:
    """Return a row per search: settings that vary, the largest rate that holds the level, and the figures there.

    The rate is null if none holds. `residents` are as in `served`; each row has its rate as a share of theirs.
    """
    varying = [name for name in _varying([holding.result for holding in holdings]) if name != "arrivals"]
    rows, below = (
        [
            _named(each.result, varying, capacity)
            | {"rate": each.rate, "most_per_s": each.most, "by_queue": each.by_queue, "moved": each.moved}
            | {"settled": each.settled, "replayed": len(each.result.per_request)}
            | figures(each.rows, level)
            for each in found
        ]
        for found, capacity in ((holdings, ""), (residents, RESIDENT))
    )
    for row, resident in zip(rows, below, strict=True):
        row["rate_over_resident"] = quotient(row["rate"], resident["rate"])
    return [*rows, *_unlike(below)]


def _unlike(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows that differ, each once."""
    return list({repr(row): row for row in rows}.values())


def _varying(results: Sequence[Result]) -> list[str]:
    names = [*dict.fromkeys([*LEADING, *setting_kinds()])]
    return [
        name
        for name in names
        if name in results[0].config
        and (name == "capacity" or len({str(result.config[name]) for result in results}) > 1)
    ]


def _named(result: Result, names: Sequence[str], capacity: str = "") -> dict[str, Any]:
    """Return the settings that vary. Where `capacity` replaces a capacity, policies and scope have no effect."""
    known = {name: shortened(str(result.config[name])) for name in names}
    return known | {name: capacity if name == "capacity" else "" for name in known if capacity and name in OF_CACHE}


def served_lines(made: Sequence[dict[str, Any]], level: Level | None, form: str) -> list[str]:
    """Return the lines of a table: of a terminal, or `csv` or `markdown` with all columns."""
    if form:
        return [(csv if form == "csv" else markdown)(made)]
    searched = "rate" in made[0]
    met = {row["slo_share"] for row in made} if level else set()
    columns = [name for name in HEADS if name != "slo_share" or met not in ALIKE]
    shown = [
        {HEADS.get(name, name): value for name, value in row.items() if name in columns or _is_setting(name)}
        for row in made
    ]
    said = [
        MEANING,
        "" if searched else MEANING_ALONE,
        *(_of_level(level, met) if level else []),
        slowest(min(row["requests"] for row in made)),
        f"{RESIDENT}: every expert in fast memory from the start (--capacity 100% --resident all)",
        *([MEANING_OF_RATES, *filter(None, map(_of_rate, made))] if searched else []),
    ]
    return ["", table(shown, spare=SPARE), *map(folded, filter(None, said))]


def _of_level(level: Level, met: set[float]) -> list[str]:
    """Return the level that was given, and the share of requests that meet it if all rows have the same."""
    every = f"every row: {'all' if met == ALIKE[0] else 'no'} requests meet {level.in_words}"
    given = f"SLO: {digits(float(100 * level.share), 4)}% of the requests meet {level.in_words}"
    return [given, every] if met in ALIKE else [given]


def _is_setting(name: str) -> bool:
    return name in setting_kinds()


def _of_rate(row: Mapping[str, Any]) -> str:
    """Return why a row of a search has no rate, or one that is not settled or not limited by the level."""
    where = ", ".join(f"{name} {value}" for name, value in row.items() if _is_setting(name) and value)
    if row["rate"] is None:
        return f"{where}: no rate: requests that run alone do not meet the SLO"
    said = ["limited by throughput, not by the SLO"] if row["by_queue"] else []
    if not row["settled"]:
        moved = "" if row["moved"] is None else f"; rate/s still moved by {row['moved']:.1%}"
        said.append(f"not settled with {row['replayed']:,} requests, the most that are replayed{moved}")
    return f"{where}: {'; '.join(said)}" if said else ""
