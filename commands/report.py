"""`moereplay report`: results as one HTML page that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moereplay.commands.terminal import say

if TYPE_CHECKING:
    import polars as pl

    from moereplay.analysis.report.material import Material, Source
    from moereplay.simulator.config import ReplayConfig
    from moereplay.traces.schema import Trace


def report(
    results: Annotated[
        str,
        typer.Argument(
            help="Folder of `replay` or `curve --out`; folder or URL of `sweep run` or `merge`.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="The page, one file.")] = Path("report.html"),
    trace: Annotated[
        list[Path] | None, typer.Option(help="A trace of the results that has moved; may be given again.")
    ] = None,
    where: Annotated[list[str] | None, typer.Option(help="setting=value,value: only these replays.")] = None,
) -> None:
    """Write a page to send to somebody: which configuration is best, how sure that is, figures, methods. SIMULATED."""
    from moereplay.results.outputs import check_output
    from moereplay.sweeps import extra
    from moereplay.sweeps.store import place_of
    from moereplay.traces.files import write_whole

    check_output(out)
    for package in ("jinja2", "vl_convert"):
        extra("report", package)
    from moereplay.analysis.report.page import page

    folder = place_of(results).local()
    text = page(_material(folder, trace or [], where or []))
    write_whole(out, text.encode("utf-8", "backslashreplace"))
    say(f"wrote {out}: {len(text) / 1e6:.1f} MB, which any browser opens; nothing is loaded from elsewhere")


def _material(folder: Path, given: Sequence[Path], where: Sequence[str]) -> Material:
    from moereplay.analysis.report.material import Material
    from moereplay.policies.grammar import foresight
    from moereplay.results import checks, curves
    from moereplay.results.stored import errors, sources
    from moereplay.sweeps.parts import version

    lines = curves.load(folder)
    alone = not lines.is_empty() and not any(folder.glob("part-*"))
    frame = _nothing() if alone else _rows(folder, where)
    provenances = [dict(each.provenance) for each in sources(folder)]
    traces = _traces(_digests(frame, lines if alone else None), provenances, given)
    return Material(
        frame=frame,
        curves=lines,
        failed=0 if alone else len(errors(folder)),
        checks=_of(checks.load(folder), frame),
        provenances=provenances,
        sources=traces,
        remarks=_remarks(frame, traces),
        foresees=foresight(),
        version=version("moereplay") or "of no installed version",
    )


def _nothing() -> pl.DataFrame:
    import polars as pl

    return pl.DataFrame()


def _rows(folder: Path, where: Sequence[str]) -> pl.DataFrame:
    from moereplay.results.read import filtered
    from moereplay.results.stored import load

    return filtered(load(folder), where)


def _digests(frame: pl.DataFrame, curves: pl.DataFrame | None) -> list[str]:
    """The traces of the rows."""
    if curves is not None:
        return curves["trace"].unique().sort().to_list()
    return sorted({about["trace"] for about in frame["about"].to_list()})


def _of(found: Sequence[Any], frame: pl.DataFrame) -> list[Any]:
    """The checks of these rows."""
    known = set() if frame.is_empty() else {about["identity"] for about in frame["about"].to_list()}
    return [check for check in found if check.identity in known]


def _traces(
    digests: Sequence[str], provenances: Sequence[Mapping[str, Any]], given: Sequence[Path]
) -> dict[str, Source]:
    """Each trace where the results say that it lies, or where the user says; none of another digest."""
    from moereplay.results.result import ResultError
    from moereplay.traces.store import open_trace

    moved = {opened.digest: (path, opened) for path in given for opened in [open_trace(path)]}
    if foreign := [path for digest, (path, _) in moved.items() if digest not in digests]:
        known = ", ".join(digest[:12] for digest in digests)
        raise ResultError(f"--trace {foreign[0]} is no trace of these results; theirs have the digests {known}")
    stored = {digest: path for one in provenances for digest, path in dict(one.get("traces") or {}).items()}
    return {digest: _source(digest, stored.get(digest, ""), moved.get(digest)) for digest in digests}


def _source(digest: str, path: str, moved: tuple[Path, Trace] | None) -> Source:
    """A page goes to other people, so it names a trace without the folders of this machine."""
    from moereplay.analysis.report.material import Source
    from moereplay.traces.bundled import SAMPLE, bundled, name_of

    if moved is not None:
        return Source(moved[0].name, moved[1])
    lies = Path(path) if path else bundled(Path(SAMPLE))
    opened, why = _opened(lies, digest)
    name = Path(name_of(lies)).name if path or opened else "TRACE.zarr"
    return Source(name, opened, why and f"{why}; give it with --trace, or record or import {name} again")


def _opened(path: Path, digest: str) -> tuple[Trace | None, str]:
    """The trace, or why not."""
    from moereplay.traces.schema import TraceError
    from moereplay.traces.store import open_trace

    try:
        opened = open_trace(path)
    except (TraceError, OSError):
        return None, "it is not where it was replayed from"
    if opened.digest != digest:
        return None, "what lies where it was replayed from has another digest"
    return opened, ""


def _remarks(frame: pl.DataFrame, traces: Mapping[str, Source]) -> list[str]:
    """What `replay` says of bounds, of the traces that are at hand and the policies that this program knows."""
    from moereplay.policies.contract import PolicyError
    from moereplay.simulator.config import configure
    from moereplay.simulator.errors import ConfigError
    from moereplay.simulator.remarks import remarks
    from moereplay.simulator.replay import plan

    of_trace: dict[str, list[ReplayConfig]] = {}
    for config, about in () if frame.is_empty() else frame.select("config", "about").iter_rows():
        opened = traces[about["trace"]].trace
        try:
            if opened and plan(opened, known := configure(**config)):
                of_trace.setdefault(about["trace"], []).append(known)
        except (ConfigError, PolicyError):  # a platform or a policy of another machine
            continue
    said: dict[str, None] = {}
    for digest, configs in of_trace.items():
        if opened := traces[digest].trace:
            said |= dict.fromkeys(remarks(opened, configs))
    return list(said)
