"""`moereplay plot`: figures from results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from moereplay.commands.forecast_options import Quality
from moereplay.commands.groups import grouped
from moereplay.commands.terminal import say

if TYPE_CHECKING:
    import polars as pl

    from moereplay.analysis.figures import Drawn

#: The figure that can be drawn from curves without replays.
CURVES_ALONE = "hit_rate_by_capacity"


class Files(NamedTuple):
    """Which files are written, and how wide pages are."""

    png: Annotated[bool, typer.Option("--png", help="PNG. Default: PNG and SVG; a CSV is always written.")] = False
    svg: Annotated[bool, typer.Option("--svg", help="SVG.")] = False
    pdf: Annotated[bool, typer.Option("--pdf", help="PDF, with text as text.")] = False
    width: Annotated[
        str, typer.Option(help="Width as 3.3in, 84mm or 240pt, for a column: small letters, title and notes as TXT.")
    ] = ""


@grouped
def plot(
    results: Annotated[
        str,
        typer.Argument(
            help="Folder that `replay`, `curve`, `validate`, `quality`, `measure` or `sweep run` wrote; a URL.",
            show_default=False,
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for figures; default figures in RESULTS, or here.")] = None,
    figure: Annotated[
        str | None, typer.Option(help="Comma list of figures; default all that the results allow.")
    ] = None,
    where: Annotated[list[str] | None, typer.Option(help="setting=value,value: only these replays.")] = None,
    quality: Quality = None,
    *,
    files: Files,
) -> None:
    """Draw figures from results: collisions by layer, misses, hit rate, TTFT and TPOT against capacity.

    Writes each as PNG and SVG, and what it shows as CSV. Says which figures the results do not allow, and what would.
    """
    from moereplay.analysis.figures import on_page, save, save_caption, save_numbers
    from moereplay.sweeps.store import place_of

    width = _inches(files.width) if files.width else None
    kinds = [kind for kind in ("png", "svg", "pdf") if getattr(files, kind)] or ["png", "svg"]

    place = place_of(results)
    folder = out or place.beside(Path()) / "figures"
    with on_page(width):
        drawn = _drawn(place.local(), results, figure.split(",") if figure else None, where or [], quality)
        for name, each in drawn.figures:
            save(each, folder / name, kinds)
            save_numbers(each, folder / name)
            if width:
                save_caption(each, folder / name)
    formats = [kind.upper() for kind in (*kinds, "csv")] + ["TXT (its caption)"] * bool(width)
    shown = f"{', '.join(formats[:-1])} and {formats[-1]}"
    say(f"wrote {folder}/, each as {shown}: {', '.join(name for name, _ in drawn.figures)}")
    say_left_out(drawn)


#: Units of a page's width, in inches, and the narrowest and widest page in inches.
UNITS = {"in": 1.0, "mm": 1 / 25.4, "cm": 1 / 2.54, "pt": 1 / 72.27}
LEAST, MOST = 2.0, 30.0


def _inches(text: str) -> float:
    """A width as typed. Raises ConfigError."""
    from moereplay.simulator.errors import ConfigError

    number, unit = text.strip()[:-2], text.strip()[-2:]
    digits = number.strip().replace(".", "", 1)
    inches = float(number) * UNITS[unit] if unit in UNITS and digits.isascii() and digits.isdecimal() else 0.0
    if not LEAST <= inches <= MOST:
        raise ConfigError(f"invalid --width {text!r}: expected {LEAST:g}in to {MOST:g}in, as 3.3in, 84mm or 240pt")
    return inches


def say_left_out(drawn: Drawn) -> None:
    """A line for every reason, with the figures that it concerns."""
    for why in dict.fromkeys(drawn.left_out.values()):
        say(f"left out: {', '.join(name for name, said in drawn.left_out.items() if said == why)}: {why}")


def _drawn(folder: Path, called: str, names: list[str] | None, where: list[str], live: Path | None) -> Drawn:
    """Figures of a validation, of curves alone, or of replays with the curves behind them; `called` as the user did."""
    from moereplay.analysis.figures import FIGURES, Drawn, draw_all, draw_curves, unmatched
    from moereplay.results import curves, measured, quality, validation

    for kind in (quality, measured, validation):
        if (folder / kind.FILE).exists():
            _check_replays(where, live, called)
            return draw_all(kind.load(folder), names)
    lines = curves.load(folder)
    alone = not lines.is_empty() and not any(folder.glob("part-*"))
    if alone:
        _check_replays(where, live, called)
    if alone and names in (None, [CURVES_ALONE]):
        others = {name: f"no replay in {called}; make some with: {_replay(called)}" for name in FIGURES}
        others.pop(CURVES_ALONE)
        return Drawn([(CURVES_ALONE, draw_curves(lines))], {} if names else others)
    rows = _rows(folder, where, live)
    drawn = draw_all(rows, names, lines)
    if lines.is_empty() and names is None and folder == Path(called).absolute():  # a store of objects holds no curves
        drawn.left_out["curves"] = f"no curve in {called}; make some with: {_curve(called, rows)}"
    elif (unlike := unmatched(rows, lines)) and (names is None or CURVES_ALONE in names):
        drawn.left_out["curves"] = f"{unlike}; make some that do with: {_curve(called, rows)}"
    return drawn


def _check_replays(where: list[str], live: Path | None, called: str) -> None:
    """Raises ConfigError for an option that is about replays, in a folder that has none."""
    from moereplay.simulator.errors import ConfigError

    for option, given in {"--where": where, "--quality": live}.items():
        if given:
            raise ConfigError(f"{option} is about replays, and {called} has none; leave it out")


def _replay(folder: str) -> str:
    return f"moereplay replay TRACE --capacity 5%,25% --out {folder}"


def _curve(folder: str, rows: pl.DataFrame) -> str:
    """The command for curves that hold for these replays: theirs are the settings."""
    from moereplay.results.read import runs
    from moereplay.results.settings import OF_CURVES, SETTINGS

    defaults = {each.name: each.default for each in SETTINGS}
    found = {name: runs(rows)[name].unique().sort().to_list() for name in OF_CURVES}
    unlike = [f"--{name} {values[0]}" for name, values in found.items() if values[0] != defaults[name]]
    return " ".join(["moereplay curve TRACE", *unlike, f"--out {folder}"])


def _rows(folder: Path, where: list[str], live: Path | None) -> pl.DataFrame:
    """The replays of a folder that `replay` or `sweep` wrote, with the checks of a sweep, and what is forecast."""
    from moereplay.analysis.checks import with_checks
    from moereplay.analysis.forecasts import with_forecasts
    from moereplay.commands.forecast_options import forecast_of
    from moereplay.results import checks
    from moereplay.results.read import filtered
    from moereplay.results.stored import load

    rows = with_checks(filtered(load(folder), where), checks.load(folder))
    return with_forecasts(rows, forecast_of(live)) if live else rows
