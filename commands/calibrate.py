"""`moereplay calibrate`: the prices of a real machine from the logs of engines that ran on it, or of this one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moereplay.commands.log_options import OfLogs, logged
from moereplay.commands.options import Typed, grouped
from moereplay.commands.terminal import STDOUT, say, show, show_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from moereplay.calibration.fitting import Fitted
    from moereplay.calibration.prediction import Prediction
    from moereplay.calibration.runs import Run
    from moereplay.simulator.platform import Platform
    from moereplay.traces.schema import Geometry


class OfFit(NamedTuple):
    """How a platform is fitted to logs."""

    device: Annotated[str, typer.Option(help="Name of the machine.")] = "this machine"
    hold_out: Annotated[float, typer.Option(min=0, max=0.9, help="Logs: share of tokens held out, the last.")] = 0.3


class Here(NamedTuple):
    """This machine, measured by real offloading."""

    slow_tier: Annotated[
        str | None, typer.Option(help="Measure this machine: disk:DIR or pinned; --device cpu or cuda, --model.")
    ] = None
    layers: Annotated[int, typer.Option(min=1, help="Of --slow-tier: layers of the model, as memory allows.")] = 4
    throttle: Annotated[str, typer.Option(help="Of --slow-tier: its fastest, as 400MB/s.")] = "none"
    threads: Annotated[int, typer.Option(min=1, help="Of --slow-tier: that compute, on a CPU.")] = 1


OF_BOTH = {"model", "device"}  #: options of logs that --slow-tier takes too


@grouped
def calibrate(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(help="A folder with cells.csv, or per-token LOGs (.csv).", show_default=False),
    ] = None,
    *,
    fit: Annotated[
        list[str] | None, typer.Option(help="Of a folder: cells to fit on, a pattern; again for more.")
    ] = None,
    base: Annotated[str, typer.Option(help="Platform whose other figures are kept.")] = "phone-ufs4",
    out: Annotated[
        Path | None,
        typer.Option(help="Write the calibrated platform (.toml); - is standard output, without the tables."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    logs: OfLogs,
    fitting: OfFit,
    here: Here,
    typed: Typed,
) -> None:
    """Fit the prices of a machine to measured runs; print what is off, on them and on runs held out.

    Without sources and with --slow-tier, this machine is measured.
    """
    from moereplay.calibration.report import document
    from moereplay.results.outputs import check_output
    from moereplay.simulator.errors import ConfigError
    from moereplay.simulator.platforms import as_toml, platform

    if out == STDOUT and as_json:
        raise ConfigError("--out - and --json both write to standard output; leave one of them out")
    if out and out != STDOUT:
        check_output(out)
    if here.slow_tier:
        if sources or fit:
            raise ConfigError("--slow-tier measures this machine and reads no logs; leave the sources and --fit out")
        _refuse(typed & {"base", *OfLogs._fields, *OfFit._fields} - OF_BOTH, "means nothing beside --slow-tier")
        _measure_here(here, here.slow_tier, (logs.model, fitting.device), out, as_json)
        return
    _refuse(typed & {*Here._fields}, "means nothing without --slow-tier")
    if not sources:
        raise ConfigError("name a folder with --fit PATTERN, or logs; or measure this machine with --slow-tier")
    for missing in (source for source in sources if not source.exists()):
        raise ConfigError(f"cannot read {missing}: No such file or directory; check the path")
    if sources[0].is_dir():
        if len(sources) > 1 or not fit:
            raise ConfigError("one folder and at least one --fit PATTERN are needed; or name per-token logs")
        _refuse(typed & {*OfLogs._fields, *OfFit._fields}, "is of LOGs and means nothing beside a folder")
    machine = platform(base)
    found, held, more = _of_folder(sources[0], fit or [], machine) if fit else _of_logs(sources, logs, fitting, machine)
    if out:
        _write(out, as_toml(found.platform), found.warnings)
    if out == STDOUT:
        return
    if as_json:
        show_json(document(found, held) | more)
    else:
        _report(found, held, more)
    if out:
        say(f"wrote {out}: give it as --platform, or to `moereplay evidence --calibration`")


def _refuse(ignored: AbstractSet[str], why: str) -> None:
    """Raises ConfigError naming the first of these options, if there is one."""
    from moereplay.simulator.errors import ConfigError

    for name in sorted(ignored):
        raise ConfigError(f"--{name.replace('_', '-')} {why}; leave it out")


def _measure_here(here: Here, slow_tier: str, of: tuple[str | None, str], out: Path | None, as_json: bool) -> None:
    """Calibrate this machine by runs of its own; `of` is the model and the device."""
    from tempfile import TemporaryDirectory

    from moereplay.commands.model_options import slow_tier_of
    from moereplay.commands.progress import progress
    from moereplay.simulator.platforms import as_toml
    from moereplay.tracegen.errors import require_torch
    from moereplay.tracegen.offload.part import require_place, slow_tier_named, throttle_named
    from moereplay.traces.geometry import known

    require_torch()
    model, named = of
    device = "cpu" if named == OfFit().device else named
    throttle, geometry = throttle_named(here.throttle), _measured_geometry(model, here.layers)
    require_place(slow_tier_named(slow_tier), device)
    from moereplay.tracegen.offload.calibration import RUNS, about_of, bench_of, calibrate, document
    from moereplay.tracegen.offload.device import compute_on, described
    from moereplay.tracegen.offload.slow_tier import kind_of

    compute_on(here.threads)
    with TemporaryDirectory() as folder, slow_tier_of(slow_tier, device, geometry, [geometry.expert_bits]) as slow:
        bench = bench_of(geometry, slow, device)
        with progress(RUNS, "real runs") as done:
            said = about_of(described(device), kind_of(slow_tier), throttle, known(model or ""))
            found = calibrate(bench, geometry, said, Path(folder), done)
    if out:
        _write(out, as_toml(found.fitted.platform), found.fitted.warnings)
    if out == STDOUT:
        return
    _show_here(document(found, described(device)), as_json)
    if out:
        say(f"wrote {out}: give it as --platform")


def _write(out: Path, toml: str, warnings: Sequence[str]) -> None:
    """The platform, into a file, or on standard output, beside which no table has the warnings."""
    from moereplay.calibration.report import warning_lines

    if out == STDOUT:
        for line in warning_lines(warnings):
            say(line)
        print(toml, end="")
    else:
        out.write_text(toml, "utf-8")


def _measured_geometry(model: str | None, layers: int) -> Geometry:
    """The first layers of a known model. Raises ConfigError or TraceError for none, or for more than it has."""
    from moereplay.simulator.errors import ConfigError
    from moereplay.tracegen.offload.part import shallow
    from moereplay.traces.geometry import known

    if model is None:
        raise ConfigError("--slow-tier needs --model, whose sizes are measured; `moereplay models` lists them")
    geometry = known(model).geometry
    if layers > geometry.layers:
        raise ConfigError(f"--layers {layers}: {model} has {geometry.layers}; take at most that")
    return shallow(geometry, layers)


def _show_here(document: dict[str, Any], as_json: bool) -> None:
    from moereplay.analysis.tables import table
    from moereplay.calibration.report import figure_row, warning_lines

    if as_json:
        show_json(document)
        return
    show(f"{document['device']}: {document['method']}")
    show(table([figure_row(name, **figure) for name, figure in document["figures"].items()]))
    held = document["held_out"]
    show(f"fit       mean |error| of the time per token {document['fit']['mape']:.1%}")
    show(f"held out  {held['cells']} capacities: mean |error| {held['mape']:.1%}, worst {held['worst']:+.1%}")
    show(*warning_lines(document["warnings"]))


def _of_folder(folder: Path, globs: list[str], base: Platform) -> tuple[Fitted, list[Prediction], dict[str, object]]:
    """Fitted on some of a folder's cells; the others of its device, predicted."""
    from moereplay.calibration.evidence import HELD_OUT, Machines, fit_of, predictions, runs_of
    from moereplay.calibration.files import read_folder

    evidence = read_folder(folder)
    runs, refused = runs_of(evidence, evidence.chosen(globs))
    found = fit_of(runs, globs, base, evidence)
    machines = Machines({found.device: found.platform}, globs, {})
    every = predictions(evidence, machines)
    held = [each for each in every if each.role == HELD_OUT and each.device == found.device and not each.refused]
    return found, held, {"left_out": refused}


def _of_logs(
    files: list[Path], about: OfLogs, fitting: OfFit, base: Platform
) -> tuple[Fitted, list[Prediction], dict[str, object]]:
    """Fitted on the first tokens of logs; the others predicted, and the routing of a log replayed."""
    from moereplay.analysis.tables import counted
    from moereplay.calibration.fitting import fit, prediction
    from moereplay.calibration.runs import runs_of_logs, split
    from moereplay.simulator.errors import ConfigError

    if about.trace and len(files) > 1:
        raise ConfigError("--trace is the routing of one log; name that log alone")
    said = logged(about, files, fitting.device)
    runs = runs_of_logs(files, said)
    first, last = split(runs, fitting.hold_out)
    budgets, logs = ", ".join(dict.fromkeys(each.memory for each in said)), counted(len(files), "log")
    method = f"{logs} of {about.model} at {budgets}, the last {fitting.hold_out:.0%} of tokens held out"
    found = fit(first, base, method)
    held = [prediction(found.platform, run, "held_out") for run in last]
    if about.trace is None:
        return found, held, {}
    return found, held, {"replay": _replay(found.platform, runs[0], about.trace[0])}


def _replay(machine: Platform, run: Run, routing: Path) -> dict[str, object]:
    """What a replay of its routing says of a run. Raises ConfigError for routing that cannot be replayed."""
    from moereplay.calibration.replayed import replayed
    from moereplay.calibration.runs import RefusalError
    from moereplay.simulator.errors import ConfigError

    try:
        again = replayed(machine, run, routing)
    except RefusalError as refusal:
        raise ConfigError(f"--trace {routing}: {refusal}") from None
    return {"columns": dict(again.columns), **again.more}


def _report(found: Fitted, held: list[Prediction], more: dict[str, object]) -> None:
    from moereplay.analysis.tables import table
    from moereplay.calibration.report import SPARE, figure_rows, residual_rows, summary_line, warning_lines

    show(f"{found.device}: {found.platform.calibration.method}" if found.platform.calibration else found.device)
    show(table(figure_rows(found)), table(residual_rows([*found.on_itself, *held]), spare=SPARE, more="--json"))
    show(f"fit       {summary_line(found.on_itself)}", f"held out  {summary_line(held)}")
    show(*warning_lines(found.warnings))
    if isinstance(again := more.get("replay"), dict):
        show(
            "replay of its routing",
            table([{"figure": name, "value": value} for name, value in again["columns"].items()]),
        )
