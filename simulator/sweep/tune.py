"""A search over the axes of an experiment, by optuna: several figures at once, from a journal that it resumes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import policies
from policies.contract import PolicyError
from simulator.errors import ConfigError
from simulator.experiment.expand import Choices, Interval, axes, check_values, is_excluded
from simulator.experiment.schema import Experiment, Settings
from simulator.experiment.settings import configuration
from simulator.extras import extra
from simulator.replay import plan
from simulator.sweep.dispatch import Dispatcher
from simulator.sweep.executor import Executor
from simulator.sweep.figures import FIGURES
from simulator.sweep.jobs import Job, job_of
from traces.schema import Trace
from traces.spelling import hint

JOURNAL = "tune.journal"
SAMPLERS = ("tpe", "nsgaii", "random")


class Search(NamedTuple):
    """What to look for, where, and how."""

    experiment: Experiment
    file: Path
    traces: Sequence[Trace]
    objectives: tuple[str, ...]
    trials: int
    sampler: str
    seed: int
    engine: str


class Found(NamedTuple):
    """A trial of the Pareto set."""

    settings: Settings
    values: dict[str, float]  #: objective -> its mean over the traces


def check(search: Search) -> None:
    """Raises ConfigError for unknown words anywhere, and for a grid that is smaller than the search."""
    check_values(search.experiment, search.file)
    for name, known in (*((one, FIGURES) for one in search.objectives), (search.sampler, SAMPLERS)):
        if name not in known:
            raise ConfigError(f"tune knows no {name!r}: {hint(name, known)}")
    size = grid_size(axes(search.experiment, search.file))
    if size is not None and size <= search.trials:
        raise ConfigError(
            f"{search.file}: the grid has {size:,} combinations, no more than {search.trials:,} trials: enumerating "
            f"is cheaper and finds everything: moereplay sweep run {search.file}"
        )


def grid_size(across: Sequence[Choices]) -> int | None:
    """Combinations of the axes; None if one of them is a range."""
    return None if any(isinstance(axis, Interval) for axis in across) else prod(map(len, across))


def tune(
    search: Search,
    out: Path,
    executor: Executor,
    advance: Callable[[int], None] = lambda trials: None,
    stopping: Callable[[], bool] = lambda: False,
) -> list[Found]:
    """Search until there are `trials`, resuming the journal in `out`; every replay is kept there as a part.

    `advance` hears of trials as they are done. The same seed, sampler and number of slots give the same search.
    """
    study, across = _study(search, out), axes(search.experiment, search.file)
    known: dict[tuple[str, str], dict[str, float]] = {}
    advance(min(len(study.trials), search.trials))
    while (done := len(study.trials)) < search.trials and not stopping():
        asked = [study.ask() for _ in range(min(executor.slots, search.trials - done))]
        jobs = [_jobs(search, suggested(across, trial)) for trial in asked]
        new = {job.key: job for each in jobs for job in each if job.key not in known}
        known |= Dispatcher(new.values(), executor, search.engine, False).run(lambda _: None, lambda: False).figures
        for trial, each in zip(asked, jobs, strict=True):
            _tell(study, trial, [_values(search, known.get(job.key, {})) for job in each])
        advance(len(asked))
    found = [_found(search, across, trial) for trial in study.best_trials]
    return [each for index, each in enumerate(found) if each not in found[:index]]


def suggested(across: Sequence[Choices], trial: Any) -> Settings:
    """One value of every axis: numbers as numbers, the rest as categories."""
    settings: Settings = {}
    for index, axis in enumerate(across):
        if isinstance(axis, Interval):
            settings[axis.name] = axis.ends.at(trial.suggest_float(f"{index} {axis.name}", 0.0, 1.0))
        else:
            settings |= axis[trial.suggest_categorical(f"{index} {', '.join(axis[0])}", range(len(axis)))]
    return settings


def _jobs(search: Search, chosen: Mapping[str, Any]) -> list[Job]:
    """A replay per trace; none if the combination is excluded or impossible."""
    settings = {**search.experiment.base, **chosen}
    if is_excluded(search.experiment, settings):
        return []
    try:
        config = configuration(settings)
        for trace in search.traces:
            plan(trace, config)
    except (ConfigError, PolicyError):
        return []
    return [job_of(trace, config) for trace in search.traces]


def _values(search: Search, figures: Mapping[str, float]) -> list[float] | None:
    return [figures[name] for name in search.objectives] if set(search.objectives) <= figures.keys() else None


def _tell(study: Any, trial: Any, values: Sequence[list[float] | None]) -> None:
    """Means over the traces; a trial without a figure has failed, and the sampler learns nothing from it."""
    failed = extra("tune", "optuna.trial").TrialState.FAIL
    complete = [each for each in values if each is not None]
    if values and len(complete) == len(values):
        study.tell(trial, [mean(column) for column in zip(*complete, strict=True)])
    else:
        study.tell(trial, state=failed)


def _found(search: Search, across: Sequence[Choices], trial: Any) -> Found:
    chosen = suggested(across, extra("tune", "optuna.trial").FixedTrial(trial.params))
    return Found({**search.experiment.base, **chosen}, dict(zip(search.objectives, trial.values, strict=True)))


def _study(search: Search, out: Path) -> Any:
    """The study of the journal, or a new one; another search in the same folder is another study."""
    optuna = extra("tune", "optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    journal = extra("tune", "optuna.storages.journal").JournalFileBackend(str(out / JOURNAL))
    storage = optuna.storages.JournalStorage(journal)
    directions = ["maximize" if FIGURES[name] > 0 else "minimize" for name in search.objectives]
    own = [policy.label for given in policies.GIVEN.values() for policy in given.values()]
    name = f"{' '.join(search.objectives)} by {search.sampler} from {search.seed}"
    name += f" with {' '.join(own)}" if own else ""  # trials of another version of a policy are another study's
    study = optuna.create_study(storage=storage, study_name=name, directions=directions, load_if_exists=True)
    study.sampler = _sampler(search, len(study.trials))
    for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):  # a killed search left them
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return study


def _sampler(search: Search, done: int) -> Any:
    """Seeded by what is already done: a resumed search does not draw the same again."""
    samplers = extra("tune", "optuna.samplers")
    seed = search.seed + done
    if search.sampler == "random":
        return samplers.RandomSampler(seed=seed)
    return samplers.NSGAIISampler(seed=seed) if search.sampler == "nsgaii" else samplers.TPESampler(seed=seed)
