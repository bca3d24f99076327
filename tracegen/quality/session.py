"""Run a model on texts under one policy set, or unmodified; several texts at once if the policies allow it.

With `reset = "request"` each text has its own engine in the initial state: its results do not depend on any
other text, so texts can run in a batch. Otherwise one engine continues from text to text, one at a time.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import transformers
from torch import Tensor

from moereplay.results.result import Result, Row
from moereplay.simulator.replay import Plan, report
from moereplay.tracegen.capture import Capture, OnGate, Reading, Rows, watching
from moereplay.tracegen.checkpoint import Loaded
from moereplay.tracegen.decoding import Stepper, input_device
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.experts import Orders, Tiers
from moereplay.tracegen.live.source import Emulation, rounding, under_orders
from moereplay.tracegen.modules import MoeModules
from moereplay.tracegen.quality.texts import Text
from moereplay.traces.schema import Request

YOUNG = 32  #: groups of texts after which engines that have aged are collected too, which takes half a second


class Subject(NamedTuple):
    """A model and the policy set that it runs under."""

    loaded: Loaded
    modules: MoeModules  #: of that model
    plan: Plan | None  #: None: unmodified
    look_ahead: int  #: later gates that are evaluated at each gate, and kept
    tiers: Tiers | None = None  #: weights of experts at few bits; None: by `affine`

    def observer(self) -> Observer:
        """Return the observer of one sequence, or of several in a row."""
        if self.plan is None:
            return Recorder(self.modules, self.look_ahead)
        return Emulation(self.modules, self.plan, log=False, lookahead=self.look_ahead, tiers=self.tiers)


def alone_because(subject: Subject) -> str | None:
    """Return why texts cannot run together under a policy set; None if they can."""
    plan = subject.plan
    if plan is None:
        return unpadded_because(subject.loaded.model)
    if plan.config.reset != "request":
        return f"with reset {plan.config.reset} the cache goes on from one to the next"
    if any(rounding(plan, subject.modules.geometry.expert_bits)):
        return f"miss {plan.chosen.miss.text()} rounds an expert for all that run it"
    return unpadded_because(subject.loaded.model)


@dataclass
class Tally:
    """Counters of a session's engines."""

    totals: Row = field(default_factory=dict)
    requests: list[Row] = field(default_factory=list)  #: `per_request` of their results

    def add(self, result: Result) -> None:
        """Add the counters, lists element by element."""
        self.totals = {name: _sum(self.totals.get(name), value) for name, value in result.totals.items()}
        self.requests += result.per_request


def _sum(before: Any, value: Any) -> Any:
    if before is None:
        return value
    return [*map(sum, zip(before, value, strict=True))] if isinstance(value, list) else before + value


class Session:
    """`read` texts, as often as wanted, then `close`."""

    def __init__(
        self,
        subject: Subject,
        batch: int = 1,
        *,
        keep: Callable[[Request], None] = lambda request: None,
        compare: bool = False,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """`keep` receives each text's rows, in order. With `compare` the unmodified model reads the same tokens too.

        `progress` is called with the tokens of every pass. `batch` applies if `alone_because` allows it.
        """
        self.subject, self.progress, self._keep, self._compare = subject, progress, keep, compare
        self._batch = 1 if batch == 1 or alone_because(subject) else batch
        self._goes_on = subject.plan is not None and subject.plan.config.reset != "request"
        self._going: Observer | None = None
        self._tally, self._texts, self._groups, self._passes = Tally(), 0, 0, 0

    def read(self, texts: Sequence[Text]) -> None:
        """Read texts to their ends. Raises RecordError if the model gives no numbers, or does not fit the memory."""
        for start in range(0, len(texts), self._batch):
            group = texts[start : start + self._batch]
            try:
                self._together(group)
            except torch.cuda.OutOfMemoryError:
                fix = "use a smaller --batch, shorter texts or --device-map auto"
                raise RecordError(f"text {self._texts} ran out of GPU memory; {fix}") from None
            self._texts += len(group)
            self._groups += 1
            gc.collect(1 if self._groups % YOUNG else 2)  # engines are in reference cycles

    def close(self) -> Tally:
        """Return the counters."""
        if self._going is not None:
            self._count(self._going)
        return self._tally

    def _together(self, texts: Sequence[Text]) -> None:
        observers = [self._observer() for _ in texts]
        ours, plain = self._stepper(len(texts)), self._stepper(len(texts)) if self._compare else None
        while any(due := [list(text.due()) for text in texts]):
            logits = self._pass(ours, observers, texts, due)
            base = plain.step(due) if plain else [None] * len(texts)
            for text, tokens, row, beside in zip(texts, due, logits, base, strict=True):
                if tokens:
                    text.read += tokens
                    text.receive(row, beside)
            self._passed(sum(map(len, due)))
        for text, observer in zip(texts, observers, strict=True):
            self._end(text, observer)

    def _passed(self, tokens: int) -> None:
        self._passes += 1
        if self._passes % PASSES_BETWEEN == 0:
            _trim()(0)  # gives freed memory back to the system
        self.progress(tokens)

    def _observer(self) -> Observer:
        if not self._goes_on:
            return self.subject.observer()
        self._going = self._going or self.subject.observer()
        return self._going

    def _stepper(self, texts: int) -> OneByOne | SideBySide:
        model = self.subject.loaded.model
        return OneByOne(model) if texts == 1 else SideBySide(model, texts)

    def _pass(
        self, stepper: OneByOne | SideBySide, observers: list[Observer], texts: Sequence[Text], due: list[list[int]]
    ) -> list[Tensor]:
        active = [(observer, text, ids) for observer, text, ids in zip(observers, texts, due, strict=True) if ids]
        number = self._texts if self._goes_on else 0
        for observer, text, ids in active:
            observer.begin(len(ids), number, prefill=not text.read)
        attend = attended(observers, places(due))
        modules, depth = self.subject.modules, self.subject.look_ahead
        with watching(modules, depth, attend, batch=len(texts)), under_orders(modules, observers[0].orders):
            logits = stepper.step(due)
        for observer, _, _ in active:
            observer.end()
        return logits

    def _end(self, text: Text, observer: Observer) -> None:
        rows, _ = observer.take()
        ids = np.array(text.read, np.int32)
        self._keep(Request(rows.chosen, text.first, rows.weights, rows.logits, rows.lookahead, ids))
        if not self._goes_on:
            self._count(observer)

    def _count(self, observer: Observer) -> None:
        plan = self.subject.plan
        if plan is not None and isinstance(observer, Emulation):
            self._tally.add(report(observer.close(), plan))


def attended(observers: Sequence[Observer], rows: Sequence[slice]) -> OnGate:
    """Return the gate callback of a pass: it passes each sequence's rows to that sequence's observer."""
    if len(observers) == 1:
        return observers[0].at_gate

    def at_gate(layer: int, reading: Reading) -> tuple[Tensor, Tensor] | None:
        choices = [(place, each.at_gate(layer, _part(reading, place))) for each, place in _active(observers, rows)]
        changed = [(place, choice) for place, choice in choices if choice is not None]
        if not changed:
            return None
        ids, weights = reading.ids.clone(), reading.weights.clone()
        for place, choice in changed:
            ids[place], weights[place] = choice
        return ids, weights

    return at_gate


def _active(observers: Sequence[Observer], rows: Sequence[slice]) -> list[tuple[Observer, slice]]:
    return [(each, place) for each, place in zip(observers, rows, strict=True) if place.stop > place.start]


def _part(reading: Reading, place: slice) -> Reading:
    ahead = tuple(logits[place] for logits in reading.lookahead)
    return Reading(reading.logits[place], reading.weights[place], reading.ids[place], ahead)


# -- Observers of one sequence's gates: a pass begins, each gate is observed, the pass ends. The policies of a set
# -- (`tracegen.live.source.Emulation`), or only a recorder.


class Recorder:
    """Keeps the gate outputs of the unmodified model."""

    orders: Orders | None = None

    def __init__(self, modules: MoeModules, depth: int) -> None:
        self._modules, self._capture, self._gates = modules, Capture(modules, depth), 0

    def begin(self, tokens: int, request: int, prefill: bool) -> None:
        """Begin a pass."""
        self._gates = 0

    def at_gate(self, layer: int, reading: Reading) -> None:
        """Keep the reading; the model continues unchanged."""
        self._gates += 1
        self._capture.keep(layer, reading)

    def end(self) -> None:
        """Raises RecordError if gates were left out."""
        if self._gates != len(self._modules.sites):
            raise RecordError(f"{self._modules.name}: a pass ran {self._gates} of {len(self._modules.sites)} gates")

    def take(self) -> tuple[Rows, np.ndarray]:
        """Return the rows since the last take; the executed experts are the chosen ones."""
        rows = self._capture.take()
        return rows, rows.chosen


Observer = Recorder | Emulation


# -- Sequences that go through one model together, each with the logits that it would have alone, rounding aside.

#: By model, why its texts cannot be padded: found by one run, needed for every set of every task.
_KNOWN: WeakKeyDictionary[transformers.PreTrainedModel, str | None] = WeakKeyDictionary()
UNLIKE = 0.05  #: share of the logits' spread by which padding may change them


class OneByOne:
    """One sequence with the interface of `SideBySide`, read exactly as by a recording."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self._stepper = Stepper(model)

    def step(self, due: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return logits (n, V) of the one sequence's n tokens."""
        return [self._stepper.step(due[0])]


class SideBySide:
    """B sequences with one key-value cache. `places` maps the tokens of a padded pass to sequences."""

    def __init__(self, model: transformers.PreTrainedModel, batch: int) -> None:
        self._model, self._device = model, input_device(model)
        self._cache: Any = None
        self._mask = torch.zeros(batch, 0, dtype=torch.long)
        self._lengths = [0] * batch

    def step(self, due: Sequence[Sequence[int]]) -> list[Tensor]:
        """Run a pass over the next tokens of each sequence; return logits (n, V) for each, n its number of tokens."""
        width = max(map(len, due))
        ids, mask, at = (torch.zeros(len(due), width, dtype=torch.long) for _ in range(3))
        for row, tokens in enumerate(due):
            first = width - len(tokens)
            ids[row, first:] = torch.as_tensor(tokens, dtype=torch.long)
            mask[row, first:] = 1
            at[row, first:] = torch.arange(self._lengths[row], self._lengths[row] + len(tokens))
            self._lengths[row] += len(tokens)
        self._mask = torch.cat([self._mask, mask], dim=1)
        logits = self._forward(ids, at)
        return [logits[row, width - len(tokens) :] for row, tokens in enumerate(due)]

    def _forward(self, ids: Tensor, at: Tensor) -> Tensor:
        with torch.inference_mode():
            seen = self._model(
                input_ids=ids.to(self._device),
                attention_mask=self._mask.to(self._device),
                position_ids=at.to(self._device),
                past_key_values=self._cache,
                use_cache=True,
                return_dict=True,
            )
        self._cache = seen.past_key_values
        return seen.logits


def places(due: Sequence[Sequence[int]]) -> list[slice]:
    """Return, for each sequence, the rows of a padded pass (B * width) that hold its tokens."""
    width = max(map(len, due))
    return [slice((row + 1) * width - len(tokens), (row + 1) * width) for row, tokens in enumerate(due)]


def unpadded_because(model: transformers.PreTrainedModel) -> str | None:
    """Return why sequences cannot run side by side; None if they can. A short run of the model decides, once.

    Linear attention, for one, can carry padding on in its state.
    """
    if model not in _KNOWN:
        _KNOWN[model] = _tried(model)
    return _KNOWN[model]


def _tried(model: transformers.PreTrainedModel) -> str | None:
    called = type(model).__name__
    if getattr(model.config.get_text_config(), "index_topk", None):
        return f"the tokens that {called} attends to are picked from padded texts otherwise"
    texts = [list(range(1, 42)), list(range(3, 17))]
    together, steps = SideBySide(model, len(texts)), [OneByOne(model) for _ in texts]
    for due in ([text[:-1] for text in texts], [text[-1:] for text in texts]):
        for padded, (alone, ids) in zip(together.step(due), zip(steps, due, strict=True), strict=True):
            if not _alike(padded, alone.step([ids])[0]):
                return f"{called} computes otherwise where texts are padded"
    return None


def _alike(some: Tensor, others: Tensor) -> bool:
    """Return whether two rows of logits differ by rounding alone; another expert on a near tie counts as rounding."""
    some, others = some.float(), others.float()
    spread = (others - others.mean(-1, keepdim=True)).norm()
    return bool((some - others).norm() <= UNLIKE * spread)


# -- Memory that a model on the CPU has freed and the C library keeps. A key-value cache grows by a copy at every pass;
# -- the copies leave holes on the heap too small for the next, larger copy: 260 MB for four texts of 100 tokens of the
# -- miniature, and with the square of their length.

PASSES_BETWEEN = 32  #: of a model between two calls: one takes milliseconds


@cache
def _trim() -> Callable[[int], object]:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # no glibc
        return lambda kept: None
