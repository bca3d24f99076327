"""`moereplay calibrate` fits a platform to measured runs.

A calibration has four sources, and a subcommand for each: per-token logs of an engine, a folder of published runs, a
series of runs of one machine, and this machine, on which experts are then really moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer

from moereplay.analysis.tables import table
from moereplay.calibration.files import read_runs
from moereplay.calibration.rows import (
    CLOSED,
    PRESET,
    PROMPT,
    TIME,
    Filed,
    Filing,
    Row,
    about_series,
    append,
    code,
    read_filed,
)
from moereplay.calibration.runs import Logged
from moereplay.commands.model_options import slow_tier_of
from moereplay.commands.options import check_platform_file, grouped, model_named
from moereplay.commands.terminal import STDOUT, progress, say, say_when_compiling, show, show_json
from moereplay.results.errors import check_output
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platforms import as_toml, platform
from moereplay.sweeps.parts import commit
from moereplay.sweeps.recommend.measured import Row as RunRow
from moereplay.sweeps.recommend.measured import Sample, samples
from moereplay.sweeps.recommend.series import (
    HELD_OUT,
    Fitted,
    Group,
    Prediction,
    chosen_of,
    document,
    fitted,
    groups,
    platform_of,
    predictions,
)
from moereplay.sweeps.recommend.series import Written as Machine
from moereplay.tracegen.errors import require_torch
from moereplay.tracegen.offload.part import require_place, shallow, slow_tier_named, throttle_named
from moereplay.traces.checkpoints.found import model_of
from moereplay.traces.files import write_whole
from moereplay.traces.schema import Geometry
from moereplay.traces.texts import counted, hint, typed

if TYPE_CHECKING:
    from moereplay.calibration.evidence import Calibrated
Judged = tuple[Group, Fitted]
#: Columns of a series that are fields of a filed row, measured, or remarks.
NOT_SETTINGS = ("id", "source", "date", "engine", "model", "decode_tok_s", "prefill_tok_s", "notes")
BASE = "phone-ufs4"  #: a device whose experts lie on flash
Value = TypeVar("Value")

Base = Annotated[str, typer.Option(help="Platform that supplies the figures that are not fitted.")]
Folder = Annotated[Path, typer.Argument(help="Folder with cells.csv.", show_default=False)]


class AboutLogs(NamedTuple):
    """Facts that per-token logs do not contain; a folder has them in cells.csv."""

    model: Annotated[str | None, typer.Option(help="Known model; `moereplay models` lists them.")] = None
    memory: Annotated[
        list[str] | None,
        typer.Option(help="Size of the expert cache, such as 4000MiB, or 0 for none (repeatable: once per log)."),
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
        typer.Option(help="Routing of the run: a trace or another tool's file (repeatable: once per log)."),
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
        if self.out == STDOUT and self.as_json:
            raise ConfigError("--out - cannot be combined with --json: both write to standard output")
        if self.out and self.out != STDOUT:
            check_platform_file(self.out)

    def finish(self, toml: str, warnings: Sequence[str], show_tables: Callable[[], None]) -> None:
        """Write the platform, then print the tables. If the platform goes to standard output, warnings go to stderr."""
        from moereplay.calibration.report import warning_lines

        if self.out == STDOUT:
            for line in warning_lines(warnings):
                say(line)
            print(toml, end="")
            return
        if self.out:
            write_whole(self.out, toml.encode())
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

    written.check()
    for log in logs:
        check_exists(log)
        if log.is_dir():
            raise ConfigError(f"{log} is a folder: use `moereplay calibrate folder {typed(log)} --fit PATTERN`")
    if about.trace and len(logs) > 1:
        raise ConfigError("--trace requires a single log")
    routing = about.trace[0] if about.trace else None
    _finish(fitted(logs, facts_of(about, logs, fitting.device), fitting.hold_out, platform(base), routing), written)


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

    written.check()
    check_exists(folder)
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is a file: for per-token logs use `moereplay calibrate logs {typed(folder)} --model NAME`"
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
    written.check()
    require_torch()
    rate, geometry = throttle_named(throttle), _first_layers(model, layers)
    require_place(slow_tier_named(slow_tier), device)
    from moereplay.tracegen.offload.calibration import RUNS, about_of, bench_of, calibrate, document
    from moereplay.tracegen.offload.memory import compute_on, described
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


def check_exists(source: Path) -> None:
    """Raises ConfigError for a file or folder that is not there."""
    if not source.exists():
        raise ConfigError(f"cannot read {source}: No such file or directory; check the path")


def _first_layers(model: str, layers: int) -> Geometry:
    """Raises TraceError for an unknown model, ConfigError for more layers than it has."""
    geometry = model_named(model).geometry
    if layers > geometry.layers:
        raise ConfigError(f"invalid --layers {layers}: expected at most {geometry.layers}, the layers of {model}")
    return shallow(geometry, layers)


def facts_of(about: AboutLogs, files: Sequence[Path], device: str) -> list[Logged]:
    """Return the facts about each log. Raises ConfigError naming an option that is missing or repeated too often."""
    if about.model is None:
        raise ConfigError("missing model: pass --model NAME; `moereplay models` lists the names")
    if about.memory is None:
        raise ConfigError("missing memory: pass --memory, the size of the expert cache, such as 4000MiB, or 0")
    rest = (about.k, about.lanes, about.serial, about.quant, about.dense, device)
    return [Logged(about.model, size, *rest) for size in per_log(about.memory, files, "--memory")]


def per_log(values: Sequence[Value], files: Sequence[Path], option: str) -> list[Value]:
    """Return one value per log. Raises ConfigError unless there is one value, or one per log."""
    if len(values) not in (1, len(files)):
        raise ConfigError(f"{option} is given {len(values)} times for {len(files)} logs; pass it once, or once per log")
    return list(values) * (1 if len(values) == len(files) else len(files))


def _finish(made: Calibrated, written: Written) -> None:
    shown = partial(_show_fit, made, written.as_json)
    written.finish(as_toml(made.fitted.platform), made.fitted.warnings, shown)


def _show_fit(made: Calibrated, as_json: bool) -> None:
    from moereplay.calibration.report import (
        SPARE,
        document,
        figure_rows,
        miss_rows,
        residual_rows,
        summary_line,
        warning_lines,
    )

    found = made.fitted
    if as_json:
        show_json(document(found, made.held) | made.more)
        return
    show(f"{found.device}: {found.platform.calibration.method}" if found.platform.calibration else found.device)
    show(
        table(figure_rows(found)),
        table(miss_rows(found)),
        table(residual_rows([*found.on_itself, *made.held]), spare=SPARE, more="--json"),
    )
    show(f"fit       {summary_line(found.on_itself)}", f"held out  {summary_line(made.held)}")
    show(*warning_lines(found.warnings))
    if isinstance(again := made.more.get("replay"), dict):
        rows = [{"figure": name, "value": value} for name, value in again["columns"].items()]
        show("replay of its routing", table(rows))


def _show_machine(document: dict[str, Any], as_json: bool) -> None:
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


# -- calibrate series: one or two measured runs of a machine fit it, and the other runs are predicted


@grouped
def calibrate_series(
    table: Annotated[
        Path, typer.Argument(metavar="RUNS", help="Table of measured runs (.csv), a row per run.", show_default=False)
    ],
    *,
    series: Annotated[str, typer.Option(help="Only this series of the table.")] = "",
    fit: Annotated[
        list[str] | None,
        typer.Option(
            help="Id of a run to fit, one or two (repeatable; default: the slowest and the fastest by prediction)."
        ),
    ] = None,
    row: Annotated[
        Path | None, typer.Option(help="File to extend by rows that can be filed: a line of JSON per prediction.")
    ] = None,
    written: Written,
) -> None:
    """Fit the rate of misses and the fixed time per token to one or two runs of a series, and predict the others."""
    written.check()
    if row:
        check_row(row)
    rows = _of_series(read_runs(table), series)
    say_when_compiling()
    found, refused = samples(rows, strict=False)
    judged = [(group, fitted(group, chosen_of(group, fit or ()))) for group in _with(groups(found), fit or [], refused)]
    if not judged:
        reasons = "; ".join(f"{row['id']}: {why}" for row, why in refused[:3])
        raise ConfigError(f"{table}: no run can be predicted: {reasons}")
    if written.out and len(judged) > 1:
        names = ", ".join(sorted({group.series for group, _ in judged}))
        raise ConfigError(
            f"--out requires one group of runs, and these are {len(judged)} of {names}: pass --series, --fit, or both"
        )
    group, by = judged[0]
    is_machine = len(judged) == 1 and by.runs[0].run and not by.fault
    machine = platform_of(group, by) if written.out or is_machine else None
    shown = partial(_show_series, judged, refused, machine, written.as_json)
    if row:
        say_filed(append(row, _filed(judged, samples(rows, strict=True)[0])), row)
    written.finish(as_toml(machine.platform) if machine else "", (), shown)


def check_row(file: Path) -> None:
    """Raises ConfigError or ResultError for a file of other things, or that cannot be written."""
    check_output(file.with_name(f"{file.name}.part"))
    if file.exists():
        read_filed(file)


def say_filed(many: int, file: Path) -> None:
    """Print where rows are, and what becomes of them."""
    say(f"appended {counted(many, 'row')} to {file}: docs/logs.md says how to file them")


def _filed(judged: Sequence[Judged], alone: Sequence[Sample]) -> Iterator[Filed]:
    """Yield a row of each run that was held out, and of each that the published rates predict with nothing fitted."""
    by_code = code(commit())
    told = [
        (each, f"runs {' and '.join(run.row['id'] for run in by.runs)}", group.runs[0].steps > 1)
        for group, by in judged
        for each in predictions(group, by)
        if each.role == HELD_OUT
    ]
    judged_ids = {run.row["id"] for group, _ in judged for run in group.runs}
    told += [
        (Prediction(run.row, PRESET, run.told(1, 0), run.each), "published rates, nothing fitted", False)
        for run in alone
        if run.row["id"] in judged_ids
    ]
    for each, source, is_prompt in told:
        run, quantity = each.row, PROMPT if is_prompt else TIME
        times = (each.predicted / 1e6, each.measured / 1e6)
        settings = {name: value for name, value in run.items() if value and name not in NOT_SETTINGS}
        by = Filing(by_code, run["engine"], run["date"])
        yield by.filed(Row(*about_series(run), quantity, source, each.role, CLOSED, *times, True, ""), settings)


def _of_series(rows: Sequence[RunRow], series: str) -> list[RunRow]:
    kept = [row for row in rows if not series or row["series"] == series]
    if not kept:
        raise ConfigError(f"unknown series {series!r}: {hint(series, sorted({row['series'] for row in rows}))}")
    return kept


def _with(found: Sequence[Group], names: list[str], refused: Sequence[tuple[RunRow, str]]) -> list[Group]:
    """Return the groups that hold a named run, or all. Raises ConfigError for a run that is refused or in no group."""
    for row, why in refused:
        if row["id"] in names:
            raise ConfigError(f"invalid --fit {row['id']}: this run cannot be predicted: {why}")
    known = [run.row["id"] for group in found for run in group.runs]
    for name in names:
        if name not in known:
            raise ConfigError(f"invalid --fit {name!r}: expected the id of a run: {hint(name, known)}")
    kept = [group for group in found if not names or {run.row["id"] for run in group.runs} & set(names)]
    if names and len(kept) > 1:
        raise ConfigError(f"--fit {names[0]} and {names[1]} belong to different groups: {', '.join(_about(kept))}")
    return kept


def _about(groups: Sequence[Group]) -> list[str]:
    return [f"{group.series} ({group.runs[0].row['engine']}, {group.question or 'decoding'})" for group in groups]


def _show_series(
    judged: Sequence[Judged], refused: Sequence[tuple[RunRow, str]], machine: Machine | None, as_json: bool
) -> None:
    from moereplay.calibration.report import figure_row

    said = document(judged, refused, machine)
    if as_json:
        show_json(said)
        return
    for each in said["groups"]:
        show(f"{each['series'] or 'runs'}, {each['engine']}: {each['in_words']}")
        show(table([_shown(run) for run in each["runs"]]))
    if machine:
        show(table([figure_row(name, value, None, len(judged[0][1].runs)) for name, value in machine.figures.items()]))
    held = said["held_out"]
    if held["runs"]:
        show(
            f"held out  {counted(held['runs'], 'run')}: median |error| {held['median']:.1%}, worst {held['worst']:+.1%}"
        )
    if refused:
        show(table([{"run": row["id"], "not predicted because": why} for row, why in refused]))
    show(f"{sum(len(group.runs) for group, _ in judged)} runs can be predicted, {len(refused)} cannot")


def _shown(run: dict[str, object]) -> dict[str, object]:
    return {
        "run": run["id"],
        "role": run["role"],
        "predicted tokens/s": run["predicted_tokens_per_s"],
        "measured": run["measured_tokens_per_s"],
        "error": f"{run['error']:+.1%}",
    }
