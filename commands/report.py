"""`moereplay report` writes results as one HTML page that needs no network; `plot` draws their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import polars as pl
import typer

from moereplay.analysis.checks import with_checks
from moereplay.analysis.forecast import with_forecasts
from moereplay.analysis.report.cases import Material, Source
from moereplay.commands.options import Where, grouped
from moereplay.commands.quality import Quality, forecast_of
from moereplay.commands.terminal import say, say_left_out
from moereplay.policies.contract import PolicyError
from moereplay.policies.grammar import foresight
from moereplay.results import checks, curves, measured, quality, validation
from moereplay.results.errors import ResultError, check_output
from moereplay.results.read import runs
from moereplay.results.remarks import bracketed
from moereplay.results.serving import parse_level
from moereplay.results.settings import OF_CURVES, SETTINGS
from moereplay.results.stored import LAYERED, READ, REQUESTS, errors, load, sources, with_rows
from moereplay.simulator.bounds import remarks
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import plan
from moereplay.sweeps import extra
from moereplay.sweeps.parts import version
from moereplay.sweeps.store import place_of
from moereplay.traces.files import SAMPLE, bundled, name_of, write_whole
from moereplay.traces.schema import Trace, TraceError
from moereplay.traces.store import open_trace
from moereplay.traces.texts import typed

if TYPE_CHECKING:
    from moereplay.analysis.figures.catalogue import Drawn


def report(
    results: Annotated[
        str,
        typer.Argument(
            help="Folder of `replay` or `curve --out`, or folder or URL of `sweep run` or `merge`.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    trace: Annotated[list[Path] | None, typer.Option(help="New path of a trace that has moved (repeatable).")] = None,
    where: Where = None,
) -> None:
    """Write one HTML page: the best configuration with its confidence interval, figures and methods. SIMULATED."""
    check_output(out)
    if out.suffix not in (".html", ".htm"):
        raise ConfigError(f"invalid --out {out}: expected a name that ends in .html")
    for package in ("jinja2", "vl_convert"):
        extra("report", package)
    from moereplay.analysis.report.page import page

    folder = place_of(results).local()
    text = page(_material(folder, trace or [], where or []))
    write_whole(out, text.encode("utf-8", "backslashreplace"))
    say(f"wrote {out}: {len(text) / 1e6:.1f} MB, self-contained: any browser opens it offline")


def _material(folder: Path, given: Sequence[Path], where: Sequence[str]) -> Material:
    lines = curves.load(folder)
    alone = not lines.is_empty() and not any(folder.glob("part-*"))
    frame = pl.DataFrame() if alone else load(folder, where, REQUESTS)
    found = sources(folder)
    provenances = [dict(each.provenance) for each in found]
    traces = _traces(_digests(frame, lines if alone else None), provenances, given)
    return Material(
        frame=frame,
        layered=lambda rows: with_rows(rows, found, LAYERED),
        curves=lines,
        failed=0 if alone else len(errors(folder)),
        checks=_of(checks.load(folder), frame),
        provenances=provenances,
        sources=traces,
        remarks=_remarks(frame, traces),
        foresees=foresight(),
        version=version("moereplay") or "of no installed version",
    )


def _digests(frame: pl.DataFrame, curves: pl.DataFrame | None) -> list[str]:
    """Return the digests of the traces of the rows."""
    if curves is not None:
        return curves["trace"].unique().sort().to_list()
    return frame["about"].struct.field("trace").unique().sort().to_list()


def _of(found: Sequence[Any], frame: pl.DataFrame) -> list[Any]:
    """Return the checks of these rows."""
    known = set() if frame.is_empty() else set(frame["about"].struct.field("identity"))
    return [check for check in found if check.identity in known]


def _traces(
    digests: Sequence[str], provenances: Sequence[Mapping[str, Any]], given: Sequence[Path]
) -> dict[str, Source]:
    """Locate each trace by its stored path or the user's. Raises ResultError for a trace of another digest."""
    moved = {opened.digest: (path, opened) for path in given for opened in [open_trace(path)]}
    if foreign := [path for digest, (path, _) in moved.items() if digest not in digests]:
        known = ", ".join(digest[:12] for digest in digests)
        raise ResultError(f"invalid --trace {foreign[0]}: expected a trace with a digest of {known}")
    stored = {digest: path for one in provenances for digest, path in dict(one.get("traces") or {}).items()}
    return {digest: _source(digest, stored.get(digest, ""), moved.get(digest)) for digest in digests}


def _source(digest: str, path: str, moved: tuple[Path, Trace] | None) -> Source:
    """Describe a trace without local folders, since pages are passed on."""
    if moved is not None:
        return Source(moved[0].name, moved[1])
    lies = Path(path) if path else bundled(Path(SAMPLE))
    opened, why = _opened(lies, digest)
    name = Path(name_of(lies)).name if path or opened else "TRACE.zarr"
    return Source(name, opened, why and f"{why}; pass --trace, or record or import {name} again")


def _opened(path: Path, digest: str) -> tuple[Trace | None, str]:
    """Open a trace. Return None and the reason if it cannot be used."""
    try:
        opened = open_trace(path)
    except (TraceError, OSError):
        return None, "it is not at the path of its replay"
    if opened.digest != digest:
        return None, "the trace at the path of its replay has another digest"
    return opened, ""


def _remarks(frame: pl.DataFrame, traces: Mapping[str, Source]) -> list[str]:
    """Return the remarks of `replay`, for available traces and known policies, and on bounds."""
    of_trace: dict[str, list[ReplayConfig]] = {}
    for config, about in () if frame.is_empty() else frame.select("config", "about").iter_rows():
        opened = traces[about["trace"]].trace
        try:
            if opened and plan(opened, known := configure(**config)):
                of_trace.setdefault(about["trace"], []).append(known)
        except (ConfigError, PolicyError):  # a platform or a policy file that is not here
            continue
    said: dict[str, None] = {}
    for digest, configs in of_trace.items():
        if opened := traces[digest].trace:
            said |= dict.fromkeys(remarks(opened, configs))
    bounds = [] if frame.is_empty() else frame.select("bounds").to_dicts()
    return [*said, *bracketed(bounds)]


# -- plot

#: Figure that needs curves only, and no replays.
CURVES_ALONE = "hit_rate_by_capacity"


class Files(NamedTuple):
    """Formats of files, and the width of figures."""

    png: Annotated[bool, typer.Option("--png", help="Write PNG (default: PNG and SVG); CSV is always written.")] = False
    svg: Annotated[bool, typer.Option("--svg", help="Write SVG.")] = False
    pdf: Annotated[bool, typer.Option("--pdf", help="Write PDF, with selectable text.")] = False
    width: Annotated[
        str, typer.Option(help="Width for a column (3.3in, 84mm, 240pt); small letters, title and notes as TXT.")
    ] = ""


@grouped
def plot(
    results: Annotated[
        str,
        typer.Argument(
            help="Folder or URL written by `replay`, `curve`, `validate`, `quality`, `measure` or `sweep run`.",
            show_default=False,
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for figures (default: figures in RESULTS, or here).")] = None,
    figure: Annotated[
        str | None, typer.Option(help="Comma list of figures (default: all that the results allow).")
    ] = None,
    where: Where = None,
    quality: Quality = None,
    slo: Annotated[str, typer.Option(help="Service level to draw in latency_by_rate, as in `replay --slo`.")] = "",
    *,
    files: Files,
) -> None:
    """Draw figures from results: collisions by layer, misses, hit rate, TTFT and TPOT against capacity.

    Each figure is written as PNG and SVG, and its numbers as CSV. Figures that the results do not allow are listed.
    """
    extra("plot", "matplotlib")
    from moereplay.analysis.figures.catalogue import on_page, save, save_caption, save_numbers

    width = _inches(files.width) if files.width else None
    kinds = [kind for kind in ("png", "svg", "pdf") if getattr(files, kind)] or ["png", "svg"]

    place = place_of(results)
    folder = out or place.beside(Path()) / "figures"
    with on_page(width):
        drawn = _drawn(place.local(), results, figure.split(",") if figure else None, where or [], quality, slo)
        for name, each in drawn.figures:
            save(each, folder / name, kinds)
            save_numbers(each, folder / name)
            if width:
                save_caption(each, folder / name)
    formats = [kind.upper() for kind in (*kinds, "csv")] + ["TXT (its caption)"] * bool(width)
    shown = f"{', '.join(formats[:-1])} and {formats[-1]}"
    say(f"wrote {folder}/, each as {shown}: {', '.join(name for name, _ in drawn.figures)}")
    say_left_out(drawn)


#: Units of a width in inches, and its limits in inches.
UNITS = {"in": 1.0, "mm": 1 / 25.4, "cm": 1 / 2.54, "pt": 1 / 72.27}
LEAST, MOST = 2.0, 30.0


def _inches(text: str) -> float:
    """Parse a width into inches. Raises ConfigError."""
    number, unit = text.strip()[:-2], text.strip()[-2:]
    digits = number.strip().replace(".", "", 1)
    inches = float(number) * UNITS[unit] if unit in UNITS and digits.isascii() and digits.isdecimal() else 0.0
    if not LEAST <= inches <= MOST:
        raise ConfigError(f"invalid --width {text!r}: expected {LEAST:g}in to {MOST:g}in, as 3.3in, 84mm or 240pt")
    return inches


def _drawn(
    folder: Path, source: str, names: list[str] | None, where: list[str], live: Path | None, slo: str = ""
) -> Drawn:
    """Draw a validation, curves, or replays with their curves; `source` is the folder as the user typed it."""
    from moereplay.analysis.figures.catalogue import FIGURES, Drawn, draw_all, draw_curves, unmatched

    for kind in (quality, measured, validation):
        if (folder / kind.FILE).exists():
            _check_replays(where, live, source)
            return draw_all(kind.load(folder), names)
    lines = curves.load(folder)
    alone = not lines.is_empty() and not any(folder.glob("part-*"))
    if alone:
        _check_replays(where, live, source)
    if alone and names in (None, [CURVES_ALONE]):
        others = {name: f"no replay in {source}; create one with: {_replay(source)}" for name in FIGURES}
        others.pop(CURVES_ALONE)
        return Drawn([(CURVES_ALONE, draw_curves(lines))], {} if names else others)
    rows = _replays(folder, where, live)
    drawn = draw_all(rows, names, lines, parse_level(slo) if slo else None, partial(_with_request_layers, folder))
    if names is None and "all" not in runs(rows)["arrivals"]:
        drawn.left_out["curves"] = "no curve holds for requests that arrive: which passes there are depends on times"
    elif lines.is_empty() and names is None and folder == Path(source).absolute():  # a store of objects holds no curves
        drawn.left_out["curves"] = f"no curve in {source}; create one with: {_curve(source, rows)}"
    elif (unlike := unmatched(rows, lines)) and (names is None or CURVES_ALONE in names):
        drawn.left_out["curves"] = f"{unlike}; create matching ones with: {_curve(source, rows)}"
    return drawn


def _check_replays(where: list[str], live: Path | None, source: str) -> None:
    """Raises ConfigError for an option of replays, for a folder without any."""
    for option, given in {"--where": where, "--quality": live}.items():
        if given:
            raise ConfigError(f"{option} requires replays, but {source} has none")


def _replay(folder: str) -> str:
    return f"moereplay replay TRACE --capacity 5%,25% --out {typed(folder)}"


def _curve(folder: str, rows: pl.DataFrame) -> str:
    """Return the command for curves with the settings of these replays."""
    defaults = {each.name: each.default for each in SETTINGS}
    found = {name: runs(rows)[name].unique().sort().to_list() for name in (*OF_CURVES, "seed")}
    unlike = [f"--{name} {values[0]}" for name, values in found.items() if values[0] != defaults[name]]
    if found["draft"] == [defaults["draft"]]:  # no curve without drafts depends on a seed
        unlike = [each for each in unlike if not each.startswith("--seed ")]
    return " ".join(["moereplay curve TRACE", *unlike, f"--out {typed(folder)}"])


def _replays(folder: Path, where: list[str], live: Path | None) -> pl.DataFrame:
    """Load the replays of a folder, with checks and forecasts."""
    few = {name: READ[name] for name in ("layers", "requests")}
    rows = with_checks(load(folder, where, few), checks.load(folder))
    return with_forecasts(rows, forecast_of(live)) if live else rows


def _with_request_layers(folder: Path, rows: pl.DataFrame) -> pl.DataFrame:
    """Add rows by request and layer, which figures read of the configurations that they draw."""
    return with_rows(rows, sources(folder), {"request_layers": READ["request_layers"]})
