"""Decoding: a model continues a prompt by its own generate(), greedy or sampled, without a checkpoint's defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, Self

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.plan import Decoding
from moereplay.tracegen.plan import seed_of as seed_of


def continued(
    model: Any,
    prompt: Sequence[int],
    decoding: Decoding,
    seed: int,
    rest: Callable[[Tensor, Decoding], Tensor] | None = None,
) -> list[int]:
    """Return the new tokens after the prompt, at least one, the ending token included.

    The result depends on the arguments only. `rest` takes all tokens (1, T) after the first new one and what is left to
    decode, and returns them continued; without it the model goes on by itself.

    `model` is a PreTrainedModel that can generate().
    A checkpoint's own defaults (temperature, penalties, suppressed tokens) are not used, only its ending tokens are.
    """
    ids = torch.as_tensor(prompt, dtype=torch.long, device=input_device(model)).reshape(1, -1)
    left = decoding.model_copy(update={"max_new_tokens": decoding.max_new_tokens - 1})
    config = config_of(decoding if rest is None else decoding.model_copy(update={"max_new_tokens": 1}))
    with torch.inference_mode(), _own_defaults(model), _drawing_from(seed, ids.device):
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **_all_logits(model))
        if rest is not None and left.max_new_tokens and int(out[0, -1]) not in endings(model):
            out = rest(out, left)
    return out[0, len(ids[0]) :].tolist()


def config_of(decoding: Decoding) -> transformers.GenerationConfig:
    """Return generate()'s settings."""
    if not decoding.temperature:
        return transformers.GenerationConfig(max_new_tokens=decoding.max_new_tokens, do_sample=False, use_cache=True)
    return transformers.GenerationConfig(do_sample=True, use_cache=True, **decoding.model_dump())


def _all_logits(model: transformers.PreTrainedModel) -> dict[str, int]:
    """Make generate() keep the logits of all rows, which the nll of the prompt needs, instead of the last one only."""
    return {"logits_to_keep": 0} if "logits_to_keep" in signature(model.forward).parameters else {}


@contextmanager
def _own_defaults(model: transformers.PreTrainedModel) -> Iterator[None]:
    """Clear the model's sampling defaults, which generate() would fill in; keep its end tokens."""
    theirs = model.generation_config or transformers.GenerationConfig()
    ends = theirs.eos_token_id
    pad = theirs.pad_token_id if theirs.pad_token_id is not None else (ends[0] if isinstance(ends, list) else ends)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=ends, pad_token_id=pad, bos_token_id=theirs.bos_token_id
    )
    try:
        yield
    finally:
        model.generation_config = theirs


@contextmanager
def _drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generator and restore it afterwards, because generate() takes no generator."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


# -- Drive a causal language model over given token ids with its key-value cache: batch 1, no gradients, no sampling.


class Stepper:
    """One sequence through one model: `prefill` starts it, `step` continues it, `reset` forgets it."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        """Wrap any causal language model of transformers in evaluation mode."""
        self._model = model
        self._device = input_device(model)
        self._cache: Any = None  #: the model's own cache class
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens that have gone through since the last reset."""
        return self._length

    def prefill(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Clear the cache, then run one pass over `ids`; return logits (T, V) in the model's dtype and device."""
        self.reset()
        return self.step(ids)

    def step(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Run a pass over the next `ids`, one or several, after those in the cache; return logits (len(ids), V)."""
        given = torch.as_tensor(ids, dtype=torch.long, device=self._device).reshape(1, -1)
        # MiniMax counts from 0 at every step unless it receives positions
        at = torch.arange(self._length, self._length + given.shape[1], device=self._device)[None]
        with torch.inference_mode():
            seen = self._model(
                input_ids=given, position_ids=at, past_key_values=self._cache, use_cache=True, return_dict=True
            )
        self._cache = seen.past_key_values
        self._length += given.shape[1]
        return seen.logits[0]

    def reset(self) -> None:
        """Drop the cache: the next tokens start a new sequence."""
        self._cache = None
        self._length = 0


def input_device(model: transformers.PreTrainedModel) -> torch.device:
    """Return the device for token ids: the embedding's, or the CPU if accelerate offloads the embedding."""
    device = next(model.get_input_embeddings().parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


# -- Negative log-likelihood of every token that goes through a model, from the logits of its own passes.

ROWS_AT_ONCE = 256  #: a float32 copy of all logits of a long prompt would double the memory that they take


def nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Return (T,) float32 nats: -ln softmax(logits[t])[targets[t]], from logits (T, V) of any dtype and ids (T,)."""
    parts = zip(logits.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([cross_entropy(rows.float(), wanted, reduction="none") for rows, wanted in parts])


def refuse_no_numbers(logits: Tensor) -> None:
    """Raises RecordError for NaN."""
    if torch.isnan(logits).any():
        raise RecordError("the model's logits are not numbers (NaN); use --dtype bfloat16 or float32")


class AfterEachPass:
    """Inside `with`, call `_after_pass` after each pass; the last row of logits is that of plain generate()."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self._model = model
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        self._hooks = [self._model.register_forward_hook(self._after_pass, with_kwargs=True)]
        head = self._model.get_output_embeddings()
        if head is not None:
            self._hooks.append(head.register_forward_hook(last_row_as_if_alone))
        return self

    def __exit__(self, *failure: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _after_pass(
        self, model: transformers.PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        raise NotImplementedError


class Surprise(AfterEachPass):
    """Inside `with Surprise(model) as surprise:`, record the nll of every token of every pass; `take` ends a sequence.

    It works with generate() and with plain passes, because it hooks the model's inputs and outputs. Batch 1.
    """

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__(model)
        self._parts: list[Tensor] = []
        self._next: Tensor | None = None  #: (1, V) logits of the token that comes next

    def take(self) -> np.ndarray:
        """Return (T,) float32 of the tokens since the last take, one sequence; the next pass starts another."""
        parts, self._parts, self._next = self._parts, [], None
        return torch.cat([part.cpu() for part in parts]).numpy()

    def _after_pass(
        self, model: transformers.PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        ids, logits = kwargs["input_ids"][0], output.logits[0]
        ids = ids.to(logits.device)
        first = torch.zeros(1, device=logits.device) if self._next is None else nll(self._next, ids[:1])
        self._parts += [first, nll(logits[:-1], ids[1:])] if len(ids) > 1 else [first]
        last = logits[-1:].clone()  # a view would keep the whole prompt's logits alive
        self._next = last
        refuse_no_numbers(last)


def last_row_as_if_alone(head: torch.nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    """Give the last row of a prompt's logits the bits it has when the head sees that row only, as in plain generate().

    A matrix product over many rows rounds differently from one over a single row, and could pick another token.
    """
    if output.shape[1] > 1:
        output[:, -1:] = head.forward(args[0][:, -1:])


# -- One token from one row of logits, as generate() picks it: for runs that must see every pass themselves.


class Sampler:
    """Picks the tokens that `tracegen.decoding.continued` would pick under the same settings and seed."""

    def __init__(self, decoding: Decoding, seed: int, device: torch.device) -> None:
        self._greedy = not decoding.temperature
        self._warp = _warpers(decoding)
        self._generator = torch.Generator(device).manual_seed(seed)

    def pick(self, logits: Tensor) -> int:
        """Return the next token from logits (V,)."""
        row = logits.to(torch.float32, copy=True)[None]
        if self._greedy:
            return int(row.argmax())
        chances = self._warp(torch.empty(1, 0, dtype=torch.long), row).softmax(-1)  # type: ignore[arg-type]
        return int(torch.multinomial(chances, 1, generator=self._generator))


def endings(model: transformers.PreTrainedModel) -> frozenset[int]:
    """Return tokens with which the model ends a text."""
    ends = model.generation_config.eos_token_id if model.generation_config else None
    return frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,))


def _warpers(decoding: Decoding) -> transformers.LogitsProcessorList:
    """Return logits processors in generate()'s order, without those that change nothing."""
    chosen = transformers.LogitsProcessorList()
    if decoding.temperature not in (0, 1):
        chosen.append(transformers.TemperatureLogitsWarper(decoding.temperature))
    if decoding.top_k:
        chosen.append(transformers.TopKLogitsWarper(decoding.top_k))
    if decoding.top_p < 1:
        chosen.append(transformers.TopPLogitsWarper(decoding.top_p))
    return chosen
