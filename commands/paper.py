"""`moereplay paper`: the figures and tables of a paper, replayed from traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moereplay.commands.options import CORES
from moereplay.commands.terminal import keeping, say, say_when_compiling, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

    from moereplay.sweeps.papers.figures import PaperFigure, Planned
    from moereplay.traces.schema import Trace

MOST_ROWS = 32  #: of a figure's table on the terminal; files have all


def _bundled(paths: list[Path] | None) -> list[Path] | None:
    from moereplay.traces.installation import bundled

    return paths and [*map(bundled, paths)]


class Each(NamedTuple):
    """A figure on a trace: which cells it can have there."""

    trace: Trace
    planned: Planned


class Pages(NamedTuple):
    """What all figures of a run share."""

    out: Path
    frame: pl.DataFrame  #: every result in `out`
    published: bool
    live: Sequence[dict[str, Any]]  #: documents of `live --json`


def paper(
    name: Annotated[str, typer.Argument(help="specmd, cache-conditional.", show_default=False)],
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TRACE...", help="Trace folders, or `miniature`.", callback=_bundled),
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="Folder for pictures, numbers and results, which are resumed.")] = Path(
        "runs/paper"
    ),
    figure: Annotated[str, typer.Option(help="Comma list; default all that the traces allow.")] = "",
    listed: Annotated[bool, typer.Option("--list", help="Say which there are and what they need.")] = False,
    published: Annotated[bool, typer.Option("--published", help="The paper's numbers beside ours.")] = False,
    live: Annotated[
        list[Path] | None, typer.Option(help="JSON of `live --json`: perplexity beside the replays.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Replays at once.")] = CORES,
) -> None:
    """Replay a paper's figures and tables from any trace: a picture, a CSV and a table of each. SIMULATED."""
    from moereplay.results.outputs import check_output
    from moereplay.results.stored import load
    from moereplay.simulator.errors import ConfigError
    from moereplay.sweeps.papers.figures import figures_of
    from moereplay.traces.store import open_trace

    figures = figures_of(name, figure)
    if listed:
        show(*_lines(figures))
        return
    if not traces:
        raise ConfigError(
            f"which trace? Give one or more: moereplay paper {name} miniature; --list says what they need"
        )
    check_output(out / "part")
    opened, measured = [open_trace(path) for path in traces], [_document(path) for path in live or ()]
    each = _possible(figures, opened)
    if not any(each.values()):
        raise ConfigError(f"these traces allow none of {', '.join(each)}; --list says what each needs")
    _replay(out, [one for found in each.values() for one in found], workers)
    pages = Pages(out, load(out), published, measured)
    for one in figures:
        if each[one.name]:
            _write(pages, one, each[one.name])
    say(f"wrote {out}/, of each figure the picture as PNG and SVG, and its numbers as CSV")


def _lines(figures: Sequence[PaperFigure]) -> list[str]:
    """A figure's name, source and needs, then what it shows."""
    from moereplay.analysis.tables import definitions

    pairs = []
    for one in figures:
        pairs += [(one.name, f"{one.where}: {one.title}"), ("", f"  needs: {', '.join(sorted(one.needs)) or 'ids'}")]
        pairs += [("", f"  assumed: {one.assumed}")] if one.assumed else []
    throughout = dict.fromkeys(one.throughout for one in figures if one.throughout)
    return [*definitions(pairs), *(f"all: {text}" for text in throughout)]


def _document(path: Path) -> dict[str, Any]:
    """What `live --json` printed. Raises ConfigError naming the file if it is something else."""
    from moereplay.simulator.errors import ConfigError
    from moereplay.traces.documents import DocumentError, content, from_json

    try:
        found = from_json(content(path))
        return {name: found[name] for name in ("config", "about", "quality")}
    except (OSError, DocumentError, KeyError, TypeError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--live {path}: {said}; expected the output of: moereplay live MODEL --json") from None


def _possible(figures: Sequence[PaperFigure], traces: Sequence[Trace]) -> dict[str, list[Each]]:
    """Each figure on the traces that allow it; says of the others, and of cells that are left out, why."""
    from moereplay.simulator.remarks import adapted
    from moereplay.sweeps.papers.figures import LackingError, planned

    able: dict[str, list[Each]] = {figure.name: [] for figure in figures}
    left_out: dict[str, list[str]] = {}
    for trace in traces:
        of = trace.header.provenance.model
        for figure in figures:
            try:
                each = Each(trace, planned(figure, trace))
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
    """What is not stored yet, trace by trace."""
    from moereplay.analysis.tables import counted
    from moereplay.commands.progress import progress
    from moereplay.sweeps.papers.figures import replay_into, work

    say_when_compiling()
    traces = {each.trace.digest: each.trace for each in found}
    with keeping(lambda: f"what was replayed is kept in {out}; the same command goes on"):
        for digest, trace in traces.items():
            configs = [cell.config for each in found if each.trace.digest == digest for cell in each.planned.cells]
            left, stored = work(out, trace, configs)
            say(f"{trace.header.provenance.model}: {counted(len(left), 'replay')} to do, {stored:,} stored already")
            with progress(len(left), "replays") as advance:
                replay_into(out, trace, left, workers, advance)


def _write(pages: Pages, figure: PaperFigure, found: Sequence[Each]) -> None:
    """The picture, the numbers, and the table."""
    from moereplay.analysis.figures import save
    from moereplay.analysis.papers.page import Text, page
    from moereplay.analysis.papers.rows import beside, published_frame, rows_of, write_csv
    from moereplay.results.read import routing_of
    from moereplay.results.result import ResultError

    out = pages.out
    rows = rows_of(pages.frame, figure.chart, [cell for each in found for cell in _cells(each)], pages.live)
    given = [mark for each in found for mark in _marks(figure, each.trace)] if pages.published else []
    marks = published_frame(given, rows)
    numbers = beside(rows, figure.chart, marks)
    write_csv(out / f"{figure.name}.csv", numbers)
    _show(figure, numbers, routing_of(pages.frame))
    try:
        drawn = page(figure.chart, Text(figure.heading, figure.note), rows, marks)
    except ResultError as refused:
        say(f"not drawn: {figure.name}: {refused}")
        return
    save(drawn, out / figure.name)


def _cells(each: Each) -> list[dict[str, Any]]:
    """Where each replay stands in the figure, for `rows_of`."""
    trace = each.trace
    return [
        {"identity": cell.config.identity(trace), "series": cell.series, "x": cell.x, "panel": cell.panel}
        for cell in each.planned.cells
    ]


def _marks(figure: PaperFigure, trace: Trace) -> list[dict[str, Any]]:
    """The paper's numbers beside those of a trace: of its model, or of all."""
    from moereplay.sweeps.papers.figures import of_model

    model = trace.header.provenance.model
    place = {"model": model, "trace": trace.digest}
    return [mark._asdict() | {"of": mark.model or "not said"} | place for mark in of_model(figure.published, model)]


def _show(figure: PaperFigure, numbers: pl.DataFrame, routing: list[str]) -> None:
    from moereplay.analysis.papers.rows import printed

    title = f"{figure.where}: {figure.title}"
    if len(numbers) > MOST_ROWS:
        show(f"{title}: {len(numbers):,} rows in {figure.name}.csv", *routing, "")
    else:
        show(*routing, printed(numbers, title))
