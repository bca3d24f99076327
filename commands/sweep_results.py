"""`moereplay sweep show` prints stored results; `sweep compare` compares one configuration with the others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import polars as pl
import typer

from moereplay.analysis.beside import beside
from moereplay.analysis.checks import candidates_of, check_columns, in_short, summary
from moereplay.analysis.forecast import forecast_columns, nested
from moereplay.analysis.metrics import averaged, judged, ranked, shared, with_latencies
from moereplay.analysis.metrics import grouped as means
from moereplay.analysis.tables import SHARES, cell, csv, drawn, latex, markdown
from moereplay.commands.options import By, Where, grouped
from moereplay.commands.quality import Foreseen
from moereplay.commands.terminal import say, show
from moereplay.policies.grammar import deciding, foresight
from moereplay.results import checks
from moereplay.results.errors import unknown
from moereplay.results.files import csv_text
from moereplay.results.read import label_of, routing_of, seconds_of
from moereplay.results.remarks import bracketed
from moereplay.results.settings import POLICIES
from moereplay.results.stored import REQUESTS, errors, load
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.parts import READERS, all_of
from moereplay.sweeps.store import place_of
from moereplay.traces.documents import json_text
from moereplay.traces.texts import counted

Results = Annotated[
    str,
    typer.Argument(help="Folder of `replay --out`, or folder or URL of `sweep run` or `merge`.", show_default=False),
]


class Form(NamedTuple):
    """Form of the rows, if not a table."""

    as_csv: Annotated[bool, typer.Option("--csv", help="Print all rows as CSV.")] = False
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the rows as a Markdown table.")] = False
    as_latex: Annotated[bool, typer.Option("--latex", help="Print the rows as a LaTeX table, with intervals.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print all rows as JSON lines.")] = False

    @property
    def has_ends(self) -> bool:
        """Whether it shows intervals."""
        return self.as_csv or self.as_json or self.as_latex


@grouped
def sweep_show(
    results: Results,
    by: By = "hit_rate",
    top: Annotated[int, typer.Option(min=1, help="Maximum number of rows.")] = 20,
    where: Where = None,
    group_by: Annotated[
        str, typer.Option(help="Print means over groups: comma list of settings; models stay apart.")
    ] = "",
    errors: Annotated[
        bool, typer.Option("--errors", help="List configurations without a result, with the reason.")
    ] = False,
    table: Annotated[
        str, typer.Option(help="With --csv or --json: print all counters of runs, layers, requests or request_layers.")
    ] = "",
    brief: Annotated[bool, typer.Option("--brief", help="Print only the best configuration and its lead.")] = False,
    *,
    foreseen: Foreseen,
    form: Form,
) -> None:
    """Print stored results: settings that vary, and metrics to rank by. SIMULATED."""
    folder = place_of(results).local()
    if table:
        _print_all(_counters(folder, table, where or [], form, group_by), form.as_json)
        return
    page = _failed(folder) if errors else _found(folder, by, where or [], group_by, foreseen, form.has_ends)
    if form.as_csv or form.as_json:
        _print_all(page.rows, form.as_json)
        return
    if brief:
        show(*page.brief, *(page.best or ["nothing to compare: one configuration, or means of groups"]))
        return
    shown = in_short(page.rows.head(top).to_dicts())
    if form.as_markdown:
        print(markdown(shown))
    elif form.as_latex:
        print(latex(shown, page.heading))
    else:
        show(*page.heading, "", *drawn(shown), *page.checked, *page.best)
    if len(page.rows) > top:
        say(f"{top} of {len(page.rows):,} rows; --top for more")


def _counters(folder: Path, name: str, where: Sequence[str], form: Form, group_by: str) -> pl.DataFrame:
    """Return a table of counters. Raises ResultError or ConfigError."""
    if name not in READERS:
        raise unknown("table", name, READERS)
    if group_by:
        raise ConfigError("--table cannot be combined with --group-by")
    if not (form.as_csv or form.as_json):
        raise ConfigError("--table requires --csv or --json")
    found = READERS[name](load(folder, where, all_of(name)))
    return found.select(column for column, kind in found.schema.items() if not kind.is_nested())


class _Page(NamedTuple):
    """Parts of the output for a folder."""

    rows: pl.DataFrame
    heading: Sequence[str]
    brief: Sequence[str] = ()  #: heading of --brief
    checked: Sequence[str] = ()  #: the kind of bound, and errors of replays that were checked
    best: Sequence[str] = ()


def _failed(folder: Path) -> _Page:
    rows = errors(folder).select("identity", *POLICIES, "capacity", "error")
    return _Page(rows, [f"{counted(len(rows), 'configuration')} without a result"])


def _found(folder: Path, by: str, where: Sequence[str], group_by: str, foreseen: Foreseen, ends: bool) -> _Page:
    frame, said = foreseen.with_forecasts(load(folder, where, REQUESTS))
    ranking, found = with_latencies(ranked(frame, by, ends and not group_by), frame, ends), checks.load(folder)
    heading = f"{label_of(frame)}: {counted(len(frame), 'configuration')}; seconds: {seconds_of(frame)}"
    groups = [name.strip() for name in group_by.split(",")] if group_by else []
    if over := averaged(frame, groups) if groups else "":
        said = [*said, over]
    return _Page(
        rows=means(frame, groups, by) if groups else forecast_columns(check_columns(ranking, found), frame),
        heading=[heading, *routing_of(frame), shared(frame), *said, f"best {by} first"],
        brief=[heading, *routing_of(frame)],
        checked=[
            *bracketed(frame.select("bounds").iter_rows(named=True)),
            *(summary(found, candidates_of(frame)) if found else []),
        ],
        best=[] if group_by else judged(frame, foresight()),
    )


def _print_all(rows: pl.DataFrame, as_json: bool) -> None:
    if not as_json:
        sys.stdout.write(csv_text(rows))
        return
    for row in rows.iter_rows(named=True):
        print(json_text(nested(row)))


# -- sweep compare


def sweep_compare(
    results: Results,
    one: Annotated[
        str,
        typer.Argument(help="Configuration to compare: an identity, a policy, or setting=value.", show_default=False),
    ],
    by: Annotated[
        str, typer.Option(help="Metric: hit_rate, collisions_per_miss, ttft_mean_ms, tpot_ms or tokens_per_s.")
    ] = "hit_rate",
    where: Where = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, with all digits.")] = False,
    as_latex: Annotated[bool, typer.Option("--latex", help="Print a LaTeX table, with intervals.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines, with all digits.")] = False,
) -> None:
    """Compare one configuration with each of the others over the same requests. SIMULATED.

    A difference is ONE minus the row, with its 95 % CI; p_holm is corrected for the number of rows.
    """
    frame = load(place_of(results).local(), where or [], REQUESTS | {"layers": ("layer",)})
    found = beside(frame, one, by, foresight(), deciding())
    if as_csv or as_json:
        print(csv(found.rows) if as_csv else "\n".join(map(json_text, found.rows)))
        return
    unit = f"{by} (differences in points)" if by in SHARES else by
    asked = f"{label_of(frame)}: is {found.one} better by {unit} than each of these?"
    if as_latex:
        print(latex(found.rows, [asked, *routing_of(frame)], (*SHARES, *(by in SHARES) * ("difference",))))
        return
    shown = [row | {name: _signed(row[name], by, sign) for name, sign in SIGNS.items()} for row in found.rows]
    show(asked, *routing_of(frame), "", *drawn(shown), *found.remarks)


#: Columns in the unit of the metric, and the sign of positive values.
SIGNS = {"difference": "+", "low": "+", "high": "+", "half_width": ""}


def _signed(value: float | None, by: str, sign: str = "+") -> str:
    """Format a share in points, other values in their unit."""
    if value is None:
        return "-"
    if by in SHARES:
        return f"{100 * value:{sign}.2f}"
    return f"{'+' if sign and value > 0 else ''}{cell(value)}"
