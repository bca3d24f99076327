"""A sweep as jobs of a SLURM cluster, by submitit: one shard per node, all into one shared folder or bucket."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from moereplay.policies import files
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.extras import extra
from moereplay.sweeps.jobs import shard
from moereplay.sweeps.local import LocalExecutor
from moereplay.sweeps.processes import find_own_packages
from moereplay.sweeps.run import NOGIL, execute, left_to_do, planned
from moereplay.sweeps.store import Place
from moereplay.traces.texts import whole

LOGS = "slurm"  #: folder in the output, or beside the experiment, for submitit's scripts and logs


class Shards(NamedTuple):
    """What every node is told."""

    file: Path
    changes: tuple[str, ...]
    out: Place
    engine: str
    workers: int
    nodes: int
    keep_going: bool
    policies: tuple[tuple[str, bytes], ...]  #: files of the user's own, as they were when the shards were submitted
    command: tuple[str, ...]  #: that submitted them

    @property
    def logs(self) -> Path:
        """A folder that every node sees, as it sees the experiment."""
        return self.out.beside(self.file.parent) / LOGS


def run_shard(shards: Shards, index: int) -> str:
    """On a node: shard `index` of the sweep; one line about how it ended."""
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
    given_up = "".join(f"; given up: {reason}" for reason in ended.killers.values())
    return f"shard {index}/{shards.nodes}: {ended.done:,} replays, {len(ended.errors):,} error rows{given_up}"


def run_shards(shards: Shards, options: dict[str, Any]) -> list[str]:
    """Submit every shard, wait for all, and return what each said. Raises ConfigError if any failed."""
    executor = _executor(shards, options)
    jobs = executor.map_array(run_shard, [shards] * shards.nodes, range(1, shards.nodes + 1))
    said, failed = [], []
    for job in jobs:
        error = job.exception()
        (failed if error else said).append(f"job {job.job_id}: {last_line(str(error))}" if error else job.result())
    if failed:
        advice = f"logs in {shards.logs}; run the same command to resume"
        raise ConfigError(f"{len(failed)} of {shards.nodes} shards failed, first {failed[0]}; {advice}")
    return said


def options_of(given: Sequence[str]) -> dict[str, Any]:
    """`timeout_min=60` as submitit's parameters. Raises ConfigError."""
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--slurm {text!r}: write name=value, for example timeout_min=60 or slurm_partition=cpu")
        number = whole(value)
        options[name] = value if number is None else number
    return options


def _executor(shards: Shards, options: dict[str, Any]) -> Any:
    """Raises ConfigError if submitit is not installed or refuses an option."""
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
    """Return the line that says what happened: of a node's last traceback the exception, else the last with a word."""
    lines = [line.rstrip() for line in text.splitlines()]
    begins = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    after = lines[begins[-1] + 1 :] if begins else []
    raised = next((line for line in after if re.match(r"[A-Za-z_][\w.]*(:|$)", line)), None)
    return raised or next((line.strip() for line in reversed(lines) if re.search(r"\w", line)), "no message")
