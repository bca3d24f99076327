"""`moereplay timeline`: one replay as a file of tracks over time, for ui.perfetto.dev."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moereplay.commands import options
from moereplay.commands.groups import grouped
from moereplay.commands.interrupt import keeping
from moereplay.commands.settings import Settings
from moereplay.commands.terminal import say, say_when_compiling

if TYPE_CHECKING:
    from moereplay.analysis.timeline_moves import Machine
    from moereplay.commands.settings import Given
    from moereplay.results.result import Result
    from moereplay.simulator.config import ReplayConfig
    from moereplay.simulator.replay import Plan


@grouped
def timeline(
    trace: options.TracePath,
    *,
    settings: Settings,
    policy_file: options.PolicyFiles = None,
    engine: options.Engine = "compiled",
    first_pass: Annotated[int, typer.Option(min=0, help="The first pass to show.")] = 0,
    passes_shown: Annotated[int, typer.Option(min=0, help="How many to show; 0 for all that follow.")] = 0,
    out: Annotated[Path, typer.Option(help="The file: .json, or .json.gz.")] = Path("timeline.json.gz"),
) -> None:
    """Write one replay as a timeline that ui.perfetto.dev opens: compute, stalls, links, queue, cache. SIMULATED."""
    from moereplay.analysis.timeline import Timeline, limited
    from moereplay.results.outputs import check_output
    from moereplay.results.trace_events import check_name, write_items
    from moereplay.simulator.replay import check_engine, plan, replay
    from moereplay.traces.passes import schedule
    from moereplay.traces.store import open_trace

    check_engine(engine)
    check_name(out)
    check_output(out)
    opened = open_trace(trace)
    config = _only(settings)
    passes = schedule(opened, config.passes)
    shown = _shown(len(passes), first_pass, passes_shown)
    ready = plan(opened, config)
    say_when_compiling()
    with keeping(lambda: "nothing was written"):
        result = replay(opened, config, log=True, engine=engine)
        made = Timeline(result.events, result.totals["time_ns"], _machine(ready), passes)
        count = write_items(out, _title(result), _about(result, shown), limited(made, shown))
    say(f"wrote {out}: {len(shown):,} of {len(passes):,} passes, {count:,} events; open it in https://ui.perfetto.dev")


def _only(settings: Given) -> ReplayConfig:
    """The one configuration. Raises ConfigError if there are more."""
    from moereplay.simulator.errors import ConfigError

    configs = list(settings.called())
    if len(configs) > 1:
        raise ConfigError(f"a timeline is of one configuration, these lists make {len(configs)}; give each one value")
    return configs[0]


def _shown(passes: int, first: int, many: int) -> range:
    """Numbers of the passes to show. Raises ConfigError if there are none."""
    from moereplay.simulator.errors import ConfigError

    if first >= passes:
        raise ConfigError(f"--first-pass {first}: the last pass of this replay is {passes - 1}; passes count from 0")
    return range(first, min(passes, first + many) if many else passes)


def _machine(ready: Plan) -> Machine:
    """What the log leaves out."""
    from moereplay.analysis.timeline_moves import Machine
    from moereplay.simulator.homes import homes

    platform, config = ready.machine, ready.config
    below = [*(tier.name for tier in platform.tiers), platform.slow_tier]
    links = [f"{link.tier or below[0]} to {platform.fast_tier}" for link in platform.links]
    several = len(links) > 1
    return Machine(
        links=[f"{row} {name}" if several else name for row, name in enumerate(links)],
        fills=[f"{source} to {tier.name}" for source, tier in zip(below[1:], platform.tiers, strict=True)],
        homes=homes(ready.layout.geometry.experts, platform.shares),
        sizes=ready.layout.tiers,
        loads_together=platform.overlap == "none" and config.contract == "atomic",
        warm=config.warm,
    )


def _title(result: Result) -> str:
    about = result.about
    return f"{about['label']}: {about['model']}, trace {str(about['trace'])[:12]}"


def _about(result: Result, shown: range) -> dict[str, Any]:
    """The file's `otherData`: label, identity, configuration, every counter of the whole replay, and what is shown."""
    passes = {"first": shown.start, "last": shown.stop - 1}
    return {**result.about, "configuration": result.config, "totals": result.totals, "passes_shown": passes}
