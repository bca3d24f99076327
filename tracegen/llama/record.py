"""Run a GGUF file in llama.cpp on prompts or texts and write a trace, request by request, as `tracegen.record` does.

Sequences run one at a time. Rows are the tokens that went through the model. Requests are independent, so
a resumed recording equals an uninterrupted one, and committed requests survive a crash of llama.cpp's process.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.folder import fingerprint
from moereplay.tracegen.llama.process import Engine, Tokenizer
from moereplay.tracegen.plan import Plan, seed_of
from moereplay.tracegen.tokens import SECONDS_BETWEEN_COMMITS, Progress, Room, Work, appended
from moereplay.traces.checkpoints.found import parts_of
from moereplay.traces.checkpoints.gguf import Gguf, is_gguf, read_gguf
from moereplay.traces.checkpoints.tensors import model_of_gguf
from moereplay.traces.documents import package_version
from moereplay.traces.geometry import KnownModel
from moereplay.traces.routers import GROUPED, choice_scores, choose, weigh
from moereplay.traces.schema import Geometry, Header, Provenance, Request, Router, Trace, TraceError
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
    geometry = plan.stated(known.geometry.model_copy(update={"router": router}), known.name)
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


# -- A GGUF file that is to be recorded: its header, read and checked before llama.cpp sees it.


BIAS = re.compile(r"blk\.(\d{1,5})\.exp_probs_b(?:\.bias)?")
ROUTED = re.compile(r"blk\.(\d{1,5})\.ffn_\w+_exps\.weight")
GGUF = ".gguf"


class GgufModel(NamedTuple):
    """A model of one file, or of the parts of a split one."""

    parts: tuple[Gguf, ...]
    known: KnownModel
    metadata: Mapping[str, Any]
    bias: np.ndarray | None  #: (L, E) f32 correction of the choice

    @property
    def path(self) -> Path:
        """The file that llama.cpp opens: the first."""
        return self.parts[0].path

    @property
    def sha256(self) -> str:
        """Fingerprint of the files."""
        return fingerprint([part.path for part in self.parts], lambda path: self._starts[path])

    @property
    def _starts(self) -> dict[Path, int]:
        return {part.path: part.start for part in self.parts}


def is_named(model: str) -> bool:
    """Return True if a model's name is a GGUF file's."""
    path = Path(model).expanduser()
    return path.suffix.lower() == GGUF or (path.is_file() and is_gguf(path))


def opened(model: str) -> GgufModel:
    """Read the headers of a GGUF file. Raises RecordError if one is missing, cut off or no mixture of experts."""
    path = Path(model).expanduser()
    if not path.is_file():
        raise RecordError(f"{model}: no such file: expected a GGUF file")
    try:
        parts = tuple(read_gguf(part) for part in parts_of(path))
        for part in parts:
            part.check_whole()
        known = model_of_gguf(list(parts), path.stem, str(path))
        bias = _bias(parts, known.geometry.experts)
    except TraceError as wrong:
        said = str(wrong)
        raise RecordError(said if path.stem in said else f"{path.name}: {said}") from None
    metadata = {key: value for part in reversed(parts) for key, value in part.metadata.items()}
    return GgufModel(parts, known, metadata, bias)


def _bias(parts: tuple[Gguf, ...], experts: int) -> np.ndarray | None:
    """Read the correction biases of all layers with routed experts, None if there are none."""
    found: dict[int, np.ndarray] = {}
    routed: set[int] = set()
    for part in parts:
        for name, place in part.tensors.items():
            if layer := ROUTED.fullmatch(name):
                routed.add(int(layer[1]))
            elif (layer := BIAS.fullmatch(name)) and place.weights == experts:
                found[int(layer[1])] = part.floats(name).reshape(-1)
    if not found:
        return None
    return np.stack([found.get(layer, np.zeros(experts, np.float32)) for layer in sorted(routed)]).astype(np.float32)


# -- The routing rule of a GGUF file: what its metadata allows, and of that what reproduces the gates of a probe.
# -- llama.cpp computes exponentials by polynomials: weights agree to single precision's rounding, not bit for bit.

#: `expert_gating_func` of a file's metadata; most files leave it to llama.cpp's code for the architecture.
GATINGS = {1: "softmax_topk", 2: "sigmoid_groups", 3: "topk_softmax"}
NEAR = 2e-5  #: largest relative difference of a weight, and of a choice score between experts that tie


def rule_of(said: Mapping[str, Any], bias: np.ndarray | None, rows: Mapping[str, np.ndarray]) -> Router:
    """Return the first rule that gives the recorded choice and weights of all rows (T, L, ...); `bias` is (L, E).

    Raises RecordError if none does.
    """
    for router in _candidates(said, rows["logits"].shape[-1]):
        if _holds(router, bias, rows):
            return router
    how = "pass --no-logits to record the choice and weights alone"
    raise RecordError(f"no known routing rule reproduces this model's choice and weights from its logits; {how}")


def _candidates(said: Mapping[str, Any], experts: int) -> Iterator[Router]:
    architecture = said.get("general.architecture")

    def stated(key: str, kind: type | tuple[type, ...], otherwise: Any) -> Any:
        value = said.get(f"{architecture}.{key}")
        return value if isinstance(value, kind) and value == value else otherwise

    gating = GATINGS.get(stated("expert_gating_func", int, 0))
    norm = stated("expert_weights_norm", bool, True)
    scale = float(stated("expert_weights_scale", (int, float), 1.0)) or 1.0
    groups, kept = stated("expert_group_count", int, 1), stated("expert_group_used_count", int, 1)
    families = [gating] if gating else []
    families += [each for each in ("softmax_topk", "sigmoid_groups", "topk_softmax") if each != gating]
    grouped = {"groups": groups, "groups_kept": kept} if 1 < groups <= experts and experts % groups == 0 < kept else {}
    for family, renormalise, factor in product(families, (norm, not norm), dict.fromkeys((scale, 1.0))):
        own = grouped if family in GROUPED else {}
        yield Router.model_validate({"family": family, "renormalise": renormalise, "scale": factor, **own})
        if family == "softmax_topk" and not renormalise and grouped:
            yield Router.model_validate({"family": "softmax_groups", "scale": factor, **grouped})


def _holds(router: Router, bias: np.ndarray | None, rows: Mapping[str, np.ndarray]) -> bool:
    logits, chosen, weights = rows["logits"], rows["chosen"].astype(np.intp), rows["weights"]
    expected = weigh(router, logits, chosen)
    if not (np.abs(expected - weights) <= NEAR * np.maximum(np.abs(weights), 1e-3)).all():
        return False
    ranked = choice_scores(router, logits, bias)
    best = choose(ranked, chosen.shape[-1]).astype(np.intp)
    mine, theirs = (np.sort(np.take_along_axis(ranked, ids, -1), -1) for ids in (best, chosen))
    return bool((np.abs(mine - theirs) <= NEAR * np.maximum(np.abs(mine), 1e-3)).all())
