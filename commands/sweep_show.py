"""`moereplay sweep show`: the best configurations of a sweep, or means over groups of them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from commands.terminal import say, show

if TYPE_CHECKING:
    import polars as pl


def sweep_show(
    results: Annotated[
        str, typer.Argument(help="Folder or URL that `sweep run` or `sweep merge` wrote.", show_default=False)
    ],
    by: Annotated[str, typer.Option(help="hit_rate, ttft_mean_ms, tpot_ms, gb_moved, ...: best first.")] = "hit_rate",
    top: Annotated[int, typer.Option(min=1, help="Rows.")] = 20,
    where: Annotated[list[str] | None, typer.Option(help="setting=value,value: only these.")] = None,
    group_by: Annotated[str, typer.Option(help="Comma list of settings: the mean of each group.")] = "",
    errors: Annotated[bool, typer.Option("--errors", help="The configurations without a result, and why.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="All rows as CSV.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="The rows as a Markdown table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All rows as JSON lines.")] = False,
) -> None:
    """Show what a sweep found: what varies, and the figures by which it can be ranked. SIMULATED."""
    from analysis.checks import columns, in_short, summary
    from analysis.metrics import grouped, judged, ranked, shared
    from analysis.short import drawn
    from analysis.tables import counted, markdown
    from policies.grammar import foresight
    from results import checks, stored
    from results.read import filtered, label_of, seconds_of
    from results.settings import POLICIES
    from sweeps.store import place_of

    folder = place_of(results).local()
    checked, best = [], []
    if errors:
        rows = stored.errors(folder).select("identity", *POLICIES, "capacity", "error")
        heading = [f"{counted(len(rows), 'configuration')} without a result"]
    else:
        frame = filtered(stored.load(folder), where or [])
        found = checks.load(folder)
        ranking = ranked(frame, by)
        rows = grouped(frame, group_by.split(","), by) if group_by else columns(ranking, found)
        checked = summary([each for each in found if each.identity in set(ranking["identity"])], len(frame))
        best = [] if group_by else judged(frame, foresight())
        heading = [
            f"{label_of(frame)}: {counted(len(frame), 'configuration')}, best {by} first",
            shared(frame),
            f"seconds: {seconds_of(frame)}",
        ]
    if as_csv or as_json:
        _print_all(rows, as_json)
        return
    shown = in_short(rows.head(top).to_dicts())
    if as_markdown:
        print(markdown(shown))
    else:
        show(*heading, "", *drawn(shown), *checked, *best)
    if len(rows) > top:
        say(f"{top} of {len(rows):,} rows; --top for more")


def _print_all(rows: pl.DataFrame, as_json: bool) -> None:
    if not as_json:
        sys.stdout.write(rows.write_csv())
        return
    for row in rows.iter_rows(named=True):
        print(json.dumps(row))
