"""`moereplay sweep compare`: every configuration beside one, and whether it is better."""

from __future__ import annotations

from typing import Annotated

import typer

from moereplay.commands.terminal import show


def sweep_compare(
    results: Annotated[
        str,
        typer.Argument(help="Folder of `replay --out`; folder or URL of `sweep run` or `merge`.", show_default=False),
    ],
    one: Annotated[str, typer.Argument(help="An id, a policy, or setting=value.", show_default=False)],
    by: Annotated[
        str, typer.Option(help="hit_rate, collisions_per_miss, ttft_mean_ms, tpot_ms or tokens_per_s.")
    ] = "hit_rate",
    where: Annotated[list[str] | None, typer.Option(help="setting=value,value: only these.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="All digits as CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All digits as JSON lines.")] = False,
) -> None:
    """Compare one configuration with each other over the same requests: is it better, yes, no or can't tell? SIMULATED.

    The difference is that of ONE less the row, with its 95 % interval; p_holm is corrected for the number of rows.
    """
    from moereplay.analysis.beside import beside
    from moereplay.analysis.short import SHARES, drawn
    from moereplay.analysis.tables import csv
    from moereplay.policies.grammar import foresight
    from moereplay.results.read import filtered, label_of, routing_of
    from moereplay.results.stored import load
    from moereplay.sweeps.store import place_of
    from moereplay.traces.documents import json_text

    frame = filtered(load(place_of(results).local()), where or [])
    found = beside(frame, one, by, foresight())
    if as_csv or as_json:
        print(csv(found.rows) if as_csv else "\n".join(map(json_text, found.rows)))
        return
    shown = [row | {name: _signed(row[name], by, sign) for name, sign in SIGNS.items()} for row in found.rows]
    unit = f"{by} (differences in points)" if by in SHARES else by
    asked = f"{label_of(frame)}: is {found.one} better by {unit} than each of these?"
    show(asked, *routing_of(frame), "", *drawn(shown), *found.remarks)


#: Columns in the figure's unit, and the sign of what is positive.
SIGNS = {"difference": "+", "low": "+", "high": "+", "half_width": ""}


def _signed(value: float | None, by: str, sign: str = "+") -> str:
    """A share in points, anything else in its unit."""
    from moereplay.analysis.short import SHARES
    from moereplay.analysis.tables import cell

    if value is None:
        return "-"
    if by in SHARES:
        return f"{100 * value:{sign}.2f}"
    return f"{'+' if sign and value > 0 else ''}{cell(value)}"
