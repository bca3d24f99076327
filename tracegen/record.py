"""Run a model on prompts and write a trace, request by request; a kill loses at most a minute and a shard.

A request is either continued by the model's own generate(), or teacher-forced. Its rows are the tokens
that went through the model: P prompt tokens and N new ones leave P + N - 1. Requests are independent, so a
resumed recording equals an uninterrupted one, byte for byte.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor

from moereplay.tracegen.capture import Capture, Rows, check
from moereplay.tracegen.checkpoint import Loaded, quiet
from moereplay.tracegen.decoding import AfterEachPass, Stepper, Surprise, config_of, continued, nll, refuse_no_numbers
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.modules import MoeModules, discover
from moereplay.tracegen.plan import Decoding, Drafting, Plan, seed_of
from moereplay.tracegen.tokens import SECONDS_BETWEEN_COMMITS, Progress, Room, Work, appended
from moereplay.traces.documents import package_version
from moereplay.traces.schema import Header, Provenance, Request, Trace
from moereplay.traces.values import RIGHT
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
    geometry = plan.stated(modules.geometry, loaded.name)
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
            fix = "use --device-map auto, shorter prompts (--truncate) or a smaller --window, then --resume"
            raise RecordError(f"request {number} ({len(ids)} tokens given) ran out of memory; {fix}") from error

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


def _device_name(model: torch.nn.Module) -> str:
    """Return the kinds of device that hold the weights, without numbers: cpu x86_64, NVIDIA H200."""
    devices = dict.fromkeys(parameter.device for parameter in model.parameters())
    return " + ".join(dict.fromkeys(map(_name, devices)))


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()}" if device.type in ("cpu", "meta") else device.type


# -- Verify drafts while recording: transformers' assisted generation, by a smaller model or by n-grams of the text.
# -- The prompt goes through the model alone, and once more in front of the first drafts, as generate() takes them;
# -- these second rows are left out. Rows of the drafts that the model rejects are kept apart (`traces/values.py`).


class Drafter(NamedTuple):
    """Where drafts come from."""

    drafting: Drafting
    model: transformers.PreTrainedModel | None = None  #: None: n-grams
    sha256: str = ""  #: of the draft model's weights

    @property
    def words(self) -> str:
        """Describe the drafts, for provenance."""
        return f"{self.drafting.words}{f' (sha256 {self.sha256[:16]})' if self.sha256 else ''}"


def drafter_of(drafting: Drafting, loaded: Loaded, drafts: Loaded | None) -> Drafter:
    """Return the source of drafts for a model. Raises RecordError if the draft model has other tokens."""
    if drafts is None:
        return Drafter(drafting)
    if drafts.tokenizer.get_vocab() != loaded.tokenizer.get_vocab() or _words(drafts) != _words(loaded):
        why = f"its tokens are not those of {loaded.name}"
        raise RecordError(f"--draft-model {drafts.name}: {why}; choose a model with the same tokenizer and vocabulary")
    return Drafter(drafting, drafts.model, drafts.weights_sha256)


def _words(loaded: Loaded) -> int:
    return loaded.model.config.get_text_config().vocab_size


def assisted(model: Any, prompt: Sequence[int], decoding: Decoding, seed: int, drafter: Drafter) -> list[int]:
    """Return the new tokens after the prompt as `decoding.continued` does, verifying drafts after the first of them."""

    def rest(ids: Tensor, left: Decoding) -> Tensor:
        config, more = config_of(left), {}
        if drafter.model is None:
            config.prompt_lookup_num_tokens = drafter.drafting.many
            config.max_matching_ngram_size = drafter.drafting.ngram
        else:
            more = {"assistant_model": drafter.model}
        with _drafting(drafter, model), quiet(progress=False):
            return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **more)

    return continued(model, prompt, decoding, seed, rest)


@contextmanager
def _drafting(drafter: Drafter, model: Any) -> Iterator[None]:
    """Let the draft model propose the same number of tokens in every pass, however sure it is."""
    if drafter.model is None:
        yield
        return
    theirs, ours = drafter.model.generation_config, model.generation_config
    drafter.model.generation_config = transformers.GenerationConfig(
        num_assistant_tokens=drafter.drafting.many,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
        eos_token_id=ours.eos_token_id,
        pad_token_id=ours.pad_token_id,
        bos_token_id=ours.bos_token_id,
    )
    try:
        yield
    finally:
        drafter.model.generation_config = theirs


class Pass(NamedTuple):
    """Input of one pass of the model, and its output."""

    ids: list[int]  #: tokens of its rows; of a verify pass the known one and its drafts
    skipped: int  #: rows before these
    within: np.ndarray  #: nll of each token but the first, given those before it in the pass
    opening: np.ndarray  #: nll of the first token after each row of the pass before


class Verified(NamedTuple):
    """One request: rows as of `Capture`, and which drafts were right."""

    rows: Rows
    nll: np.ndarray  #: (T,)
    drafts: np.ndarray  #: (T,), the array `drafts` of a trace
    rejected: Rows
    rejected_ids: np.ndarray


class Verification(AfterEachPass):
    """Inside `with Verification(model):`, keep the passes of one request at a time; `take` ends it. Batch 1."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__(model)
        self._passes: list[Pass] = []
        self._logits: Tensor | None = None

    def _after_pass(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        ids = kwargs["input_ids"][0]
        skipped = len(self._passes[0].ids) if len(self._passes) == 1 else 0
        given = ids[skipped:]
        logits = output.logits[0, -len(given) :]
        refuse_no_numbers(logits[-1])
        given = given.to(logits.device)
        opening = np.zeros(1, np.float32) if self._logits is None else _nll(self._logits, given[:1])
        self._passes.append(Pass(given.tolist(), skipped, _nll(logits[:-1], given[1:]), opening))
        self._logits = logits[-1:].clone() if len(self._passes) == 1 else logits

    def take(self, rows: Rows, tokens: Sequence[int]) -> Verified:
        """Return a request from the rows of all its passes and its tokens, those that went through the model.

        Raises RecordError if the passes do not give these tokens.
        """
        (prompt, *verifying), self._passes, self._logits = self._passes, [], None
        at = row = len(prompt.ids)
        last = 0  # row of the pass before after which this one begins
        kept, wrong, drafts, ids = [*range(at)], [], [0] * at, []
        spent = [prompt.opening, prompt.within]
        for each in verifying:
            row += each.skipped
            right = _matching(each.ids, tokens[at:])
            kept += range(row, row + right)
            wrong += range(row + right, row + len(each.ids))
            drafts += [len(each.ids) - 1, *[RIGHT] * (right - 1)]
            ids += each.ids[right:]
            spent += [each.opening[last : last + 1], each.within[: right - 1]]
            at, row, last = at + right, row + len(each.ids), right - 1
            if not right:
                break
        if at != len(tokens) or row != len(rows.chosen):
            name = self._model.config.name_or_path
            raise RecordError(f"{name}: the passes of assisted generation do not give its tokens; omit --draft-model")
        nlls = np.concatenate(spent).astype(np.float32)
        return Verified(_at(rows, kept), nlls, np.array(drafts, np.int16), _at(rows, wrong), np.array(ids, np.int32))


def _matching(given: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many of the first rows of a pass are the next tokens."""
    same = [one == other for one, other in zip(given, tokens, strict=False)]
    return same.index(False) if False in same else len(same)


def _at(rows: Rows, places: list[int]) -> Rows:
    at = np.array(places, np.intp)
    return Rows(rows.chosen[at], rows.weights[at], rows.logits[at], tuple(each[at] for each in rows.lookahead))


def _nll(logits: Tensor, targets: Tensor) -> np.ndarray:
    """Return the nll (T,) of tokens after rows of logits (T, V), or of one token after each."""
    if not len(logits):
        return np.zeros(0, np.float32)
    return nll(logits, targets.expand(len(logits))).cpu().numpy()
