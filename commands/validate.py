"""`moereplay validate`: compare live runs of a model with replays of its trace, policy set by policy set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moereplay.analysis.tables import table
from moereplay.analysis.validation import (
    Comparison,
    Runs,
    Tolerances,
    compare,
    document,
    heading,
    lines,
    measure_rows,
    quality_rows,
    to_frame,
)
from moereplay.commands import model_options, options
from moereplay.commands.options import Given, ListedSettings, grouped, naming
from moereplay.commands.terminal import progress, say, say_left_out, say_when_compiling, show, show_json
from moereplay.results.errors import ResultError, check_output
from moereplay.results.files import write_frame
from moereplay.results.settings import POLICIES
from moereplay.results.validation import FILE, QUALITY
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import plan, replay
from moereplay.sweeps import extra
from moereplay.sweeps.policy_sets import SHIPPED, SHIPPED_BASE, named_sets, read_sets
from moereplay.tracegen.errors import RecordError, require_torch
from moereplay.tracegen.folder import Folder, located
from moereplay.tracegen.live.requests import check_live, requests_of
from moereplay.tracegen.plan import DTYPES, QUANTISERS, check_device, check_placement
from moereplay.tracegen.precision import check_quantiser
from moereplay.traces.schema import Trace, memory_trace
from moereplay.traces.store import open_trace

if TYPE_CHECKING:
    from moereplay.tracegen.checkpoint import Loaded
    from moereplay.tracegen.live.run import Prepared


class Model(NamedTuple):
    """Model of the trace, as recorded unless an option overrides it."""

    model: Annotated[
        str, typer.Option(help="Model: miniature, a folder or a Hugging Face id (default: as recorded).")
    ] = ""
    device: Annotated[str, typer.Option(help="Device of the model: auto, cpu, cuda, cuda:1, ...")] = "auto"
    dtype: Annotated[str, typer.Option(help="Data type: float32, bfloat16, float16 (default: as recorded).")] = ""
    device_map: Annotated[str | None, typer.Option(help="Spread the model over devices: auto, balanced, ...")] = None
    quantiser: model_options.Quantiser = "affine"


class Allowed(NamedTuple):
    """Allowed difference between an open-loop replay and the live run."""

    tolerance_hit_rate: Annotated[
        float, typer.Option(min=0, help="Open loop: allowed absolute difference of the hit rate.")
    ] = 0.01
    tolerance_time: Annotated[
        float, typer.Option(min=0, help="Open loop: allowed relative difference of TTFT and TPOT.")
    ] = 0.02


@grouped
def validate(
    trace: options.TracePath,
    *,
    model: Model,
    sets: Annotated[
        Path | None, typer.Option(help="File of named policy sets (.toml), see docs/validation.md.")
    ] = None,
    settings: ListedSettings,
    policy_file: options.PolicyFiles = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Run only the first N requests.")] = None,
    allowed: Allowed,
    events: Annotated[
        bool, typer.Option(help="Also compare event logs; takes about 10 kB per token and layer.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the comparison (Parquet) and figures.")] = None,
) -> None:
    """Compare live runs with replays of the trace. The exit code is 1 if they differ by more than the tolerance."""
    if settings.preset and sets:
        raise ConfigError("--preset cannot be combined with --sets")
    require_torch()
    check_quantiser(model.quantiser)
    opened = _first(open_trace(trace), requests)
    configs = settings.of_presets({}) if settings.preset else _configs(sets, settings)
    _check(opened, configs)
    if out:
        extra("plot", "matplotlib")
        check_output(out / FILE)
    tolerances = Tolerances(hit_rate=allowed.tolerance_hit_rate, time=allowed.tolerance_time)
    stored = as_recorded(opened, model.dtype, model.device_map)
    check_device(model.device)
    loaded = loaded_for(opened, folder_of(opened, model.model), stored | {"device": model.device})
    runs = _prepared(opened, configs, loaded, model.quantiser)
    say_when_compiling()
    with progress(len(configs) * opened.tokens, "tokens") as advance:
        found = [_compared(name, run, opened, tolerances, events, advance) for name, run in runs.items()]
    _report(opened, found, as_json)
    if out:
        _write(out, found)
    if not all(each.passed for each in found):
        raise typer.Exit(1)


def _first(trace: Trace, requests: int | None) -> Trace:
    """Return the trace, or a trace of its first requests."""
    if requests is None or requests >= trace.requests:
        return trace
    return memory_trace(trace.header, [trace.request(at) for at in range(requests)], trace.router_bias)


def _configs(path: Path | None, settings: Given) -> dict[str, ReplayConfig]:
    """Return the policy sets of the file, of the options, or the bundled three. Options override [base] of the file."""
    given = {name: text for name, text in settings.lists().items() if text}
    if path is not None:
        sets, base = read_sets(path)
    elif given.keys() & set(POLICIES):
        named = named_sets({"given": {}}, {**SHIPPED_BASE, **given})
        return {name.removeprefix("given "): config for name, config in named.items()}
    else:
        sets, base = SHIPPED, SHIPPED_BASE
    return named_sets(sets, {**base, **given})


def _check(trace: Trace, configs: Mapping[str, ReplayConfig]) -> None:
    """Raises ConfigError naming a set that cannot be replayed or needs the future, before the model is loaded."""
    requests_of(trace, 1)
    for name, config in configs.items():
        with naming(name):
            check_live(config)
            plan(trace, config)
            config.policy_set().check(trace.capabilities, trace.header.lookahead_depth)  # a live run has no future


def folder_of(trace: Trace, named: str) -> Folder:
    """Locate the checkpoint of the trace. Raises RecordError, before torch is imported, if the location is unknown."""
    recorded = trace.header.provenance
    if not (named or recorded.revision or recorded.model == "miniature"):  # the hub's models have a revision
        raise RecordError(
            f"missing model: the trace was recorded from the folder {recorded.model!r}; pass --model FOLDER"
        )
    return located(named or recorded.model, None if named else recorded.revision or None)


def as_recorded(trace: Trace, dtype: str, device_map: str | None) -> dict[str, Any]:
    """Return dtype and quantisation for `load`, as recorded unless an option overrides them."""
    stored, _, quantiser = trace.header.provenance.dtype.partition("+")
    recorded = {"dtype": stored if stored in DTYPES else "auto", "device_map": device_map}
    recorded["quantise"] = quantiser if quantiser in QUANTISERS else None
    asked = recorded | ({"dtype": dtype, "quantise": None} if dtype else {})
    check_placement(**asked)
    return asked


def loaded_for(trace: Trace, folder: Folder, stored: dict[str, Any]) -> Loaded:
    """Load the model of the trace. Raises RecordError if the trace is of another model."""
    from moereplay.tracegen.checkpoint import load
    from moereplay.tracegen.live.run import check_same_model
    from moereplay.tracegen.modules import discover

    loaded, recorded = load(folder, **stored), trace.header.provenance
    check_same_model(trace, loaded, discover(loaded.model))
    if recorded.dtype != loaded.dtype:
        was = recorded.dtype or "an unknown dtype"
        say(f"note: the trace was recorded in {was}, the model runs in {loaded.dtype}: some choices will differ")
    return loaded


def _prepared(trace: Trace, configs: Mapping[str, ReplayConfig], loaded: Loaded, quantiser: str) -> dict[str, Prepared]:
    """Prepare every live run before the first starts, and print how experts at few bits are stored."""
    from moereplay.tracegen.live.run import prepare, requests_of

    to_run, runs = requests_of(trace), {}
    for name, config in configs.items():
        with naming(name):
            runs[name] = prepare(loaded, to_run, config, quantiser=quantiser)
        if stored := runs[name].stored:
            say(f"{name}: {stored}")
    return runs


def _compared(
    name: str, run: Prepared, trace: Trace, allowed: Tolerances, log: bool, advance: Callable[[int], None]
) -> Comparison:
    """Compare one live run with its two replays."""
    config = run.plan.config
    live = run.run(log=log, quality=run.plan.chosen.open_loop, progress=advance)
    recorded = live.trace()
    runs = Runs(live.result, replay(trace, config, log), replay(recorded, config, log), recorded)
    score = live.quality.total.row() if live.quality and live.quality.total.tokens else {}
    return compare(name, runs, trace, allowed, {measure: score[measure] for measure in QUALITY if score})


def _report(trace: Trace, found: Sequence[Comparison], as_json: bool) -> None:
    if as_json:
        show_json(document(found))
        return
    show(*heading(trace, found), table(measure_rows(found)))
    if rows := quality_rows(found):
        show(table(rows))
    show(*lines(found))


def _write(out: Path, found: Sequence[Comparison]) -> None:
    """Write the comparison as Parquet, and its figures."""
    from moereplay.analysis.figures.catalogue import draw_all, save

    frame = to_frame(found)
    write_frame(frame, out / FILE)
    paths = [out / FILE]
    try:
        drawn = draw_all(frame)
        paths += [path for name, figure in drawn.figures for path in save(figure, out / "figures" / name)]
        say_left_out(drawn)
    except ResultError as refusal:
        say(f"note: {refusal}")
    for path in paths:
        say(f"wrote {path}")
