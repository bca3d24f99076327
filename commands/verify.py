"""`moereplay verify` compares an engine's counts and times with replays, `evidence` measured runs with predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from moereplay.analysis.tables import table
from moereplay.calibration.engine_log import EngineRun, runs_of, runs_of_lines
from moereplay.calibration.files import read_folder
from moereplay.calibration.prediction import Prediction
from moereplay.calibration.replayed import model_of
from moereplay.calibration.rows import Filing, append, code
from moereplay.calibration.runs import runs_of_logs
from moereplay.commands import options
from moereplay.commands.calibrate import BASE, AboutLogs, check_exists, check_row, facts_of, per_log, say_filed
from moereplay.commands.options import Typed, grouped
from moereplay.commands.terminal import progress, say, say_when_compiling, show, show_json
from moereplay.simulator.capacity import parse_capacity
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platforms import platform
from moereplay.sweeps.parts import commit
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.llama.binding import library_file
from moereplay.tracegen.llama.process import cache_runs, requests_of
from moereplay.tracegen.llama.record import GgufModel, opened, processors
from moereplay.traces.schema import Trace
from moereplay.traces.selection import first_requests
from moereplay.traces.store import open_trace

if TYPE_CHECKING:
    from moereplay.calibration.evidence import Machines
    from moereplay.calibration.verify import Verified


class Engine(NamedTuple):
    """llama.cpp, run here with its expert cache."""

    model: Annotated[Path | None, typer.Option(help="GGUF file that the trace was recorded from, to run here.")] = None
    moe_cache: Annotated[str, typer.Option(help="With --model: comma list of cache sizes of llama.cpp.")] = (
        "25%,50%,75%"
    )
    llama_lib: Annotated[
        Path | None, typer.Option(help="With --model: your own libllama.so (default: that of the package).")
    ] = None
    threads: Annotated[
        int | None, typer.Option(min=1, max=512, help="With --model: threads (default: all processors).")
    ] = None
    repeats: Annotated[
        int, typer.Option(min=1, max=1000, help="With --model: runs of each size; the shortest time counts.")
    ] = 1


class Reported(NamedTuple):
    """Where the comparison goes."""

    row: Annotated[
        Path | None, typer.Option(help="File to extend by rows that can be filed: a line of JSON per prediction.")
    ] = None
    device: Annotated[str, typer.Option(help="With --row: the machine in words, for these rows.")] = ""
    build: Annotated[str, typer.Option(help="With --row: version of the engine, for these rows.")] = ""
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False


@grouped
def verify(
    trace: options.TracePath,
    *,
    log: Annotated[
        list[str] | None,
        typer.Option(help="Log of the engine: FILE, or FILE@SIZE with the size of its cache (repeatable)."),
    ] = None,
    engine: Engine,
    preset: Annotated[
        str, typer.Option(help="Preset to replay; `moereplay presets` lists them.")
    ] = "llama.cpp-moe-cache",
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N requests.")] = None,
    reported: Reported,
) -> None:
    """Compare an engine's own hits and times with a replay: run llama.cpp, or read an engine's log."""
    from moereplay.calibration.verify import Verifier, check_counted

    if bool(log) == bool(engine.model):
        raise ConfigError(
            "missing run: pass either --log FILE, what the engine printed, or --model FILE.gguf, to run llama.cpp here"
        )
    if reported.row:
        check_row(reported.row)
        if not (reported.device and reported.build):
            raise ConfigError("--row requires --device, the machine in words, and --build, the engine's version")
    opened = open_trace(trace)
    opened = opened if limit is None else first_requests(opened, limit)
    if engine.model:
        opened, runs = _run(opened, engine)
    else:
        runs = [run for each in log or () for run in runs_of(each)]
    check_counted(runs)
    say_when_compiling()
    found = Verifier(opened, preset).verify(runs)
    if reported.row:
        by = Filing(code(commit()), f"{preset} {reported.build}")
        say_filed(append(reported.row, found.filed(reported.device, by)), reported.row)
    if reported.as_json:
        show_json(found.document())
    else:
        _show(found)


def _run(trace: Trace, asked: Engine) -> tuple[Trace, list[EngineRun]]:
    """Run llama.cpp at each size; return the trace as of the file, and the runs."""
    assert asked.model
    file = opened(str(asked.model))
    trace = _of_file(trace, file)
    geometry = trace.geometry
    each = max(geometry.expert_bytes)  # one slot is kept empty
    texts = [text.strip() for text in asked.moe_cache.split(",")]
    sizes = [parse_capacity(text, geometry, "global", (geometry.expert_bytes,)).total for text in texts]
    sizes = [size + each if text.endswith("%") else size for text, size in zip(texts, sizes, strict=True)]
    library = library_file(asked.llama_lib)
    threads, found = asked.threads or processors(), []
    with progress(len(sizes) * asked.repeats, "runs of llama.cpp") as done:
        for run in cache_runs(library, file.path, requests_of(trace), sizes, threads, asked.repeats):
            done()
            found += [each.with_time(run.ms) for each in runs_of_lines(f"llama.cpp of {library.name}", run.said)]
    return trace, found


def _of_file(trace: Trace, file: GgufModel) -> Trace:
    """Return the trace with the file's bytes. Raises RecordError for a file of another shape."""
    mine, its = trace.geometry, file.known.geometry
    for name in ("layers", "experts", "k"):
        if getattr(mine, name) != getattr(its, name):
            has = f"{getattr(its, name)} {name}, and the trace {getattr(mine, name)}"
            raise RecordError(f"{file.path.name} is another model: it has {has}")
    if trace.header.provenance.source_sha256 != file.sha256:
        say(f"the trace was not recorded from {file.path.name}, whose routing may differ")
    stored = {name: getattr(its, name) for name in ("expert_bytes", "bytes_by_expert", "expert_bits")}
    geometry = mine.model_copy(update=stored)
    return replace(trace, header=trace.header.model_copy(update={"geometry": geometry}))


def _show(found: Verified) -> None:
    match = "" if found.points is None else "; it matches" if found.matches else "; it is the nearest, and none matches"
    show(f"replayed: {found.rule}{match}", "", table(found.counts()), "", table(found.times()))
    if found.line:
        base, slope = found.line
        show(
            "", f"time per token = {base:.3f} ms + {1000 * slope:.1f} us x misses, from the fewest and the most misses"
        )
    for remark in found.remarks:
        say(remark)


# -- evidence


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

    for source in sources:
        check_exists(source)
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

    if len(sources) > 1:
        raise ConfigError(f"{sources[0]} cannot be combined with {sources[1]}: pass one folder, or logs")
    if bool(calibration) == bool(fit):
        raise ConfigError(
            "missing calibration: pass exactly one of --calibration FILE and --fit PATTERN (both repeatable)"
        )
    if base and calibration:
        raise ConfigError("--base cannot be combined with --calibration")
    cells = read_folder(sources[0])
    machines = from_files(calibration) if calibration else from_fits(cells, fit or [], platform(base or BASE))
    return list(predictions(cells, machines)), machines


def _of_logs(files: list[Path], calibration: list[str] | None, about: AboutLogs) -> tuple[list[Prediction], Machines]:
    from moereplay.calibration.evidence import from_files, of_log

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
    runs = runs_of_logs(files, facts_of(about, files, device), fewest=1)
    routings = per_log(about.trace, files, "--trace") if about.trace else [None] * len(files)
    for routing in routings:
        if routing and not routing.exists():
            raise ConfigError(f"--trace {routing}: No such file or directory; check the path")
    say_when_compiling()
    return [of_log(machine, run, routing) for run, routing in zip(runs, routings, strict=True)], machines


def _show_folder(found: list[Prediction]) -> None:
    from moereplay.calibration.report import SPARE, refusal_rows, residual_rows, summary_line

    for rows in filter(None, (residual_rows(found), refusal_rows(found))):
        show(table(rows, spare=SPARE, more="--json"))
    for role in ("fit", "held_out"):
        show(f"{role.replace('_', ' '):9} {summary_line([each for each in found if each.role == role])}")


def _show_logs(found: list[Prediction], replayed: bool) -> None:
    from moereplay.calibration.report import quantity_rows

    show(table([row for each in found for row in quantity_rows(each)]))
    show("error: predicted / measured - 1; measured hits follow from the bytes in the log")
    if not replayed:
        show("predicted from the bytes in the log; pass --trace, its routing, to predict hits and bytes too")
