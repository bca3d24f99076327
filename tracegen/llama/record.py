"""Run a GGUF file in llama.cpp on prompts or texts and write a trace, request by request, as `tracegen.record` does.

Sequences run one at a time. Rows are the tokens that went through the model. Requests are independent, so
a resumed recording equals an uninterrupted one, and committed requests survive a crash of llama.cpp's process.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.llama.file import GgufModel, rule_of
from moereplay.tracegen.llama.process import Engine, Tokenizer
from moereplay.tracegen.plan import Plan, seed_of
from moereplay.tracegen.tokens import SECONDS_BETWEEN_COMMITS, Progress, Room, Work, appended
from moereplay.traces.dense import with_stored
from moereplay.traces.documents import package_version
from moereplay.traces.schema import Geometry, Header, Provenance, Request, Router, Trace
from moereplay.traces.writer import begun

PROBE_TOKENS = 32  #: random ones, on which the routing rule is checked before anything is written
NO_LOOK_AHEAD = "llama.cpp does not compute a later layer's gate on this layer's state"


class Running(NamedTuple):
    """A model in llama.cpp's process."""

    engine: Engine
    file: GgufModel
    tokenizer: Tokenizer
    room: Room


class Way(NamedTuple):
    """How llama.cpp computes."""

    threads: int
    exact: bool  #: keys and values in float32 without flash attention, instead of llama.cpp's defaults

    @property
    def words(self) -> str:
        """The settings as provenance states them."""
        kept = "keys and values float32, no flash attention" if self.exact else "default keys and values"
        return f"{kept}, {self.threads} thread{'s' * (self.threads > 1)}, experts not repacked"


def loaded(engine: Engine, file: GgufModel) -> Running:
    """Load the file in the process. Raises RecordError."""
    said, _ = engine.ask("load", path=str(file.path.absolute()))
    room = Room(said["longest"] if said["longest"] > 0 else None, said["vocabulary"])
    return Running(engine, file, Tokenizer(engine, said["opening"], said["template"]), room)


def processors() -> int:
    """Return how many threads this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def record(
    running: Running,
    work: Work,
    out: Path,
    plan: Plan,
    way: Way,
    resume: bool = False,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Trace:
    """Record every sequence of `work` and open the trace. `resume` continues an unfinished one, or begins.

    Raises RecordError if the model cannot be recorded or fails at a request, naming it, and TraceError if the path or
    disk refuses or an unfinished trace is another's.
    """
    recorder = _Recorder(running, plan)
    longest = max(PROBE_TOKENS, *(len(ids) for ids in work.sequences)) + recorder.new
    running.engine.ask("context", longest=-(-longest // 256) * 256, threads=way.threads, exact=way.exact)
    header = _header(running, recorder.probed(), work, plan, way)
    with begun(out, header, running.file.bias if plan.logits else None, resume) as writer:
        appended(writer, recorder.request, work, progress, SECONDS_BETWEEN_COMMITS)
        return writer.finish()


def _header(running: Running, router: Router, work: Work, plan: Plan, way: Way) -> Header:
    engine, known = running.engine, running.file.known
    build = {name.replace("_", "."): text for name, text in engine.build.items() if text}
    provenance = Provenance(
        model=known.name,
        dtype=known.published.format,
        source=f"llama.cpp, cpu {platform.machine()}: {way.words}",
        source_sha256=running.file.sha256,
        prompts=work.prompts,
        seed=plan.seed,
        decoding=plan.words,
        versions={"python": platform.python_version(), "moereplay": package_version(), **build},
    )
    geometry = known.geometry.model_copy(update={"router": router})
    geometry = with_stored(geometry, known.name, plan.dense_bytes, plan.dense_bits)
    if plan.matrices:
        geometry = geometry.model_copy(update={"matrices": plan.matrices})
    return Header(geometry=geometry, provenance=provenance, lookahead_depth=0)


class _Recorder:
    """Runs one request at a time, and checks the results."""

    def __init__(self, running: Running, plan: Plan) -> None:
        self._running, self._plan = running, plan
        self.new = plan.decoding.max_new_tokens if plan.decoding else 0

    def probed(self) -> Router:
        """Return the routing rule that a pass over random tokens follows; the default without logits."""
        draw = np.random.Generator(np.random.PCG64(0))
        ids = draw.integers(0, self._running.room.vocabulary, PROBE_TOKENS).tolist()
        most = self._running.room.context or PROBE_TOKENS
        rows = self._rows(ids[:most], min(PROBE_TOKENS, most), 0, 0)
        if not self._plan.logits:
            return Router()
        return rule_of(self._running.file.metadata, self._running.file.bias, rows)

    def request(self, number: int, ids: np.ndarray) -> Request:
        """Run a request. Raises RecordError naming it."""
        first = min(self._plan.prompt_tokens or len(ids), len(ids))
        try:
            rows = self._rows(ids.tolist(), first, self.new, seed_of(self._plan.seed, number))
        except RecordError as error:
            raise RecordError(f"request {number}: {error}") from error
        logits = rows["logits"] if self._plan.logits else None
        chosen = rows["chosen"].astype(np.int16)
        return Request(chosen, first, rows["weights"], logits, (), rows["token_ids"], rows["nll"])

    def _rows(self, ids: list[int], first: int, new: int, seed: int) -> dict[str, np.ndarray]:
        decoding = self._plan.decoding
        drawn = decoding.model_dump(include={"temperature", "top_p", "top_k"}) if decoding else UNDRAWN
        _, rows = self._running.engine.ask("request", ids=ids, first=first, new=new, seed=seed, **drawn)
        _check(rows, self._running.file.known.geometry, len(ids), new)
        return rows


UNDRAWN: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}


def _check(rows: dict[str, np.ndarray], geometry: Geometry, given: int, new: int) -> None:
    """Raise RecordError for rows that contradict the file's header, or that are not numbers."""
    layers, experts, k = geometry.layers, geometry.experts, geometry.k
    tokens = len(rows.get("token_ids", ()))
    shapes = {"chosen": (tokens, layers, k), "weights": (tokens, layers, k), "logits": (tokens, layers, experts)}
    shapes |= {"token_ids": (tokens,), "nll": (tokens,)}
    if not given <= tokens <= given + max(new - 1, 0):
        raise RecordError(f"llama.cpp ran {tokens} tokens: expected {given} to {given + new}")
    for name, shape in shapes.items():
        if name not in rows or rows[name].shape != shape:
            found = rows[name].shape if name in rows else "nothing"
            raise RecordError(f"llama.cpp's routers have {name} {found}; the file's header states {shape}")
    chosen = np.sort(rows["chosen"], -1)
    if chosen.min() < 0 or chosen.max() >= experts or (k > 1 and (chosen[..., 1:] == chosen[..., :-1]).any()):
        raise RecordError(
            f"a router chose an expert twice, or one outside 0 to {experts - 1}; the build may be damaged"
        )
    for name in ("logits", "weights", "nll"):
        if not np.isfinite(rows[name]).all():
            raise RecordError(f"{name} of a router are not numbers (NaN); the file may be damaged")
