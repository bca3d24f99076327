"""`moereplay sweep compare`: every configuration beside one, and whether it is better."""

from __future__ import annotations

from typing import Annotated

import typer

from commands.terminal import show


def sweep_compare(
    results: Annotated[
        str,
        typer.Argument(help="Folder of `replay --out`; folder or URL of `sweep run` or `merge`.", show_default=False),
    ],
    one: Annotated[str, typer.Argument(help="An id, a policy, or setting=value.", show_default=False)],
    by: Annotated[str, typer.Option(help="hit_rate, collisions_per_miss, tpot_ms or tokens_per_s.")] = "hit_rate",
    where: Annotated[list[str] | None, typer.Option(help="setting=value,value: only these.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="All digits as CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All digits as JSON lines.")] = False,
) -> None:
    """Compare each configuration with one over the same requests: better, yes, no, or can't tell. SIMULATED."""
    from analysis.beside import beside
    from analysis.short import drawn
    from analysis.tables import counted, csv
    from results.read import filtered, label_of, routing_of
    from results.stored import load
    from sweeps.store import place_of
    from traces.documents import json_text

    frame = filtered(load(place_of(results).local()), where or [])
    rows = beside(frame, one, by)
    if as_csv or as_json:
        print(csv(rows) if as_csv else "\n".join(map(json_text, rows)))
        return
    shown = [row | {"difference": _signed(row["difference"], by), "±": _signed(row["±"], by, "")} for row in rows]
    asked = f"{label_of(frame)}: {counted(len(rows), 'configuration')} beside {one}, better by {by}?"
    show(asked, *routing_of(frame), *drawn(shown))


def _signed(value: float | None, by: str, sign: str = "+") -> str:
    """A share in points, anything else in its unit."""
    from analysis.short import SHARES
    from analysis.tables import cell

    if value is None:
        return "unknown"
    if by in SHARES:
        return f"{100 * value:{sign}.2f} points"
    return f"{'+' if sign and value > 0 else ''}{cell(value)}"
