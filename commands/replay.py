"""`moereplay replay`: a trace against every combination of the listed settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moereplay.commands import options
from moereplay.commands.cores import CORES
from moereplay.commands.groups import grouped
from moereplay.commands.interrupt import keeping
from moereplay.commands.settings import Settings
from moereplay.commands.terminal import say, say_when_compiling, show, show_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from moereplay.simulator.config import ReplayConfig
    from moereplay.sweeps.grid import Outcome
    from moereplay.traces.schema import Trace


class Printed(NamedTuple):
    """What the table has, and how it is printed."""

    by: Annotated[str, typer.Option(help="hit_rate, ttft_mean_ms, tpot_ms, gb_moved, ...: best first.")] = "hit_rate"
    top: Annotated[int, typer.Option(min=0, help="Rows of each capacity; 0 for all.")] = 0
    csv: Annotated[bool, typer.Option("--csv", help="The rows as CSV, all columns and digits.")] = False
    markdown: Annotated[bool, typer.Option("--markdown", help="The rows as a Markdown table.")] = False


@grouped
def replay(
    trace: options.TracePath,
    *,
    settings: Settings,
    policy_file: options.PolicyFiles = None,
    engine: options.Engine = "compiled",
    workers: Annotated[int, typer.Option(help="Replays at once.")] = CORES,
    printed: Printed,
    as_json: Annotated[bool, typer.Option("--json", help="One configuration as one JSON document.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the results, as `sweep run` writes them.")] = None,
    events: Annotated[Path | None, typer.Option(help="Event log of one configuration (.parquet or .csv).")] = None,
) -> None:
    """Replay a trace: every combination of the comma lists, one table, Belady beside each hit rate. SIMULATED."""
    from moereplay.results.outputs import check_output
    from moereplay.simulator.oracle import check_profile_is_read
    from moereplay.simulator.replay import check_engine
    from moereplay.sweeps.grid import run_grid
    from moereplay.traces.store import open_trace

    check_engine(engine)
    for path in filter(None, (out and out / "part", events)):
        check_output(path)
    options.check_events(events)
    opened = open_trace(trace)
    called = settings.called()
    configs = list(called)
    check_profile_is_read(configs)
    _one_only(configs, as_json, events)
    _check_printed(printed, as_json)
    with keeping(lambda: _kept_in(out)), _progress(configs) as advance:
        outcomes = run_grid(opened, configs, workers, bool(events), done=advance, engine=engine)
        say_when_compiling()
        outcomes = list(_stored(out, outcomes, opened, configs, engine) if out else outcomes)
    if events:
        from moereplay.results.files import write_events

        write_events(events, outcomes[0][0].events)
    if as_json:
        show_json(_document(opened, configs[0], outcomes[0], engine))
        return
    _report(opened, configs, outcomes, list(called.values()), printed, engine)
    if out:
        say(f"wrote {out}/part-*/")
        say(f"figures: moereplay plot {out}")
    if events:
        say(f"wrote {events}")


def _one_only(configs: list[ReplayConfig], as_json: bool, events: Path | None) -> None:
    from moereplay.simulator.errors import ConfigError

    if len(configs) > 1 and (as_json or events):
        option = "--json" if as_json else "--events"
        raise ConfigError(f"{option} takes one configuration, these lists make {len(configs)}; use --out DIR for many")


def _check_printed(printed: Printed, as_json: bool) -> None:
    """Raises ConfigError before anything is replayed."""
    from moereplay.analysis.ratios import RANKED
    from moereplay.results.result import unknown
    from moereplay.simulator.errors import ConfigError

    if printed.by not in RANKED:
        raise unknown("ranking column", printed.by, RANKED)
    if as_json + printed.csv + printed.markdown > 1:
        raise ConfigError("--json, --csv and --markdown are three ways to print; give one")


def _progress(configs: list[ReplayConfig]) -> Any:
    from moereplay.commands.progress_bar import progress

    return progress(len(configs), "replays")


def _stored(
    out: Path, outcomes: Iterator[Outcome], trace: Trace, configs: list[ReplayConfig], engine: str
) -> Iterator[Outcome]:
    from moereplay.sweeps.parts import keep  # it imports polars, without which the table is printed

    return keep(out, trace, configs, outcomes, engine)


def _kept_in(out: Path | None) -> str:
    """What an interrupted grid has written."""
    if not (out and any(out.glob("part-*"))):
        return "nothing was written"
    return f"what was replayed is kept, one part each, in {out}"


def _document(trace: Trace, config: ReplayConfig, outcome: Outcome, engine: str) -> dict[str, object]:
    """What `--json` prints: the result, what is derived from it, and what is to be said of that."""
    from moereplay.analysis.metrics import figures_of
    from moereplay.results.files import to_frame
    from moereplay.results.remarks import idle
    from moereplay.simulator.remarks import remarks

    result, bound = outcome
    said = [*remarks(trace, [config], engine), *idle([result.to_json()])]
    derived = {"metrics": figures_of(to_frame([result], [bound])), "remarks": said}
    return result.to_json() | derived


def _report(
    trace: Trace,
    configs: list[ReplayConfig],
    outcomes: list[Outcome],
    presets: list[str],
    printed: Printed,
    engine: str,
) -> None:
    from moereplay.analysis.heading import heading
    from moereplay.analysis.ranking import best_of_each, judged, ranking
    from moereplay.analysis.short import drawn
    from moereplay.policies.grammar import foresight
    from moereplay.results.remarks import idle
    from moereplay.simulator.remarks import remarks

    results = [result for result, _ in outcomes]
    rows = [result.to_json() | {"bounds": bound} for result, bound in outcomes]
    called = {result.about["identity"]: name for result, name in zip(results, presets, strict=True) if name}
    shown = best_of_each(ranking(rows, printed.by, called), printed.top)
    if printed.csv or printed.markdown:
        _print_plain(shown, printed.csv)
        return
    table = [{name: value for name, value in row.items() if name != "identity"} for row in shown]
    show(
        *heading(trace, results),
        *drawn(table),
        *remarks(trace, configs, engine),
        *idle(rows),
        *judged(rows, called, foresight()),
    )
    if len(shown) < len(rows):
        say(f"{len(shown):,} of {len(rows):,} rows; --top 0 for all")


def _print_plain(rows: Sequence[Mapping[str, Any]], as_csv: bool) -> None:
    """For other programs: no heading, whole names."""
    from moereplay.analysis.tables import csv, markdown

    print(csv(rows) if as_csv else markdown(rows))
