"""Run every task under every policy set, in turn, and store each result as soon as it is complete.

The unmodified model runs first, and its routing is recorded as the trace that a sweep would replay. A
set that does not change the model's output has the unmodified model's answers, so it is replayed and not run.

OUT/parts/KEY.parquet       one row each (`results.quality`)
OUT/traces/TASK-KEY.zarr    routing of the unmodified model in a task
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl

from moereplay.policies.contract import PolicyError
from moereplay.results.files import write_frame
from moereplay.results.quality import UNMODIFIED, counted, counted_by, read, to_frame
from moereplay.results.result import Row
from moereplay.simulator.bounds import bound_of, count
from moereplay.simulator.config import KINDS, SEMANTICS_VERSION, Origin, ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import Plan, plan_for, replay
from moereplay.tracegen.checkpoint import Loaded
from moereplay.tracegen.decoding import input_device
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.experts import check_computable, said, tiers_of
from moereplay.tracegen.live.requests import CAPABILITIES
from moereplay.tracegen.live.source import changes_experts, depth_needed, rounding
from moereplay.tracegen.modules import MoeModules
from moereplay.tracegen.plan import Plan as Recording
from moereplay.tracegen.precision import DEFAULT
from moereplay.tracegen.quality.harness import Answers, Task
from moereplay.tracegen.quality.session import Session, Subject, alone_because
from moereplay.tracegen.record import header_of
from moereplay.tracegen.tokens import Work
from moereplay.traces.documents import canonical_digest, package_version
from moereplay.traces.lock import refuse_busy
from moereplay.traces.schema import Request, Trace
from moereplay.traces.store import open_trace
from moereplay.traces.stored import partial_of
from moereplay.traces.writer import TraceWriter

#: Gates up to which the reference engine answers sooner than the compiled one is compiled. Both count the same.
FEW_GATES = 50_000


@dataclass(frozen=True)
class Job:
    """One task under one policy set; None is the unmodified model."""

    task: Task
    name: str
    plan: Plan | None
    key: str  #: of everything that its row depends on

    @property
    def changes_output(self) -> bool:
        """True if the policy set may change the model's output, so that the model must run."""
        return self.plan is not None and self.plan.chosen.open_loop


class Evaluation:
    """An evaluation of a model: its jobs, in the order in which they run."""

    def __init__(
        self,
        loaded: Loaded,
        modules: MoeModules,
        sets: Mapping[str, ReplayConfig],
        seed: int,
        batch: int,
        out: Path,
        quantiser: str = DEFAULT,
    ) -> None:
        """Raises ConfigError, PolicyError or RecordError for a set under which this model cannot run.

        `quantiser` stores the experts that policies want at few bits.
        """
        self._loaded, self._modules, self._seed, self._batch, self._out = loaded, modules, seed, batch, out
        self._quantiser, self._tiers = quantiser, tiers_of(modules, quantiser, loaded.weights_sha256)
        self.plans = {name: self._checked(name, config) for name, config in sets.items()}
        self._depth = max(map(depth_needed, self.plans.values()))
        if any(changes_experts(plan, modules.geometry.expert_bits) for plan in self.plans.values()):
            check_computable([site.experts for site in modules.sites])

    def _checked(self, name: str, config: ReplayConfig) -> Plan:
        """Raises ConfigError, PolicyError or RecordError naming the set."""
        try:
            plan = self._plan(config)
            self._stored_as(plan)
        except (ConfigError, PolicyError, RecordError) as error:
            raise type(error)(f"policy set {name}: {error}") from None
        return plan

    def _stored_as(self, plan: Plan) -> str:
        """Return the quantiser of a set's low-precision experts, or "". Raises RecordError if they cannot be."""
        return said(self._quantiser, rounding(plan, self._modules.geometry.expert_bits))

    def _plan(self, config: ReplayConfig) -> Plan:
        layers, name = self._modules.geometry.layers, self._loaded.name
        digest = canonical_digest([self._loaded.weights_sha256, self._loaded.dtype])
        origin = Origin(self._modules.geometry, CAPABILITIES, layers, f"live-{digest}", name, live=True)
        return plan_for(origin, config)

    def alone(self, plan: Plan | None) -> str | None:
        """Return why a set's texts run one by one in spite of a batch; None if they run together."""
        return alone_because(self._subject(plan)) if self._batch > 1 else None

    def _subject(self, plan: Plan | None) -> Subject:
        return Subject(self._loaded, self._modules, plan, self._depth, self._tiers)

    def jobs(self, task: Task) -> list[Job]:
        """Return the unmodified model, then every set."""
        plans: dict[str, Plan | None] = {UNMODIFIED: None} | self.plans
        return [Job(task, name, plan, self._key(task, plan)) for name, plan in plans.items()]

    def _key(self, task: Task, plan: Plan | None) -> str:
        model = [self._loaded.weights_sha256, self._loaded.dtype, str(input_device(self._loaded.model))]
        config = plan.config.model_dump(mode="json") if plan else ["look-ahead", self._depth]
        stored = self._stored_as(plan) if plan else ""
        others = (version(package) for package in ("torch", "transformers"))
        versions = [SEMANTICS_VERSION, package_version(), *others]
        document = [model, task.definition, config, self._batch, self._seed, versions, *([stored] if stored else [])]
        return canonical_digest(document)[:16]

    def rows(
        self, tasks: Sequence[Task], advance: Callable[[str, int], None], done: Callable[[Job, bool], None]
    ) -> Iterator[pl.DataFrame]:
        """Return a frame with one row for every task and set. Stored results are not computed again.

        `advance` is called with the set's name and the tokens of every pass, `done` with every job and whether it was
        stored before.
        """
        for task in tasks:
            before: pl.DataFrame | None = None
            for job in self.jobs(task):
                stored = self._stored(job)
                frame = stored if stored is not None else self._asked(job, before, advance)
                done(job, stored is not None)
                before = frame if before is None else before
                yield frame

    def _part(self, job: Job) -> Path:
        return self._out / "parts" / f"{job.key}.parquet"

    def trace_of(self, task: Task) -> Path:
        """Return the path of the unmodified model's trace in a task."""
        called = "".join(letter if letter.isalnum() else "-" for letter in task.name)
        return self._out / "traces" / f"{called}-{self._key(task, None)[:8]}.zarr"

    def _stored(self, job: Job) -> pl.DataFrame | None:
        """Return the row of a job that is done. Raises ResultError if its file is damaged."""
        path = self._part(job)
        if not path.exists() or (job.plan is None and not self.trace_of(job.task).exists()):
            return None
        return read(path)

    def _asked(self, job: Job, unmodified: pl.DataFrame | None, advance: Callable[[str, int], None]) -> pl.DataFrame:
        if unmodified is None:
            row = self._recorded(job, advance)
        else:
            row = self._under_policies(job, unmodified.row(0, named=True), advance)
        frame = to_frame([row])
        self._part(job).parent.mkdir(parents=True, exist_ok=True)
        write_frame(frame, self._part(job))
        return frame

    def _recorded(self, job: Job, advance: Callable[[str, int], None]) -> Row:
        """Return the unmodified model, its routing recorded. Raises TraceError if another process records it now."""
        path = self.trace_of(job.task)
        partial = partial_of(path)
        refuse_busy(partial)
        for left in (path, partial):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        work, recording = Work((), f"task {job.task.name}"), Recording(look_ahead=self._depth, seed=self._seed)
        header = header_of(self._loaded, self._modules, work, recording)
        with TraceWriter.create(path, header, self._modules.bias, resumable=False) as writer:
            answers, _ = self._answers(job, writer.append, advance)
            trace = writer.finish()
        return self._row(job, trace, answers.row())

    def _under_policies(self, job: Job, unmodified: Row, advance: Callable[[str, int], None]) -> Row:
        assert job.plan is not None
        trace = open_trace(self.trace_of(job.task))
        replayed = _replayed(trace, job.plan.config)
        if not job.changes_output:
            same = {name: unmodified[name] for name in ("measures", "examples")}
            return self._row(job, trace, same | replayed | {"live": replayed["replayed"]})
        answers, live = self._answers(job, lambda request: None, advance)
        return self._row(job, trace, answers.row() | replayed | {"live": live})

    def _answers(
        self, job: Job, keep: Callable[[Request], None], advance: Callable[[str, int], None]
    ) -> tuple[Answers, Row | None]:
        compare = job.task.compared and job.plan is not None
        session = Session(
            self._subject(job.plan),
            self._batch,
            keep=keep,
            compare=compare,
            progress=lambda tokens: advance(job.name, tokens),
        )
        answers = job.task.answers(session)
        tally = session.close()
        return answers, counted(tally.totals, tally.requests) if job.plan else None

    def _row(self, job: Job, trace: Trace, found: Row) -> Row:
        plan = job.plan
        return {
            "set": job.name,
            "task": job.task.name,
            "changes_output": job.changes_output,
            "config": plan.config.model_dump(mode="json") if plan else None,
            "about": self._about(job, trace),
            "texts": trace.requests,
            "tokens": trace.tokens,
            **found,
        }

    def _about(self, job: Job, trace: Trace) -> dict[str, Any]:
        definition = job.task.definition
        chosen = job.plan.chosen if job.plan else None
        policies = [getattr(chosen, kind).text(full=True) for kind in KINDS] if chosen else []
        stored = self._stored_as(job.plan) if job.plan else ""
        return {
            "model": self._loaded.name,
            "weights_sha256": self._loaded.weights_sha256,
            "dtype": self._loaded.dtype,
            "trace": trace.digest,
            "task_sha256": canonical_digest(definition),
            "evaluator": " ".join(map(str, definition[:2])) if definition[0] == "lm-eval" else "moereplay",
            "device": str(input_device(self._loaded.model)),
            "policies": ", ".join([*policies, *([stored] if stored else [])]),
            "alone": self.alone(job.plan),
            "batch": self._batch,
            "seed": self._seed,
        }


def _replayed(trace: Trace, config: ReplayConfig) -> Row:
    """Replay a configuration as a sweep does: its counters, and the upper bound on its hits."""
    gates = trace.tokens * trace.geometry.layers
    result = replay(trace, config, engine="reference" if gates <= FEW_GATES else "compiled")
    bound = bound_of(trace, config)
    return {"replayed": counted_by(result), "bounds": dict(count(trace, bound)) if bound else None}
