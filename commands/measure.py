"""`moereplay measure`: run real offloading on this machine and compare it with replays."""

from __future__ import annotations

import platform as this
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from moereplay.analysis.tables import table
from moereplay.commands import options
from moereplay.commands.model_options import slow_tier_of
from moereplay.commands.options import Given, Settings, grouped
from moereplay.commands.terminal import keeping, progress, say, show, show_json
from moereplay.results.errors import check_output
from moereplay.results.measured import FILE, load, write
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import Plan as Ready
from moereplay.sweeps import extra
from moereplay.tracegen.errors import require_torch
from moereplay.tracegen.offload.part import planned, require_place, slow_tier_named, throttle_named, tokens_of, way_of
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace

if TYPE_CHECKING:
    from moereplay.tracegen.offload.bench import Bench
    from moereplay.tracegen.offload.study import Measurement, Plan
PLATFORM = "platform"


class Where(NamedTuple):
    """Device that computes, and source of experts."""

    slow_tier: Annotated[
        str, typer.Option(help="Source of experts: disk:DIR, disk:DIR:buffered or pinned.", show_default=False)
    ]
    device: Annotated[str, typer.Option(help="Device that computes: cpu, cuda, cuda:1.")] = "cpu"
    throttle: Annotated[str, typer.Option(help="Upper bounds on the read rate: comma list of 400MB/s, none.")] = "none"
    threads: Annotated[int, typer.Option(min=1, help="Number of compute threads (CPU only).")] = 1
    decisions: Annotated[str, typer.Option(help="Engine that decides in a run: auto, compiled or reference.")] = "auto"


class Part(NamedTuple):
    """Part of the first request to run."""

    tokens: Annotated[int, typer.Option(min=2, help="Number of tokens to decode per run.")] = 24
    prompt: Annotated[int, typer.Option(min=0, help="Prompt tokens, processed in one pass.")] = 0
    calibration_tokens: Annotated[int, typer.Option(min=2, help="Number of tokens used for calibration.")] = 8
    layers: Annotated[int | None, typer.Option(min=1, help="Number of layers (default: all).")] = None


@grouped
def measure(
    trace: options.TracePath,
    *,
    where: Where,
    settings: Settings,
    policy_file: options.PolicyFiles = None,
    part: Part,
    repeat: Annotated[int, typer.Option(min=1, help="Number of runs per configuration.")] = 2,
    order_seed: Annotated[int, typer.Option(help="Seed of the order of the runs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the document, platforms and figure.")] = None,
) -> None:
    """Run real offloading on this machine under every configuration, and compare its times with replays. MEASURED."""
    from moereplay.analysis.figures.real_runs import check_throttles

    require_torch()
    require_place(slow_tier_named(where.slow_tier), where.device)
    if out:
        extra("plot", "matplotlib")
        check_output(out / FILE)
    opened = open_trace(trace)
    throttles = list(dict.fromkeys(map(throttle_named, where.throttle.split(","))))
    if out:
        check_throttles(throttles)
    measured, calibration = _parts(opened, part)
    configs = _configs(settings)
    plans = _checked(measured, configs, where)
    runs: list[Measurement] = []
    with _folder(out) as folder, _bench(plans, where, max(1, part.prompt)) as bench:
        plan = _plan(configs, throttles, (measured, calibration), (repeat, order_seed))
        with keeping(lambda: _kept(out)), progress(plan.runs, "real runs") as done:
            from moereplay.tracegen.offload.study import measure as run_all

            for run in run_all(bench, plan, folder, done):
                runs.append(run)
                if out and len(runs) % len(plan.cells) == 0:
                    say(f"wrote {write(out, _document(runs, bench.label, where.device))}")
    document = _document(runs, bench.label, where.device)
    _report(document, runs, as_json)
    if out:
        _draw(out)


def _parts(trace: Trace, part: Part) -> tuple[Trace, Trace]:
    """Return the part to measure, and other tokens of the same request for calibrations."""
    first, more, there = part.prompt + part.tokens, part.prompt + part.calibration_tokens, int(trace.request_offsets[1])
    if first + more > there:
        raise ConfigError(
            f"a run measures {first} tokens and a calibration {more} others, and the first request has {there}: pass a "
            "smaller --tokens, --calibration-tokens or --prompt"
        )
    calibration = tokens_of(trace, part.layers, first, first + more, part.prompt)
    return tokens_of(trace, part.layers, 0, first, part.prompt), calibration


def _configs(settings: Given) -> list[ReplayConfig]:
    if PLATFORM in settings.typed:
        raise ConfigError("--platform cannot be combined with measure, which calibrates this machine")
    return list(settings.preset_names())


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Yield the folder for platforms: the output, or a temporary one."""
    if out is None:
        with TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        out.mkdir(parents=True, exist_ok=True)
        yield out


def _checked(measured: Trace, configs: Sequence[ReplayConfig], where: Where) -> list[Ready]:
    """Plan every configuration before the first run. Checks that need no torch come before its import."""
    plans = [planned(measured, config) for config in configs]
    for ready in plans:
        way_of(ready, where.decisions)
    from moereplay.tracegen.offload.bench import check_computable

    for ready in plans:
        check_computable(ready)
    return plans


@contextmanager
def _bench(plans: Sequence[Ready], where: Where, most_tokens: int) -> Iterator[Bench]:
    from moereplay.tracegen.offload.bench import Bench, bits_of_all
    from moereplay.tracegen.offload.memory import compute_on

    compute_on(where.threads)
    bits = bits_of_all(plans)
    with slow_tier_of(where.slow_tier, where.device, plans[0].origin.geometry, bits) as slow:
        yield Bench.of(plans, slow, most_tokens, where.device, where.decisions)


def _plan(
    configs: Sequence[ReplayConfig],
    throttles: Sequence[float | None],
    parts: tuple[Trace, Trace],
    order: tuple[int, int],
) -> Plan:
    """Return the plan of runs; `order` is the number of repeats and the seed of their order."""
    from moereplay.tracegen.offload.study import Cell, Plan

    cells = [Cell(config, throttle) for throttle in throttles for config in configs]
    return Plan(cells, order[0], *parts, this.node() or "this machine", order[1])


def _kept(out: Path | None) -> str:
    """Describe what an interrupted measurement has stored."""
    if out is None or not (out / "measured.json").exists():
        return "nothing was written"
    return f"finished repeats are kept in {out}"


def _document(runs: Sequence[Measurement], label: str, device: str) -> dict[str, object]:
    from moereplay.tracegen.offload.memory import described
    from moereplay.tracegen.offload.study import run_document, summary

    about = {"device": described(device), "platform": "calibrated around the runs, by policies and throttle"}
    return {**about, "runs": [run_document(run, label) for run in runs], "summary": summary(runs)}


def _report(document: dict[str, object], runs: Sequence[Measurement], as_json: bool) -> None:
    from moereplay.tracegen.offload.study import LEGEND, SPARE, rows, summary_lines

    if as_json:
        show_json(document)
        return
    show(
        f"MEASURED on {document['device']}, compared with replays",
        "",
        table(rows(runs), spare=SPARE, more="--json"),
        *LEGEND,
        *summary_lines(runs),
    )


def _draw(out: Path) -> None:
    from moereplay.analysis.figures.catalogue import draw, save

    for path in save(draw("measured", load(out)), out / "measured"):
        say(f"wrote {path}")
