"""Record a model that verifies drafts: transformers' assisted generation, by a smaller model or by n-grams of the text.

The prompt goes through the model alone, and once more in front of the first drafts, as generate() takes them; these
second rows are left out. Rows of the drafts that the model rejects are kept apart (`traces/values.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor

from moereplay.tracegen.capture import Rows
from moereplay.tracegen.checkpoint import Loaded, quiet
from moereplay.tracegen.decoding import AfterEachPass, config_of, nll
from moereplay.tracegen.decoding import continued as decoding_alone
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.plan import Decoding, Drafting
from moereplay.traces.values import RIGHT


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


def continued(model: Any, prompt: Sequence[int], decoding: Decoding, seed: int, drafter: Drafter) -> list[int]:
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

    return decoding_alone(model, prompt, decoding, seed, rest)


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
    """What one pass of the model was given, and what it thought of it."""

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
        if torch.isnan(logits[-1]).any():
            raise RecordError("the model's logits are not numbers (NaN); use --dtype bfloat16 or float32")
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
