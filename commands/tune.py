"""`moereplay tune`: search a space of configurations for its Pareto set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from moereplay.commands.checks import Checks
from moereplay.commands.options import CORES, PolicyFiles, grouped
from moereplay.commands.terminal import INTERRUPTED, interruptible, keeping, say, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moereplay.sweeps.checks import Checker
    from moereplay.sweeps.store import Folder
    from moereplay.sweeps.tune import Found, Search

OBJECTIVES = "tpot_ms,mass_share_kept,gb_moved"  #: speed, fidelity and traffic


class Drawing(NamedTuple):
    """Choice of trials."""

    trials: Annotated[int, typer.Option(min=1, help="Total number of replays, including earlier runs.")] = 200
    sampler: Annotated[str, typer.Option(help="Sampler: tpe, nsgaii or random.")] = "tpe"
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampler.")] = 0


@grouped
def tune(
    file: Annotated[Path, typer.Argument(help="Experiment file; its axes span the search space.", show_default=False)],
    *,
    out: Annotated[
        str, typer.Option(help="Folder for the journal and every replay; a rerun continues in it.")
    ] = "tune",
    objectives: Annotated[
        str,
        typer.Option(help="Comma list of metrics to optimise: tpot_ms, ttft_mean_ms, mass_share_kept, gb_moved, ..."),
    ] = OBJECTIVES,
    drawing: Drawing,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Override an entry of the file: table.key=value (repeatable).")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of parallel replays.")] = CORES,
    engine: Annotated[str, typer.Option(help="compiled or reference (default: compiled).", show_default=False)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the Pareto set as JSON lines.")] = False,
    policy_file: PolicyFiles = None,
    checks: Checks,
) -> None:
    """Search an experiment for its Pareto set: configurations that no other beats in every objective. SIMULATED.

    With --every, the Pareto set and one of every N other trials are also measured, or run live.
    """
    from moereplay.results.metrics import named
    from moereplay.simulator.errors import ConfigError
    from moereplay.simulator.replay import ENGINES
    from moereplay.sweeps.experiment.file import read
    from moereplay.sweeps.jobs import open_traces
    from moereplay.sweeps.store import Folder, is_url
    from moereplay.sweeps.tune import Search, check

    if is_url(out):
        raise ConfigError(f"invalid --out {out}: expected a folder, for the journal of the search")
    engine = engine or ENGINES[0]
    experiment = read(file, changes or ())
    traces = open_traces(experiment.traces, file.parent, file)
    search = Search(experiment, file, traces, tuple(map(named, objectives.split(","))), *drawing, engine)
    check(search)
    checker = _checker(checks, search)
    folder = Folder(Path(out))
    folder.prepare()
    found = _search(search, folder, workers)
    say(f"wrote {out}/part-*/, every replay; run the same command with more --trials to continue")
    if checker:
        _check(checker, search, folder.path, found, checks.every or 1)
    _print(search, found, as_json)


def _search(search: Search, folder: Folder, workers: int) -> list[Found]:
    """Run or resume a search. An interrupt ends it after the running replays."""
    from moereplay.commands.progress import progress
    from moereplay.sweeps.experiment.expand import platforms
    from moereplay.sweeps.local import LocalExecutor
    from moereplay.sweeps.parts import sweep_provenance
    from moereplay.sweeps.run import NOGIL
    from moereplay.sweeps.tune import tune as search_by

    about = sweep_provenance(search.file.name, search.traces, search.engine, platforms(search.experiment))
    executor = LocalExecutor(workers, search.engine == NOGIL, folder, about)
    try:
        kept = f"finished replays are kept in {folder.path}; run the same command to resume"
        with keeping(lambda: kept), progress(search.trials, "trials") as advance, interruptible() as stopping:
            found = search_by(search, folder.path, executor, advance, stopping)
            if stopping():
                say(f"stopped: {kept}")
                raise typer.Exit(INTERRUPTED)
    finally:
        executor.close()
    return found


def _print(search: Search, found: Sequence[Found], as_json: bool) -> None:
    from moereplay.analysis.tables import table
    from moereplay.policies.grammar import foresight
    from moereplay.results.metrics import METRICS
    from moereplay.results.remarks import assumptions
    from moereplay.sweeps.tune import jobs_found
    from moereplay.traces.documents import json_text
    from moereplay.traces.synthetic import synthetic
    from moereplay.traces.texts import counted

    rows = [{**each.values, **each.settings} for each in found]
    rows.sort(key=lambda row: [-METRICS[name].score(row[name]) for name in search.objectives])
    if as_json:
        for row in rows:
            print(json_text(row))
        return
    routing = assumptions(synthetic(trace.header.provenance) for trace in search.traces)
    beaten = f"nothing tried beats in all of {', '.join(search.objectives)}"
    show(f"SIMULATED: {counted(len(rows), 'configuration')} that {beaten}", *routing, "", table(rows))
    knows, jobs = foresight(), jobs_found(search, found)
    if knowing := sum(knows(job.config.model_dump()) for job in jobs) // len(search.traces):
        show(f"with knowledge of the future: {knowing} of these; search without such policies for what can be used")


def _checker(checks: Checks, search: Search) -> Checker | None:
    """Return the checker of trials, None without --every. It takes all platforms that the search may draw."""
    from moereplay.commands.checks import checker_of
    from moereplay.sweeps.tune import platforms_of

    return checker_of(checks, search.traces, platforms_of(search))


def _check(checker: Checker, search: Search, folder: Path, found: Sequence[Found], every: int) -> None:
    """Check the Pareto set first, then one of every N other trials in their order."""
    from moereplay.commands.checks import checked
    from moereplay.sweeps.tune import jobs_found, tried

    trials = tried(search, folder)
    front = jobs_found(search, found)
    checked(checker, search.traces, folder, trials, lambda kept: kept.chosen_of_search(front, trials, every))
