"""A model that reads texts under one policy set, or unmodified; several texts together where policies allow it.

With `reset = "request"` each text has an engine of its own, which starts as any other: what a text meets depends on no
other text, so it is the same in a batch. Otherwise one engine goes on from text to text, which come one by one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moereplay.results.result import Result, Row
from moereplay.simulator.replay import Plan, report
from moereplay.tracegen.allocator import PASSES, return_freed_memory
from moereplay.tracegen.capture import OnGate, Reading, watching
from moereplay.tracegen.checkpoint import Loaded
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.source import Emulation, rounding, under_orders
from moereplay.tracegen.live.tiers import Tiers
from moereplay.tracegen.modules import MoeModules
from moereplay.tracegen.quality.observers import Observer, Recorder
from moereplay.tracegen.quality.side_by_side import OneByOne, SideBySide, places, unpadded_because
from moereplay.tracegen.quality.texts import Text
from moereplay.traces.schema import Request

YOUNG = 32  #: groups of texts after which engines that have aged are collected too, which takes half a second


class Subject(NamedTuple):
    """Who reads: a model, and the policy set that it is under."""

    loaded: Loaded
    modules: MoeModules  #: of that model
    plan: Plan | None  #: None: unmodified
    look_ahead: int  #: gates ahead that are asked at each gate, and kept
    tiers: Tiers | None = None  #: weights of experts at few bits; None: by `affine`

    def observer(self) -> Observer:
        """Of a sequence, or of many behind each other."""
        if self.plan is None:
            return Recorder(self.modules, self.look_ahead)
        return Emulation(self.modules, self.plan, log=False, lookahead=self.look_ahead, tiers=self.tiers)


def alone_because(subject: Subject) -> str | None:
    """Why texts cannot go through the model together under a policy set; None if they can."""
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
    """What the engines of a session counted."""

    totals: Row = field(default_factory=dict)
    requests: list[Row] = field(default_factory=list)  #: `per_request` of their results

    def add(self, result: Result) -> None:
        """Counters are sums; a list has a sum for each of its places."""
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
        """`keep` gets each text's rows, in order. With `compare` the unmodified model reads the same tokens beside.

        `progress` is called with the tokens of every pass. A batch counts where `alone_because` allows it.
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
            self._collect()

    def _collect(self) -> None:
        """Engines are in cycles, and the command collects seldom: the young ones now, those that aged now and then."""
        self._groups += 1
        gc.collect(1 if self._groups % YOUNG else 2)

    def close(self) -> Tally:
        """What was counted."""
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
        if self._passes % PASSES == 0:
            return_freed_memory()
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
    """What a gate of a pass calls: each sequence's own observer, with the rows of that sequence."""
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
