"""Run a model on prompts and write a trace, request by request; a kill loses at most a minute and a shard.

A request is either continued by the model's own generate(), or teacher-forced. Its rows are the tokens
that went through the model: P prompt tokens and N new ones leave P + N - 1. Requests are independent, so a
resumed recording equals an uninterrupted one, byte for byte.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from moereplay.tracegen.assisted import Drafter, Verification, drafter_of
from moereplay.tracegen.assisted import continued as assisted
from moereplay.tracegen.capture import Capture, Rows, check
from moereplay.tracegen.checkpoint import Loaded
from moereplay.tracegen.decoding import Stepper, Surprise, continued
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.modules import MoeModules, discover
from moereplay.tracegen.plan import Plan, seed_of
from moereplay.tracegen.tokens import SECONDS_BETWEEN_COMMITS, Progress, Room, Work, appended
from moereplay.traces.dense import with_stored
from moereplay.traces.documents import package_version
from moereplay.traces.schema import Header, Provenance, Request, Trace
from moereplay.traces.writer import begun


def record(
    loaded: Loaded,
    work: Work,
    out: str | Path,
    plan: Plan,
    resume: bool = False,
    progress: Callable[[Progress], None] = lambda _: None,
    drafts: Loaded | None = None,
) -> Trace:
    """Record every sequence of `work` and open the trace. `resume` continues an unfinished one, or begins.

    `drafts` is the draft model if the plan has one.

    Raises RecordError if the model cannot be recorded or fails at a request, naming it, and TraceError if the path or
    disk refuses or an unfinished trace is another's. What was recorded until then is kept, Ctrl-C included.
    """
    modules = discover(loaded.model)
    check(modules)
    drafter = drafter_of(plan.drafting, loaded, drafts) if plan.drafting else None
    header = header_of(loaded, modules, work, plan, f", {drafter.words}" if drafter else "")
    recorder = _Recorder(loaded, modules, plan, drafter)
    with begun(out, header, modules.bias, resume) as writer:
        appended(writer, recorder.request, work, progress, SECONDS_BETWEEN_COMMITS)
        return writer.finish()


def room_of(loaded: Loaded) -> Room:
    """Return the model's longest context and its vocabulary."""
    config = loaded.model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    return Room(context, len(next(loaded.model.get_input_embeddings().parameters())))


def header_of(loaded: Loaded, modules: MoeModules, work: Work, plan: Plan, drafts: str = "") -> Header:
    """Return the trace's header: the same on the same machine for the same model, prompts, plan and drafts."""
    provenance = Provenance(
        model=loaded.name,
        revision=loaded.revision,
        dtype=loaded.dtype,
        source=f"{type(loaded.model).__name__} of transformers, {_device_name(loaded.model)}",
        source_sha256=loaded.weights_sha256,
        prompts=work.prompts,
        seed=plan.seed,
        decoding=plan.words + drafts,
        versions={
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "transformers")},
            "moereplay": package_version(),
        },
    )
    geometry = with_stored(modules.geometry, loaded.name, plan.dense_bytes, plan.dense_bits)
    if plan.matrices:
        geometry = geometry.model_copy(update={"matrices": plan.matrices})
    return Header(geometry=geometry, provenance=provenance, lookahead_depth=plan.look_ahead)


class _Recorder:
    """Runs the model on one request at a time, with hooks on."""

    def __init__(self, loaded: Loaded, modules: MoeModules, plan: Plan, drafter: Drafter | None) -> None:
        self.model, self.plan, self.drafter = loaded.model, plan, drafter
        self.capture = Capture(modules, plan.look_ahead)
        self.surprise = Surprise(loaded.model)

    def request(self, number: int, ids: np.ndarray) -> Request:
        """Run the model. Raises RecordError naming the request if memory runs out or the output is not numbers."""
        try:
            return self._drafted(number, ids) if self.drafter else self._alone(number, ids)
        except RecordError as error:
            raise RecordError(f"request {number}: {error}") from error
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            raise RecordError(_memory_message(number, len(ids))) from error

    def _drafted(self, number: int, ids: np.ndarray) -> Request:
        assert self.drafter
        assert self.plan.decoding
        seed = seed_of(self.plan.seed, number)
        with self.capture, Verification(self.model) as verification:
            new = assisted(self.model, ids.tolist(), self.plan.decoding, seed, self.drafter)
            rows = self.capture.take()
            _check_numbers(rows)
            token_ids = np.concatenate([ids, np.array(new[:-1], np.int32)])
            found = verification.take(rows, token_ids.tolist())
        alone = self._request(found.rows, len(ids), token_ids, found.nll)
        rejected = self._request(found.rejected, 0, found.rejected_ids, None).given()
        return replace(alone, drafts=found.drafts, rejected=rejected)

    def _alone(self, number: int, ids: np.ndarray) -> Request:
        with self.capture, self.surprise:
            prompt_length, new = self._run(number, ids)
            rows, nll = self.capture.take(), self.surprise.take()
        _check_numbers(rows)
        token_ids = np.concatenate([ids, np.array(new[:-1], np.int32)])
        return self._request(rows, prompt_length, token_ids, nll)

    def _request(self, rows: Rows, prompt_length: int, token_ids: np.ndarray, nll: np.ndarray | None) -> Request:
        logits = rows.logits if self.plan.logits else None
        return Request(rows.chosen, prompt_length, rows.weights, logits, rows.lookahead, token_ids, nll)

    def _run(self, number: int, ids: np.ndarray) -> tuple[int, list[int]]:
        """Return the tokens of the first pass, and those that the model added."""
        if self.plan.decoding:
            seed = seed_of(self.plan.seed, number)
            return len(ids), continued(self.model, ids.tolist(), self.plan.decoding, seed)
        at_once = min(self.plan.prompt_tokens or len(ids), len(ids))
        stepper = Stepper(self.model)
        stepper.prefill(ids[:at_once].tolist())
        for token in ids[at_once:].tolist():
            stepper.step([token])
        return at_once, []


def _check_numbers(rows: Rows) -> None:
    arrays = {"router logits": rows.logits, "gate weights": rows.weights}
    for name, values in arrays.items():
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            token, layer, _ = bad[0].tolist()
            fix = "try --dtype bfloat16 or float32"
            raise RecordError(f"{name} of token {token}, MoE layer {layer} are not numbers (NaN); {fix}")


def _out_of_memory(error: BaseException) -> bool:
    """Return True for out of memory: torch has a class for the GPU; the CPU raises a plain RuntimeError."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    return any(said in str(error) for said in ("can't allocate memory", "not enough memory", "out of memory"))


def _memory_message(number: int, tokens: int) -> str:
    fix = "use --device-map auto, shorter prompts (--truncate) or a smaller --window, then --resume"
    return f"request {number} ({tokens} tokens given) ran out of memory; {fix}"


def _device_name(model: torch.nn.Module) -> str:
    """Return the kinds of device that hold the weights, without numbers: cpu x86_64, NVIDIA H200."""
    devices = dict.fromkeys(parameter.device for parameter in model.parameters())
    return " + ".join(dict.fromkeys(map(_name, devices)))


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()}" if device.type in ("cpu", "meta") else device.type
