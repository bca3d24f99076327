"""`moereplay paper`: reproduce the figures and tables of a paper from traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import polars as pl
import typer

from moereplay.analysis.papers.rows import beside, printed, published_frame, rows_of, with_published, write_csv
from moereplay.analysis.tables import definitions
from moereplay.commands.options import CORES, OfPaper, grouped
from moereplay.commands.terminal import keeping, progress, say, say_when_compiling, show
from moereplay.results.errors import ResultError, check_output
from moereplay.results.read import routing_of
from moereplay.results.stored import load
from moereplay.simulator.bounds import adapted
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps import extra
from moereplay.sweeps.papers import (
    LAST_LAYER,
    LackingError,
    PaperFigure,
    Planned,
    figures_of,
    of_model,
    planned,
    replay_into,
    work,
)
from moereplay.traces.documents import DocumentError, content, from_json
from moereplay.traces.files import bundled
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace
from moereplay.traces.texts import counted

MOST_ROWS = 32  #: maximum number of rows in a printed table; files have all rows


def _bundled(paths: list[Path] | None) -> list[Path] | None:
    return paths and [*map(bundled, paths)]


class Each(NamedTuple):
    """A figure on a trace, with the cells that the trace allows."""

    trace: Trace
    planned: Planned


class Pages(NamedTuple):
    """Data that all figures of a run share."""

    out: Path
    frame: pl.DataFrame  #: every result in `out`
    published: bool
    live: Sequence[dict[str, Any]]  #: documents of `live --json`


@grouped
def paper(
    name: Annotated[str, typer.Argument(help="Paper: specmd or cache-conditional.", show_default=False)],
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TRACE...", help="Trace folders, or `miniature`.", callback=_bundled),
    ] = None,
    *,
    out: Annotated[
        Path, typer.Option(help="Folder for pictures, numbers and results; a rerun continues in it.")
    ] = Path("runs/paper"),
    figure: Annotated[str, typer.Option(help="Comma list of figures (default: all that the traces allow).")] = "",
    listed: Annotated[bool, typer.Option("--list", help="List the figures and their requirements.")] = False,
    published: Annotated[bool, typer.Option("--published", help="Show the published numbers too.")] = False,
    live: Annotated[
        list[Path] | None, typer.Option(help="Output of `live --json`, for its perplexity (repeatable).")
    ] = None,
    settings: OfPaper,
    workers: Annotated[int, typer.Option(help="Number of parallel replays.")] = CORES,
) -> None:
    """Reproduce a paper's figures and tables from any trace: a picture, a CSV and a table each. SIMULATED."""
    figures = figures_of(name, figure)
    if listed:
        show(*_lines(figures))
        return
    if not traces:
        raise ConfigError(
            f"missing trace: pass one or more, such as moereplay paper {name} miniature; --list shows the requirements"
        )
    extra("plot", "matplotlib")
    check_output(out / "part")
    opened, measured = [open_trace(path) for path in traces], [_document(path) for path in live or ()]
    each = _possible(figures, opened, {kind: text for kind, text in settings.lists().items() if text})
    if not any(each.values()):
        raise ConfigError(f"these traces allow none of {', '.join(each)}; --list shows the requirements")
    _replay(out, [one for found in each.values() for one in found], workers)
    pages = Pages(out, load(out), published, measured)
    for one in figures:
        if each[one.name]:
            _write(pages, one, each[one.name])
    say(f"wrote {out}/: each figure as PNG and SVG, with its numbers as CSV")


def _lines(figures: Sequence[PaperFigure]) -> list[str]:
    """Return lines with the name, source, requirements and contents of figures."""
    pairs = []
    for one in figures:
        pairs += [(one.name, f"{one.where}: {one.title}"), ("", f"  needs: {', '.join(sorted(one.needs)) or 'ids'}")]
        pairs += [("", f"  assumed: {one.assumed}")] if one.assumed else []
    throughout = dict.fromkeys(one.throughout for one in figures if one.throughout)
    return [*definitions(pairs), *(f"all: {text}" for text in throughout)]


def _document(path: Path) -> dict[str, Any]:
    """Read the output of `live --json`. Raises ConfigError naming the file."""
    try:
        found = from_json(content(path))
        return {name: found[name] for name in ("config", "about", "quality")}
    except (OSError, DocumentError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--live {path}: {reason}: expected the output of: moereplay live MODEL --json") from None


def _possible(
    figures: Sequence[PaperFigure], traces: Sequence[Trace], given: Mapping[str, str]
) -> dict[str, list[Each]]:
    """Plan each figure, with the settings given, on the traces that allow it. Print why others are left out."""
    able: dict[str, list[Each]] = {figure.name: [] for figure in figures}
    left_out: dict[str, list[str]] = {}
    for trace in traces:
        of = trace.header.provenance.model
        for figure in figures:
            try:
                each = Each(trace, planned(figure, trace, given))
            except LackingError as lacking:
                left_out.setdefault(f"not drawn of {of}, as it {lacking}", []).append(figure.name)
                continue
            able[figure.name].append(each)
            for note in adapted(trace, [cell.config for cell in each.planned.cells]):
                left_out.setdefault(f"{of}: {note}", []).append(figure.name)
            for series, reason in each.planned.left_out.items():
                left_out.setdefault(f"{of} without {series}, as {reason}", []).append(figure.name)
    for reason, names in left_out.items():
        say(f"{', '.join(names)}: {reason}")
    return able


def _replay(out: Path, found: Sequence[Each], workers: int) -> None:
    """Run the replays that are not stored yet, trace by trace."""
    say_when_compiling()
    traces = {each.trace.digest: each.trace for each in found}
    with keeping(lambda: f"finished replays are kept in {out}; run the same command to resume"):
        for digest, trace in traces.items():
            configs = [cell.config for each in found if each.trace.digest == digest for cell in each.planned.cells]
            left, stored = work(out, trace, configs)
            say(f"{trace.header.provenance.model}: {counted(len(left), 'replay')} to do, {stored:,} stored already")
            with progress(len(left), "replays") as advance:
                replay_into(out, trace, left, workers, advance)


def _write(pages: Pages, figure: PaperFigure, found: Sequence[Each]) -> None:
    """Write picture and numbers, and print the table."""
    from moereplay.analysis.figures.catalogue import save
    from moereplay.analysis.figures.facets import covered, joined
    from moereplay.analysis.papers.page import Text, page

    out = pages.out
    rows = rows_of(pages.frame, figure.chart, [cell for each in found for cell in _cells(each)], pages.live)
    drawn_of = pages.frame.filter(pl.col("about").struct.field("identity").is_in(rows["identity"].implode()))
    phases = covered(drawn_of) if figure.chart.per == "layer" else ""
    given = [mark for each in found for mark in _marks(figure, each.trace)] if pages.published else []
    marks = published_frame(given, rows)
    numbers = beside(rows, figure.chart, marks)
    write_csv(out / f"{figure.name}.csv", numbers)
    _show(figure, numbers, routing_of(pages.frame))
    try:
        drawn = page(figure.chart, Text(figure.heading, joined(phases, figure.note)), rows, marks)
    except ResultError as refused:
        say(f"not drawn: {figure.name}: {refused}")
        return
    save(drawn, out / figure.name)


def _cells(each: Each) -> list[dict[str, Any]]:
    """Return the position of each replay in the figure, for `rows_of`."""
    trace = each.trace
    return [
        {"identity": cell.config.identity(trace), "series": cell.series, "x": cell.x, "panel": cell.panel}
        | {"stored_bits": trace.geometry.expert_bits}
        for cell in each.planned.cells
    ]


def _marks(figure: PaperFigure, trace: Trace) -> list[dict[str, Any]]:
    """Return the published numbers for the model of a trace, or for all models."""
    model = trace.header.provenance.model
    place = {"model": model, "trace": trace.digest}
    at: dict[Any, int] = {LAST_LAYER: trace.geometry.layers - 1}
    found = of_model(figure.published, model)
    return [mark._asdict() | {"of": mark.model or "not stated", "x": at.get(mark.x, mark.x)} | place for mark in found]


def _show(figure: PaperFigure, numbers: pl.DataFrame, routing: list[str]) -> None:
    """Print the table; of a long one, the rows with published numbers."""
    title = f"{figure.where}: {figure.title}"
    if len(numbers) > MOST_ROWS:
        title, numbers = f"{title}: {counted(len(numbers), 'row')} in {figure.name}.csv", with_published(numbers)
    show(*routing, *([printed(numbers, title)] if len(numbers) else [title, ""]))
