"""`moereplay replay` replays a trace under every combination of settings; `timeline` writes one replay over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moereplay.analysis.ranking import best_of_each, heading, judged, ranking, served, served_at, served_lines
from moereplay.analysis.tables import csv, drawn, markdown
from moereplay.commands import options
from moereplay.commands.options import CORES, Settings, grouped
from moereplay.commands.terminal import (
    StatusLine,
    keeping,
    progress,
    say,
    say_shared,
    say_when_compiling,
    show,
    show_json,
)
from moereplay.policies.grammar import foresight
from moereplay.results.errors import check_output
from moereplay.results.remarks import bracketed, idle
from moereplay.results.result import Result, ranking_column
from moereplay.results.serving import Holding, Level, parse_level
from moereplay.simulator.bounds import remarks
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.interface import check_profile_is_read
from moereplay.simulator.replay import Plan, check_engine, plan
from moereplay.simulator.replay import replay as run
from moereplay.simulator.times import homes_of
from moereplay.sweeps.grid import Outcome, Repeats, all_resident, at_rate, largest_rate, run_grid
from moereplay.traces.passes import schedule
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace
from moereplay.traces.texts import counted, typed

if TYPE_CHECKING:
    from moereplay.analysis.timeline import Machine


class Printed(NamedTuple):
    """Rows of the table and its form, and which rows are stored."""

    by: options.By = "hit_rate"
    top: Annotated[int, typer.Option(min=0, help="Maximum number of rows per capacity; 0 for all.")] = 0
    csv: Annotated[bool, typer.Option("--csv", help="Print the rows as CSV, with all columns and digits.")] = False
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the rows as a Markdown table.")] = False
    request_layers: Annotated[
        bool, typer.Option("--request-layers", help="With --out: keep rows by request and layer, however many.")
    ] = False


class Serving(NamedTuple):
    """Service level, and the search for the rate that holds it."""

    slo: Annotated[
        str, typer.Option(help="Service level for goodput: ttft=2s,tpot=100ms,e2e=30s,share=0.9 (of requests).")
    ] = ""
    find_rate: Annotated[
        bool,
        typer.Option("--find-rate", help="With --slo: search for the largest Poisson rate that holds it."),
    ] = False


@grouped
def replay(
    trace: options.TracePath,
    *,
    settings: Settings,
    policy_file: options.PolicyFiles = None,
    engine: options.Engine = "compiled",
    workers: Annotated[int, typer.Option(help="Number of parallel replays.")] = CORES,
    printed: Printed,
    serving: Serving,
    as_json: Annotated[bool, typer.Option("--json", help="Print one configuration as one JSON document.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for results, in the format of `sweep run`.")] = None,
    events: Annotated[
        Path | None, typer.Option(help="Event log to write, for one configuration (.parquet or .csv).")
    ] = None,
) -> None:
    """Replay a trace under every combination of the comma lists, and print a table with an upper bound. SIMULATED."""
    check_engine(engine)
    for path in filter(None, (out and out / "part", events)):
        check_output(path)
    options.check_events(events)
    opened = open_trace(trace)
    names = settings.preset_names()
    configs = list(names)
    check_profile_is_read(configs)
    ranking_column(printed.by)
    if as_json + printed.csv + printed.markdown > 1:
        raise ConfigError("--json, --csv and --markdown are mutually exclusive")
    if printed.request_layers and out is None:
        raise ConfigError("--request-layers requires --out")
    if serving.find_rate:
        _search_rates(opened, configs, serving, printed, [as_json, bool(events), bool(out)], engine)
        return
    _one_only(configs, as_json, events)
    level = _level(serving)
    with keeping(lambda: _kept_in(out)), progress(len(configs), "replays") as advance:
        taken: list[int] = []
        by_layer = out is not None and (printed.request_layers or None)
        outcomes = run_grid(
            opened, configs, workers, bool(events), done=advance, engine=engine, took=taken.append, by_layer=by_layer
        )
        say_when_compiling()
        outcomes = list(_stored(out, outcomes, opened, configs, engine) if out else outcomes)
    if events:
        from moereplay.results.files import write_events

        write_events(events, outcomes[0][0].events)
    results = [result for result, _ in outcomes]
    served = _served(opened, configs, results, level, engine)
    if as_json:
        show_json(_document(opened, configs[0], outcomes[0], engine) | ({"serving": served[0]} if served else {}))
        return
    _report(opened, configs, outcomes, list(names.values()), printed, engine, served)
    if not (printed.csv or printed.markdown):
        _print_served(served, level, printed)
    say_shared(sum(taken), len(configs), "replays")
    if out:
        say(f"wrote {out}/part-*/")
        say(f"figures: moereplay plot {typed(out)}")
    if events:
        say(f"wrote {events}")


# -- serving


def _level(serving: Serving) -> Level | None:
    """Return the service level, or None without one. Raises ResultError."""
    return parse_level(serving.slo) if serving.slo else None


def _served(
    trace: Trace, configs: Sequence[ReplayConfig], results: Sequence[Result], level: Level | None, engine: str
) -> list[dict[str, Any]]:
    """Return the serving figures of results, none without arrivals and a level."""
    if level is None and not any(config.arrive for config in configs):
        return []
    made = {config: run(trace, config, engine=engine) for config in dict.fromkeys(map(all_resident, configs))}
    return served(results, level, [made[all_resident(config)] for config in configs])


def _print_served(rows: Sequence[dict[str, Any]], level: Level | None, printed: Printed) -> None:
    if rows:
        show(*served_lines(rows, level, "csv" if printed.csv else "markdown" if printed.markdown else ""))


def _search_rates(
    trace: Trace,
    configs: Sequence[ReplayConfig],
    serving: Serving,
    printed: Printed,
    others: Sequence[bool],
    engine: str,
) -> None:
    """Print the largest rate of each configuration that holds the level. Raises ConfigError for other outputs."""
    level = _level(serving)
    if level is None:
        raise ConfigError("--find-rate requires --slo, as in --slo ttft=2s,tpot=100ms")
    if any(others):
        raise ConfigError("--find-rate cannot be combined with --json, --events or --out; --csv prints every figure")
    for config in configs:
        if config.arrive:
            raise ConfigError("--find-rate cannot be combined with --arrivals: it searches for the arrival rate")
        at_rate(config, "1")
    say_when_compiling()
    line, searches, replays = StatusLine(), list(dict.fromkeys([*configs, *map(all_resident, configs)])), 0

    def replayed(config: ReplayConfig, requests: int) -> Result:
        nonlocal replays
        replays += 1
        line.show(lambda: f"{len(found)} of {len(searches)} rates found, replay {replays} of {requests:,} requests")
        return run(trace, config, engine=engine, requests=requests)

    found: dict[ReplayConfig, Holding] = {}
    with keeping(lambda: "nothing was written"):
        for config in searches:
            found[config] = largest_rate(replayed, config, level, Repeats.of(trace))
    line.close()
    rows = served_at([found[config] for config in configs], level, [found[all_resident(config)] for config in configs])
    _print_served(rows, level, printed)


def _one_only(configs: list[ReplayConfig], as_json: bool, events: Path | None) -> None:
    if len(configs) > 1 and (as_json or events):
        option = "--json" if as_json else "--events"
        raise ConfigError(
            f"{option} requires one configuration; these options expand to {len(configs)}: use --out DIR for several"
        )


def _stored(
    out: Path, outcomes: Iterator[Outcome], trace: Trace, configs: list[ReplayConfig], engine: str
) -> Iterator[Outcome]:
    from moereplay.sweeps.parts import keep

    return keep(out, trace, configs, outcomes, engine)


def _kept_in(out: Path | None) -> str:
    """Describe what an interrupted grid has stored."""
    if not (out and any(out.glob("part-*"))):
        return "nothing was written"
    return f"finished replays are kept in {out}"


def _document(trace: Trace, config: ReplayConfig, outcome: Outcome, engine: str) -> dict[str, object]:
    """Return the document of `--json`: the result, its metrics and remarks."""
    from moereplay.analysis.metrics import figures_of
    from moereplay.results.files import to_frame

    result, bound = outcome
    said = [*remarks(trace, [config], engine), *bracketed([{"bounds": bound}]), *idle([result.to_json()])]
    derived = {"metrics": figures_of(to_frame([result], [bound])), "remarks": said}
    return result.to_json() | derived


def _report(
    trace: Trace,
    configs: list[ReplayConfig],
    outcomes: list[Outcome],
    presets: list[str],
    printed: Printed,
    engine: str,
    served: Sequence[dict[str, Any]],
) -> None:
    results = [result for result, _ in outcomes]
    rows = [result.to_json() | {"bounds": bound} for result, bound in outcomes]
    names = {result.about["identity"]: name for result, name in zip(results, presets, strict=True) if name}
    shown = best_of_each(ranking(rows, printed.by, names), printed.top)
    if printed.csv or printed.markdown:
        more = {result.about["identity"]: row for result, row in zip(results, served, strict=False)}
        plain = [{**row, **more.get(row["identity"], {})} for row in shown]
        print(csv(plain) if printed.csv else markdown(plain))
        return
    table = [{name: value for name, value in row.items() if name != "identity"} for row in shown]
    show(
        *heading(trace, results),
        *drawn(table, serving=bool(served)),
        *remarks(trace, configs, engine),
        *bracketed(rows),
        *idle(rows),
        *judged(rows, names, foresight()),
    )
    if len(shown) < len(rows):
        say(f"{len(shown):,} of {len(rows):,} rows; --top 0 for all")


# -- timeline


@grouped
def timeline(
    trace: options.TracePath,
    *,
    settings: Settings,
    policy_file: options.PolicyFiles = None,
    engine: options.Engine = "compiled",
    first_pass: Annotated[int, typer.Option(min=0, help="First pass to show.")] = 0,
    passes_shown: Annotated[int, typer.Option(min=0, help="Number of passes to show; 0 for all that follow.")] = 0,
    out: Annotated[Path, typer.Option(help="File to write: .json or .json.gz.")] = Path("timeline.json.gz"),
) -> None:
    """Write one replay as a timeline for ui.perfetto.dev: compute, stalls, links, queue, cache. SIMULATED."""
    from moereplay.analysis.timeline import Timeline, limited
    from moereplay.results.trace_events import check_name, write_items

    check_engine(engine)
    check_name(out)
    check_output(out)
    opened = open_trace(trace)
    config = settings.only("timeline")
    passes = None if config.arrive else schedule(opened, config.schedule)
    ready, shown = plan(opened, config), range(0)
    if passes is not None:
        shown = _shown(len(passes), first_pass, passes_shown)
    say_when_compiling()
    with keeping(lambda: "nothing was written"):
        result = run(opened, config, log=True, engine=engine)
        if passes is None:
            shown = _shown(result.events[-1].step_pass + 1, first_pass, passes_shown)
        made = Timeline(result.events, result.totals["time_ns"], _machine(ready), passes)
        title = f"{result.about['label']}: {result.about['model']}, trace {str(result.about['trace'])[:12]}"
        count = write_items(out, title, _about(result, shown), limited(made, shown))
    say(
        f"wrote {out}: {len(shown):,} of {len(made):,} passes, {counted(count, 'event')}; open it in https://ui.perfetto.dev"
    )


def _shown(passes: int, first: int, many: int) -> range:
    """Return the numbers of the passes to show. Raises ConfigError if there are none."""
    if first >= passes:
        raise ConfigError(f"invalid --first-pass {first}: expected 0 to {passes - 1}")
    return range(first, min(passes, first + many) if many else passes)


def _machine(ready: Plan) -> Machine:
    """Describe the machine, which the event log does not contain."""
    from moereplay.analysis.timeline import Machine

    platform, config = ready.machine, ready.config
    below = [*(tier.name for tier in platform.tiers), platform.slow_tier]
    links = [f"{link.tier or below[0]} to {platform.fast_tier}" for link in platform.links]
    several = len(links) > 1
    return Machine(
        links=[f"{row} {name}" if several else name for row, name in enumerate(links)],
        fills=[f"{source} to {tier.name}" for source, tier in zip(below[1:], platform.tiers, strict=True)],
        homes=homes_of(platform, ready.layout.geometry),
        sizes=ready.layout.tiers,
        queued_together=platform.queues_together(config.contract),
        warm=config.warm,
    )


def _about(result: Result, shown: range) -> dict[str, Any]:
    """Return `otherData` of the file: label, identity, configuration, counters of the whole replay, passes shown."""
    passes = {"first": shown.start, "last": shown.stop - 1}
    return {**result.about, "configuration": result.config, "totals": result.totals, "passes_shown": passes}
