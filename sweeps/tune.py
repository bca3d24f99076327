"""Search the axes of an experiment with optuna, for several objectives at once, and resume from a journal."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from moereplay import policies
from moereplay.policies.contract import PolicyError
from moereplay.results.result import ALIASES, METRICS, SEARCHED
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import plan
from moereplay.sweeps import extra
from moereplay.sweeps.experiment.expand import Choices, Interval, axes, check_values, grid_size, is_excluded
from moereplay.sweeps.experiment.schema import Experiment, Settings, configuration
from moereplay.sweeps.grid import check_count
from moereplay.sweeps.jobs import Job, job_of
from moereplay.sweeps.run import Dispatcher, Executor
from moereplay.sweeps.store import Folder
from moereplay.traces.documents import canonical_digest, json_text
from moereplay.traces.lock import lock, open_in_place
from moereplay.traces.schema import Trace
from moereplay.traces.texts import hint, typed

JOURNAL = "tune.journal"
SAMPLERS = ("tpe", "nsgaii", "random")


class Search(NamedTuple):
    """Objectives, space and sampler of a search."""

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
    """Raise ConfigError for unknown names, and for a grid that is smaller than the search."""
    check_values(search.experiment, search.file)
    asked = (*(("objective", one, SEARCHED) for one in search.objectives), ("sampler", search.sampler, SAMPLERS))
    for what, name, known in asked:
        if name not in known:
            raise ConfigError(f"unknown {what} {name!r}: {hint(name, known)}")
    check_count(search.trials, "--trials asks for", "a search needs hundreds")
    size = grid_size(axes(search.experiment, search.file))
    if size is not None and size <= search.trials:
        raise ConfigError(
            f"{search.file}: the grid has {size:,} combinations, no more than {search.trials:,} trials: enumerating "
            f"is cheaper and finds everything: moereplay sweep run {typed(search.file)}"
        )


def tune(
    search: Search,
    out: Path,
    executor: Executor,
    advance: Callable[[int], None] = lambda trials: None,
    stopping: Callable[[], bool] = lambda: False,
) -> list[Found]:
    """Search until there are `trials`, resuming the journal in `out`, where every replay is stored as a part.

    Calls `advance` with the number of finished trials. Equal seed, sampler and number of slots give the same search,
    killed and resumed or not: trials of the journal are drawn again, and the sampler gets their values.
    Raises PartError for a damaged part in `out`.
    """
    study, across, name = _study(search), axes(search.experiment, search.file), identity(search)
    with open_journal(out / JOURNAL) as journal:
        deque(Folder(out).provenances(), maxlen=0)  # reads every file, and refuses a damaged one
        for drawn in journal.rounds(name):
            _draw_again(study, across, drawn, out)
        known: dict[tuple[str, str], dict[str, float]] = {}
        advance(min(len(study.trials), search.trials))
        while (done := len(study.trials)) < search.trials and not stopping():
            trials = [study.ask() for _ in range(min(executor.slots, search.trials - done))]
            jobs = [_jobs(search, suggested(across, trial)) for trial in trials]
            new = {job.key: job for each in jobs for job in each if job.key not in known}
            known |= Dispatcher(new.values(), executor, search.engine, False).run(lambda _: None, lambda: False).figures
            values = [_means([_values(search, known.get(job.key, {})) for job in each]) for each in jobs]
            journal.append(name, [Drawn(trial.params, each) for trial, each in zip(trials, values, strict=True)])
            _tell(study, trials, values)
            advance(len(trials))
    found = [_found(search, across, trial) for trial in study.best_trials]
    return [each for index, each in enumerate(found) if each not in found[:index]]


def tried(search: Search, out: Path) -> list[Job]:
    """Return the replays of every trial in the journal that has values, in the order of the trials, each once."""
    across = axes(search.experiment, search.file)
    with open_journal(out / JOURNAL) as journal:
        drawn = [trial for trials in journal.rounds(identity(search)) for trial in trials]
    settings = [_settings(across, each.params) for each in drawn if each.values is not None]
    return list(dict.fromkeys(job for setting in settings for job in _jobs(search, setting)))


def jobs_found(search: Search, found: Sequence[Found]) -> list[Job]:
    """Return the replays of a Pareto set, each once."""
    return list(dict.fromkeys(job for each in found for job in _jobs(search, each.settings)))


def platforms_of(search: Search) -> set[str]:
    """Return the platforms that trials may use, with the values that an axis changes."""
    choices: list[Settings] = []
    for axis in axes(search.experiment, search.file):
        choices += [{axis.name: axis.ends.at(0.5)}] if isinstance(axis, Interval) else axis
    deciding = [choice for choice in choices if {name.partition(".")[0] for name in choice} & {"platform", "preset"}]
    return {configuration({**search.experiment.base, **each}).platform for each in deciding or [{}]}


def identity(search: Search) -> str:
    """Return the identity of a search in a journal: a hash of all that its trials depend on, except their number."""
    space = search.experiment.model_dump(mode="json", exclude={"traces", "bounds", "requests", "policy_files"})
    traces = [trace.digest for trace in search.traces]
    own = sorted(policy.label for given in policies.REGISTERED.values() for policy in given.values())
    earlier = {present: before for before, present in ALIASES.items()}  # journals of earlier versions go on
    objectives = [earlier.get(name, name) for name in search.objectives]
    return canonical_digest([space, traces, objectives, search.sampler, search.seed, *own])[:16]


def suggested(across: Sequence[Choices], trial: Any) -> Settings:
    """Let a trial suggest one value of every axis: ranges as numbers, lists as categories."""
    settings: Settings = {}
    for index, axis in enumerate(across):
        if isinstance(axis, Interval):
            settings[axis.name] = axis.ends.at(trial.suggest_float(f"{index} {axis.name}", 0.0, 1.0))
        else:
            settings |= axis[trial.suggest_categorical(f"{index} {', '.join(axis[0])}", range(len(axis)))]
    return settings


def _jobs(search: Search, chosen: Mapping[str, Any]) -> list[Job]:
    """Return a job per trace; none if the combination is excluded or impossible."""
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


def _means(of_traces: Sequence[list[float] | None]) -> list[float] | None:
    """Average each objective over the traces; None without a trace, or if a trace lacks an objective."""
    complete = [of_trace for of_trace in of_traces if of_trace is not None]
    if not of_traces or len(complete) < len(of_traces):
        return None
    return [mean(column) for column in zip(*complete, strict=True)]


def _tell(study: Any, trials: Sequence[Any], values: Sequence[Sequence[float] | None]) -> None:
    """Report values to the study; a trial without values failed, and the sampler learns nothing from it."""
    failed = extra("tune", "optuna.trial").TrialState.FAIL
    for trial, each in zip(trials, values, strict=True):
        if each is None:
            study.tell(trial, state=failed)
        else:
            study.tell(trial, each)


def _draw_again(study: Any, across: Sequence[Choices], drawn: Round, out: Path) -> None:
    """Redraw a round of the journal to restore the sampler's state. Raises ConfigError if it draws other trials."""
    trials = [study.ask() for _ in drawn]
    for trial, before in zip(trials, drawn, strict=True):
        suggested(across, trial)
        if trial.params != before.params:
            raise ConfigError(
                f"{out / JOURNAL}: its trials differ from those that this version of optuna draws; choose another --out"
            )
    _tell(study, trials, [each.values for each in drawn])


def _settings(across: Sequence[Choices], params: Mapping[str, Any]) -> Settings:
    return suggested(across, extra("tune", "optuna.trial").FixedTrial(dict(params)))


def _found(search: Search, across: Sequence[Choices], trial: Any) -> Found:
    chosen = _settings(across, trial.params)
    return Found({**search.experiment.base, **chosen}, dict(zip(search.objectives, trial.values, strict=True)))


def _study(search: Search) -> Any:
    """Create a study in memory: a kill can leave optuna's own journal locked, or with half a line."""
    optuna = extra("tune", "optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    directions = ["maximize" if METRICS[name].larger_is_better else "minimize" for name in search.objectives]
    return optuna.create_study(sampler=_sampler(search), directions=directions)


def _sampler(search: Search) -> Any:
    samplers = extra("tune", "optuna.samplers")
    if search.sampler == "random":
        return samplers.RandomSampler(seed=search.seed)
    if search.sampler == "nsgaii":
        return samplers.NSGAIISampler(seed=search.seed)
    return samplers.TPESampler(seed=search.seed)


# -- Journal: a line per round of trials, for one process at a time

BINARY = getattr(os, "O_BINARY", 0)  # Windows would end lines in two characters


class Drawn(NamedTuple):
    """A finished trial."""

    params: Mapping[str, Any]  #: as the sampler drew them
    values: Sequence[float] | None  #: of the objectives; None if it failed


Round = Sequence[Drawn]  #: trials that were drawn together


class Journal:
    """Rounds of every search that shares this journal file: a line each, complete or absent."""

    def __init__(self, path: Path, handle: int) -> None:
        """Read an open file; callers use `open_journal`."""
        self._path, self._handle = path, handle
        self._lines = [_parsed(line, number, path) for number, line in enumerate(self._whole_lines(), 1)]

    def rounds(self, search: str) -> list[Round]:
        """Return the rounds of one search, in order."""
        return [[Drawn(**each) for each in line["trials"]] for line in self._lines if line["search"] == search]

    def append(self, search: str, trials: Round) -> None:
        """Append a round. Raises ConfigError, with the file unchanged, if it cannot be written."""
        line: dict[str, Any] = {"search": search, "trials": [trial._asdict() for trial in trials]}
        data = json_text(line | {"sha256": canonical_digest(line)}).encode() + b"\n"
        end = os.lseek(self._handle, 0, os.SEEK_END)
        try:
            while data:
                data = data[os.write(self._handle, data) :]
            os.fsync(self._handle)
        except OSError as error:
            os.ftruncate(self._handle, end)
            reason = f"{error.strerror or error}; stored results are kept; free disk space and run it again"
            raise ConfigError(f"cannot write {self._path}: {reason}") from None

    def _whole_lines(self) -> list[bytes]:
        """Return the complete lines, and truncate a last line that a killed process left incomplete."""
        with os.fdopen(os.dup(self._handle), "rb") as file:
            file.seek(0)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._handle, whole)
        return data[:whole].split(b"\n")[:-1]


@contextmanager
def open_journal(path: Path) -> Iterator[Journal]:
    """Open or create a journal, and lock it. Raises ConfigError if it is damaged, in use, or not writable."""
    try:
        handle = open_in_place(path, os.O_APPEND | BINARY)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --out") from None
    try:
        _hold(handle, path)
        yield Journal(path, handle)
    finally:
        os.close(handle)


def _hold(handle: int, path: Path) -> None:
    """Lock the file until it is closed or the process ends. Raises ConfigError if another process holds it."""
    try:
        lock(handle)
    except BlockingIOError:
        raise ConfigError(f"{path} is in use by another search; wait for it, or choose another --out") from None


def _parsed(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(line)
        digest = found.pop("sha256")
        whole = digest == canonical_digest(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole, found = False, {}
    if not whole:
        raise ConfigError(
            f"{path}: line {number} is damaged or of an earlier version; remove the file to search from the beginning"
        )
    return found
