"""Rankings as a terminal shows them: short heads, shares in percent, and what the heads mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis.tables import Share, folded, table

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
}
SHARES = ("hit_rate", "belady_hit_rate", "compulsory_limit", "collisions_per_miss")
#: What may be left out, first to go first.
SPARE = ("id", "limit", "GB lower", "GB", "coll", "tok/s", "belady")
LEGEND = (
    "belady, limit: the most hits of any eviction, of any cache, without prefetch",
    "coll: misses of what the same pass evicted; TTFT, TPOT in ms; --csv: all digits",
)
DIGITS = 8  #: of an identity


def drawn(rows: Sequence[Mapping[str, Any]], width: int = 0) -> list[str]:
    """A ranking as a table, and its legend."""
    legend = LEGEND if rows and "belady_hit_rate" in rows[0] else ()
    shown = table([_short(row) for row in rows], spare=SPARE, width=width)
    legend = [line for line in legend if not line.startswith("coll:") or " coll " in shown.partition("─")[0]]
    return [*filter(None, [shown.rstrip("\n") and shown]), *(folded(line, width) for line in legend)]


def _short(row: Mapping[str, Any]) -> dict[str, object]:
    return {HEADS.get(name, name): _value(name, value) for name, value in row.items()}


def _value(name: str, value: Any) -> object:
    if name in SHARES and value is not None:
        return Share(value)
    return str(value)[:DIGITS] if name == "identity" else value
