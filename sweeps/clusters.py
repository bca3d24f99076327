"""Run a sweep on a cluster: as SLURM jobs (submitit), one shard per node, or as tasks of a Ray cluster."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np

from moereplay.policies import files
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.threads import run_interruptibly
from moereplay.sweeps import extra
from moereplay.sweeps.jobs import Batch, Computed, Job, compute, shard
from moereplay.sweeps.local import LocalExecutor
from moereplay.sweeps.processes import find_own_packages
from moereplay.sweeps.run import NOGIL, Event, Lost, Stored, Unwritable, execute, left_to_do, planned
from moereplay.sweeps.store import Place
from moereplay.traces.files import temporary
from moereplay.traces.store import files_of, open_trace
from moereplay.traces.texts import counted, whole

LOGS = "slurm"  #: folder in the output, or next to the experiment, for submitit's scripts and logs

HERE = "no SLURM on this machine (no sbatch): the shards run here"
#: The time limit of a job, unless it is given: minutes to start and to compile, and a multiple of the estimate.
#: submitit's own limit is five minutes.
STARTING_MIN, TIMES = 10, 3
OUT_OF_TIME = re.compile("timed-out|TIMEOUT|TIME LIMIT")
PROBE_S = 2


class Shards(NamedTuple):
    """Arguments of every node."""

    file: Path
    changes: tuple[str, ...]
    out: Place
    engine: str
    workers: int
    nodes: int
    keep_going: bool
    policies: tuple[tuple[str, bytes], ...]  #: user policy files, as they were at submission
    command: tuple[str, ...]  #: of the submission

    @property
    def logs(self) -> Path:
        """Folder of submitit's scripts and logs, on the same file system as the experiment."""
        return self.out.beside(self.file.parent) / LOGS


def run_shard(shards: Shards, index: int) -> str:
    """Run shard `index` of the sweep on a node, and return a summary line."""
    files.register_all(shards.policies)
    sweep = planned(shards.file, shards.changes, shards.keep_going)
    jobs = left_to_do(sweep, shards.out, shard(sweep.jobs, (index, shards.nodes)))
    nogil = shards.engine == NOGIL
    ended = execute(
        sweep,
        jobs,
        shards.out,
        shards.engine,
        lambda out, about: LocalExecutor(shards.workers, nogil, out, about),
        command=shards.command,
    )
    given_up = "".join(f"; given up: {reason}" for reason in ended.given_up.values())
    return f"shard {index}/{shards.nodes}: {counted(ended.done, 'replay')}, {len(ended.errors):,} error rows{given_up}"


def run_shards(shards: Shards, options: dict[str, Any]) -> Iterator[str]:
    """Submit every shard, and yield a line on where they run and one for each that ends.

    Cancels all on Ctrl-C. Raises ConfigError if any failed.
    """
    executor = _executor(shards, options)
    if executor.cluster == "local" and "cluster" not in options:
        yield HERE
    jobs, failed, late = executor.map_array(run_shard, [shards] * shards.nodes, range(1, shards.nodes + 1)), [], False
    try:
        for job in jobs:
            if error := job.exception():
                failed.append(f"job {job.job_id}: {last_line(str(error))}")
                late = late or OUT_OF_TIME.search(str(error)) is not None
            else:
                yield job.result()
    except KeyboardInterrupt:
        for job in jobs:
            job.cancel(check=False)
        raise
    if failed:
        limit = f"a job may take {options['timeout_min']:,} min: " if "timeout_min" in options else ""
        more = f"{limit}pass --slurm timeout_min=MINUTES for more; " if late else ""
        advice = f"{more}logs in {shards.logs}; run the same command to resume"
        raise ConfigError(f"{len(failed)} of {shards.nodes} shards failed, first {failed[0]}; {advice}")


def limited(options: dict[str, Any], seconds: Callable[[], float]) -> dict[str, Any]:
    """Return options with a time limit: the one that is given, else one from the estimated seconds of a job."""
    if options.keys() & {"timeout_min", "slurm_time"}:
        return options
    return {"timeout_min": STARTING_MIN + ceil(TIMES * seconds() / 60)} | options


def options_of(texts: Sequence[str]) -> dict[str, Any]:
    """Parse options such as `timeout_min=60` into submitit's parameters. Raises ConfigError."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"invalid --slurm {text!r}: expected name=value, for example timeout_min=60")
        number = whole(value)
        options[name] = value if number is None else number
    return options


def _executor(shards: Shards, options: dict[str, Any]) -> Any:
    """Raise ConfigError if submitit is not installed or rejects an option."""
    submitit = extra("slurm", "submitit")
    own = options.get("slurm_setup", ())
    exports = [f"export {name}={quote(value)}" for name, value in find_own_packages().items()]
    setup = [*exports, *([own] if isinstance(own, str) else own)]
    options = {"cpus_per_task": shards.workers, "name": "moereplay"} | options | {"slurm_setup": setup}
    try:
        executor = submitit.AutoExecutor(folder=shards.logs, cluster=options.pop("cluster", None))
        executor.update_parameters(**options)
    except (NameError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--slurm: {' '.join(str(error).split())}") from None
    return executor


def last_line(text: str) -> str:
    """Return the exception line of the last traceback in a log, else the last line with a word."""
    lines = [line.rstrip() for line in text.splitlines()]
    begins = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    after = lines[begins[-1] + 1 :] if begins else []
    raised = next((line for line in after if re.match(r"[A-Za-z_][\w.]*(:|$)", line)), None)
    return raised or next((line.strip() for line in reversed(lines) if re.search(r"\w", line)), "no message")


# -- Ray: parts come back as bytes, so that no folder must be shared

#: A trace as a folder of files, (n,) uint8 each: Ray maps them without a copy.
Packed = Mapping[str, np.ndarray]


class RayExecutor:
    """Executor on a Ray cluster, one CPU per batch. Ray's retries are off: the dispatcher retries."""

    def __init__(self, address: str, workers: int, out: Place, provenance: Mapping[str, Any]) -> None:
        """Connect to the cluster at `address` (`auto` finds it), or start a local one with `workers` CPUs if empty."""
        self._ray = _started(address, workers)
        self._out, self._provenance = out, provenance
        self.slots = int(self._ray.cluster_resources().get("CPU", 1))
        self._remote = self._ray.remote(num_cpus=1, max_retries=0)(_run)
        self._packed: dict[str, Any] = {}
        self._running: dict[Any, Batch] = {}

    @property
    def room(self) -> int:
        """Number of batches that would start now."""
        return self.slots - len(self._running)

    def submit(self, batch: Batch, alone: bool = False) -> None:
        """Run a batch; each Ray task has its own process."""
        traces = {job.digest: self._trace(job) for job in batch.jobs}
        self._running[self._remote.remote(batch, traces)] = batch

    def collect(self, seconds: float) -> Sequence[Event]:
        """Return finished batches, waiting at most `seconds` for the first."""
        waiting = list(self._running)
        self._ray.wait(waiting, timeout=seconds)
        ready, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
        return [self._ended(task, self._running.pop(task)) for task in ready]

    def close(self) -> None:
        """Disconnect, and stop a cluster that was started here."""
        for task in self._running:
            self._ray.cancel(task, force=True)
        self._ray.shutdown()

    def _trace(self, job: Job) -> Any:
        """Return a job's trace in Ray's object store. In a list, only nodes without the file load it."""
        if job.digest not in self._packed:
            self._packed[job.digest] = [self._ray.put(pack(job.trace))]
        return self._packed[job.digest]

    def _ended(self, task: Any, batch: Batch) -> Event:
        try:
            made: Computed = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            return Lost(batch, batch.jobs, str(error).splitlines()[0])
        try:
            self._out.store(made.part, self._provenance)
        except ConfigError as error:
            return Unwritable(batch, str(error))
        return Stored(batch, made.headlines)


def pack(trace: Path) -> Packed:
    """Read the files of a stored trace. Raises TraceError for symbolic links."""
    return {name: np.fromfile(trace / name, np.uint8) for name in files_of(open_trace(trace))}


def place(packed: Packed, name: str, digest: str) -> Path:
    """Write the trace as a folder on this machine, once and atomically, and return it."""
    final = temporary() / digest[:32] / name
    if final.exists():
        return final
    scratch = final.with_name(f"{name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        for file, data in packed.items():
            (scratch / file).parent.mkdir(parents=True, exist_ok=True)
            data.tofile(scratch / file)
        with suppress(OSError):  # another worker was first
            scratch.rename(final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final


def _run(batch: Batch, traces: Mapping[str, Sequence[Any]]) -> Computed:
    """Run a batch in a worker: on the trace's folder if the node sees it, else on a copy from Ray's store."""
    ray = extra("ray", "ray")
    jobs = []
    for job in batch.jobs:
        here = job.trace.exists() or place(ray.get(traces[job.digest][0]), job.trace.name, job.digest)
        jobs.append(job if here is True else replace(job, trace=here))
    return compute(replace(batch, jobs=tuple(jobs)))


def _probe(address: str) -> None:
    """Raises ConfigError if no server listens at an address HOST:PORT."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _unreachable(address, str(error)) from None


def _unreachable(address: str, why: str) -> ConfigError:
    return ConfigError(f"cannot reach a Ray cluster at {address!r}: {why}; start one with: ray start --head")


@contextmanager
def _interrupts() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in this block: no replay is in flight yet that could be finished."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _started(address: str, workers: int) -> Any:
    """Return the connected Ray module. Raises ConfigError if it is not installed or the cluster cannot be reached."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else workers would run `uv run` again
    find_own_packages()
    ray = extra("ray", "ray")
    here = {} if address else {"num_cpus": workers, "include_dashboard": False}
    _probe(address if address != "auto" else os.environ.get("RAY_ADDRESS", ""))
    connect = partial(ray.init, address or "local", log_to_driver=False, logging_level="error", **here)
    try:
        with _interrupts():
            run_interruptibly(connect)  # in a thread: Ray waits minutes for a head that does not answer
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _unreachable(address, str(error).splitlines()[0]) from None
    return ray
