"""Rankings as a terminal shows them: short heads, shares in percent, and what the heads mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moereplay.analysis.tables import Share, folded, table

#: Columns of what is forecast.
FORECAST = {name: f"forecast {name}" for name in ("loss", "low", "high")}
#: Columns of a ranking by their heads; the whole names are in files, --csv and --json.
HEADS = {
    "identity": "id",
    "hit_rate": "hit",
    "belady_hit_rate": "belady",
    "compulsory_limit": "limit",
    "collisions_per_miss": "coll",
    "ttft_mean_ms": "TTFT",
    "tpot_ms": "TPOT",
    "tokens_per_s": "tok/s",
    "gb_moved": "GB",
    "gb_lower": "GB lower",
    FORECAST["low"]: "low",
    FORECAST["high"]: "high",
}
SHARES = ("hit_rate", "belady_hit_rate", "compulsory_limit", "collisions_per_miss", *FORECAST.values())
#: What may be left out, first to go first.
SPARE = (
    "id",
    "half_width",
    "better_on",
    "requests",
    "limit",
    "GB lower",
    "GB",
    "coll",
    "tok/s",
    "belady",
    "low",
    "high",
)
#: What heads mean, each line for a table that has its first.
LEGEND = {
    "belady": "belady, limit: the most hits of any eviction, of any cache, without prefetch",
    "coll": "coll: misses of what the same pass evicted",
    "TPOT": "TTFT, TPOT in ms; --csv: all digits",
}
DIGITS = 8  #: of an identity


def drawn(rows: Sequence[Mapping[str, Any]], width: int = 0) -> list[str]:
    """A ranking as a table, and its legend."""
    shown = table([_short(row) for row in rows], spare=SPARE, width=width)
    return [*([shown] if rows else []), *(folded(line, width) for line in _legend(rows, shown))]


def _legend(rows: Sequence[Mapping[str, Any]], shown: str) -> list[str]:
    """What the heads of a ranking mean, of columns that are in the table or said above it."""
    if not rows or "belady_hit_rate" not in rows[0]:
        return []
    above = shown.partition("─")[0].split()
    said = [text for head, text in LEGEND.items() if head in above]
    return [*said[:-2], "; ".join(said[-2:])] if "coll" in above else said


def _short(row: Mapping[str, Any]) -> dict[str, object]:
    return {HEADS.get(name, name): _value(name, value) for name, value in row.items()}


def _value(name: str, value: Any) -> object:
    if name in SHARES and value is not None:
        return Share(value)
    return str(value)[:DIGITS] if name == "identity" else value
