"""`moereplay calibrate` fits a platform to measured runs; `moereplay evidence` compares its predictions with runs.

A calibration has three sources, and a subcommand for each: per-token logs of an engine, a folder of published runs, and
this machine, on which experts are then really moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer

from moereplay.commands.options import Typed, grouped
from moereplay.commands.terminal import STDOUT, say, say_when_compiling, show, show_json

if TYPE_CHECKING:
    from moereplay.calibration.evidence import Calibrated, Machines
    from moereplay.calibration.prediction import Prediction
    from moereplay.calibration.runs import Logged
    from moereplay.traces.schema import Geometry

BASE = "phone-ufs4"  #: a device whose experts lie on flash
Value = TypeVar("Value")

Base = Annotated[str, typer.Option(help="Platform that supplies the figures that are not fitted.")]
Folder = Annotated[Path, typer.Argument(help="Folder with cells.csv.", show_default=False)]


class AboutLogs(NamedTuple):
    """Facts that per-token logs do not contain; a folder has them in cells.csv."""

    model: Annotated[str | None, typer.Option(help="Known model; `moereplay models` lists them.")] = None
    memory: Annotated[
        list[str] | None,
        typer.Option(help="Size of the expert cache, such as 4000MiB, or 0 for none (once, or once per log)."),
    ] = None
    k: Annotated[int | None, typer.Option(min=1, help="Experts per token (default: the model's).")] = None
    lanes: Annotated[int, typer.Option(min=1, help="Concurrent reads.")] = 4
    serial: Annotated[bool, typer.Option("--serial", help="The engine does not overlap reads with compute.")] = False
    quant: Annotated[str, typer.Option(help="Weight format of the model file.")] = "Q4_K_M"
    dense: Annotated[
        str | None, typer.Option(help="Bytes of all weights except routed experts, as stored: 1816MiB.")
    ] = None
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Routing of the run: a trace or another tool's file (once, or once per log)."),
    ] = None


class Fitting(NamedTuple):
    """Machine of the logs, and the share of tokens to predict rather than fit."""

    device: Annotated[str, typer.Option(help="Name of the machine.")] = "this machine"
    hold_out: Annotated[float, typer.Option(min=0, max=0.9, help="Share of tokens to predict, from the end.")] = 0.3


class Written(NamedTuple):
    """Output of a calibration."""

    out: Annotated[
        Path | None,
        typer.Option(help="Platform file to write (.toml); - writes it to standard output, without tables."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False

    def check(self) -> None:
        """Raises ConfigError or ResultError for an output that cannot be written, before anything is read."""
        from moereplay.results.outputs import check_output
        from moereplay.simulator.errors import ConfigError

        if self.out == STDOUT and self.as_json:
            raise ConfigError("--out - cannot be combined with --json: both write to standard output")
        if self.out and self.out != STDOUT:
            check_output(self.out)

    def finish(self, toml: str, warnings: Sequence[str], show_tables: Callable[[], None]) -> None:
        """Write the platform, then print the tables. If the platform goes to standard output, warnings go to stderr."""
        from moereplay.calibration.report import warning_lines

        if self.out == STDOUT:
            for line in warning_lines(warnings):
                say(line)
            print(toml, end="")
            return
        if self.out:
            self.out.write_text(toml, "utf-8")
        show_tables()
        if self.out:
            say(f"wrote {self.out}: pass it as --platform, or to `moereplay evidence --calibration`")


@grouped
def calibrate_logs(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="Per-token logs (.csv).", show_default=False)],
    *,
    about: AboutLogs,
    fitting: Fitting,
    base: Base = BASE,
    written: Written,
) -> None:
    """Fit a platform to per-token logs of an engine, and predict the tokens that are held out."""
    from moereplay.calibration.evidence import calibrate_logs as fitted
    from moereplay.simulator.errors import ConfigError
    from moereplay.simulator.platforms import platform

    written.check()
    for log in logs:
        _check_exists(log)
        if log.is_dir():
            raise ConfigError(f"{log} is a folder: use `moereplay calibrate folder {quote(str(log))} --fit PATTERN`")
    if about.trace and len(logs) > 1:
        raise ConfigError("--trace requires a single log")
    routing = about.trace[0] if about.trace else None
    _finish(fitted(logs, _described(about, logs, fitting.device), fitting.hold_out, platform(base), routing), written)


@grouped
def calibrate_folder(
    folder: Folder,
    *,
    fit: Annotated[list[str], typer.Option(help="Pattern of cells to fit on (repeatable).", show_default=False)],
    base: Base = BASE,
    written: Written,
) -> None:
    """Fit a platform to some runs of a folder, and predict the other runs of the same device."""
    from moereplay.calibration.evidence import calibrate_folder as fitted
    from moereplay.simulator.errors import ConfigError
    from moereplay.simulator.platforms import platform

    written.check()
    _check_exists(folder)
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is a file: for per-token logs use `moereplay calibrate logs {quote(str(folder))} --model NAME`"
        )
    _finish(fitted(folder, fit, platform(base)), written)


@grouped
def calibrate_machine(
    *,
    slow_tier: Annotated[
        str,
        typer.Option(
            help="Memory that experts are read from: disk:DIR, disk:DIR:buffered or pinned.", show_default=False
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Model of this size: a known name, config.json, GGUF file, or owner/name of the hub.",
            show_default=False,
        ),
    ],
    device: Annotated[str, typer.Option(help="Device that computes: cpu, cuda, cuda:1.")] = "cpu",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model to allocate.")] = 4,
    throttle: Annotated[str, typer.Option(help="Upper bound on the read rate: 400MB/s, none.")] = "none",
    threads: Annotated[int, typer.Option(min=1, help="Number of compute threads (CPU only).")] = 1,
    written: Written,
) -> None:
    """Measure this machine: move and compute random experts of a model's sizes, and fit a platform to the times."""
    from tempfile import TemporaryDirectory

    from moereplay.commands.model_options import slow_tier_of
    from moereplay.commands.progress import progress
    from moereplay.simulator.platforms import as_toml
    from moereplay.tracegen.errors import require_torch
    from moereplay.tracegen.offload.part import require_place, slow_tier_named, throttle_named
    from moereplay.traces.checkpoints.found import model_of

    written.check()
    require_torch()
    rate, geometry = throttle_named(throttle), _first_layers(model, layers)
    require_place(slow_tier_named(slow_tier), device)
    from moereplay.tracegen.offload.calibration import RUNS, about_of, bench_of, calibrate, document
    from moereplay.tracegen.offload.device import compute_on, described
    from moereplay.tracegen.offload.slow_tier import kind_of

    compute_on(threads)
    with TemporaryDirectory() as place, slow_tier_of(slow_tier, device, geometry, [geometry.expert_bits]) as slow:
        bench = bench_of(geometry, slow, device)
        with progress(RUNS, "real runs") as done:
            about = about_of(described(device), kind_of(slow_tier), rate, model_of(model))
            found = calibrate(bench, geometry, about, Path(place), done)
    shown = partial(_show_machine, document(found, described(device)), written.as_json)
    written.finish(as_toml(found.fitted.platform), found.fitted.warnings, shown)


def older_use(arguments: Sequence[str]) -> str:
    """Return the subcommand that `calibrate` with these arguments meant before it had subcommands."""
    if any(each.partition("=")[0] == "--slow-tier" for each in arguments):
        return "machine"
    if any(each.partition("=")[0] == "--fit" or Path(each).is_dir() for each in arguments):
        return "folder"
    return "logs"


def _check_exists(source: Path) -> None:
    from moereplay.simulator.errors import ConfigError

    if not source.exists():
        raise ConfigError(f"cannot read {source}: No such file or directory; check the path")


def _first_layers(model: str, layers: int) -> Geometry:
    """Raises TraceError for an unknown model, ConfigError for more layers than it has."""
    from moereplay.simulator.errors import ConfigError
    from moereplay.tracegen.offload.part import shallow
    from moereplay.traces.checkpoints.found import model_of

    geometry = model_of(model).geometry
    if layers > geometry.layers:
        raise ConfigError(f"invalid --layers {layers}: expected at most {geometry.layers}, the layers of {model}")
    return shallow(geometry, layers)


def _described(about: AboutLogs, files: Sequence[Path], device: str) -> list[Logged]:
    """Return the facts about each log. Raises ConfigError naming an option that is missing or repeated too often."""
    from moereplay.calibration.runs import Logged
    from moereplay.simulator.errors import ConfigError

    if about.model is None:
        raise ConfigError("missing model: pass --model NAME; `moereplay models` lists the names")
    if about.memory is None:
        raise ConfigError("missing memory: pass --memory, the size of the expert cache, such as 4000MiB, or 0")
    rest = (about.k, about.lanes, about.serial, about.quant, about.dense, device)
    return [Logged(about.model, size, *rest) for size in _per_log(about.memory, files, "--memory")]


def _per_log(values: Sequence[Value], files: Sequence[Path], option: str) -> list[Value]:
    """Return one value per log. Raises ConfigError unless there is one value, or one per log."""
    from moereplay.simulator.errors import ConfigError

    if len(values) not in (1, len(files)):
        raise ConfigError(f"{option} is given {len(values)} times for {len(files)} logs; pass it once, or once per log")
    return list(values) * (1 if len(values) == len(files) else len(files))


def _finish(made: Calibrated, written: Written) -> None:
    from moereplay.simulator.platforms import as_toml

    shown = partial(_show_fit, made, written.as_json)
    written.finish(as_toml(made.fitted.platform), made.fitted.warnings, shown)


def _show_fit(made: Calibrated, as_json: bool) -> None:
    from moereplay.analysis.tables import table
    from moereplay.calibration.report import SPARE, document, figure_rows, residual_rows, summary_line, warning_lines

    found = made.fitted
    if as_json:
        show_json(document(found, made.held) | made.more)
        return
    show(f"{found.device}: {found.platform.calibration.method}" if found.platform.calibration else found.device)
    show(table(figure_rows(found)), table(residual_rows([*found.on_itself, *made.held]), spare=SPARE, more="--json"))
    show(f"fit       {summary_line(found.on_itself)}", f"held out  {summary_line(made.held)}")
    show(*warning_lines(found.warnings))
    if isinstance(again := made.more.get("replay"), dict):
        rows = [{"figure": name, "value": value} for name, value in again["columns"].items()]
        show("replay of its routing", table(rows))


def _show_machine(document: dict[str, Any], as_json: bool) -> None:
    from moereplay.analysis.tables import table
    from moereplay.calibration.report import figure_row, warning_lines

    if as_json:
        show_json(document)
        return
    held = document["held_out"]
    show(
        f"{document['device']}: {document['method']}",
        table([figure_row(name, **figure) for name, figure in document["figures"].items()]),
        f"fit       mean |error| of the time per token {document['fit']['mape']:.1%}",
        f"held out  {held['cells']} capacities: mean |error| {held['mape']:.1%}, worst {held['worst']:+.1%}",
        *warning_lines(document["warnings"]),
    )


@grouped
def evidence(
    sources: Annotated[
        list[Path], typer.Argument(help="Folder with cells.csv, or per-token logs (.csv).", show_default=False)
    ],
    *,
    calibration: Annotated[
        list[str] | None, typer.Option(help="Calibrated platform (.toml); one per device (repeatable).")
    ] = None,
    fit: Annotated[
        list[str] | None, typer.Option(help="With a folder: fit on these cells instead of --calibration (repeatable).")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help=f"With --fit: platform that supplies the other figures (default: {BASE}).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    logs: AboutLogs,
    typed: Typed,
) -> None:
    """Predict measured runs with a calibrated platform, by replay where their routing is available."""
    from moereplay.calibration.evidence import document
    from moereplay.simulator.errors import ConfigError

    for source in sources:
        _check_exists(source)
    if sources[0].is_dir():
        for name in sorted(typed & {*AboutLogs._fields}):
            raise ConfigError(f"--{name} cannot be combined with a folder: it is a column of cells.csv")
        found, machines = _of_folder(sources, calibration, fit, base)
    else:
        for name, given in (("--fit", fit), ("--base", base)):
            if given:
                raise ConfigError(f"{name} cannot be combined with logs: run `moereplay calibrate logs` first")
        found, machines = _of_logs(sources, calibration, logs)
    for line in machines.remarks:
        say(line)
    if as_json:
        show_json(document(found))
    elif sources[0].is_dir():
        _show_folder(found)
    else:
        _show_logs(found, bool(logs.trace))


def _of_folder(
    sources: Sequence[Path], calibration: list[str] | None, fit: list[str] | None, base: str | None
) -> tuple[list[Prediction], Machines]:
    from moereplay.calibration.evidence import from_files, from_fits, predictions
    from moereplay.calibration.files import read_folder
    from moereplay.simulator.errors import ConfigError
    from moereplay.simulator.platforms import platform

    if len(sources) > 1:
        raise ConfigError(f"{sources[0]} cannot be combined with {sources[1]}: pass one folder, or logs")
    if bool(calibration) == bool(fit):
        raise ConfigError("pass exactly one of --calibration FILE and --fit PATTERN (both repeatable)")
    if base and calibration:
        raise ConfigError("--base cannot be combined with --calibration")
    cells = read_folder(sources[0])
    machines = from_files(calibration) if calibration else from_fits(cells, fit or [], platform(base or BASE))
    return list(predictions(cells, machines)), machines


def _of_logs(files: list[Path], calibration: list[str] | None, about: AboutLogs) -> tuple[list[Prediction], Machines]:
    from moereplay.calibration.evidence import from_files, of_log
    from moereplay.calibration.replayed import model_of
    from moereplay.calibration.runs import runs_of_logs
    from moereplay.simulator.errors import ConfigError

    if not calibration:
        raise ConfigError("missing calibration: pass --calibration FILE, which `moereplay calibrate` writes")
    if len(calibration) > 1:
        raise ConfigError("--calibration cannot be repeated with logs, which belong to one machine")
    for file in files:
        if file.is_dir():
            raise ConfigError(f"{file} is a folder: pass one folder, or logs")
    machines = from_files(calibration)
    ((device, machine),) = machines.platforms.items()
    about = about._replace(model=about.model or model_of(about.trace or [], machine))
    runs = runs_of_logs(files, _described(about, files, device), fewest=1)
    routings = _per_log(about.trace, files, "--trace") if about.trace else [None] * len(files)
    for routing in routings:
        if routing and not routing.exists():
            raise ConfigError(f"--trace {routing}: No such file or directory; check the path")
    say_when_compiling()
    return [of_log(machine, run, routing) for run, routing in zip(runs, routings, strict=True)], machines


def _show_folder(found: list[Prediction]) -> None:
    from moereplay.analysis.tables import table
    from moereplay.calibration.report import SPARE, refusal_rows, residual_rows, summary_line

    for rows in filter(None, (residual_rows(found), refusal_rows(found))):
        show(table(rows, spare=SPARE, more="--json"))
    for role in ("fit", "held_out"):
        show(f"{role.replace('_', ' '):9} {summary_line([each for each in found if each.role == role])}")


def _show_logs(found: list[Prediction], replayed: bool) -> None:
    from moereplay.analysis.tables import table
    from moereplay.calibration.report import quantity_rows

    show(table([row for each in found for row in quantity_rows(each)]))
    show("error: predicted / measured - 1; measured hits follow from the bytes in the log")
    if not replayed:
        show("predicted from the bytes in the log; pass --trace, its routing, to predict hits and bytes too")
