"""The first difference between two runs of the same requests: a choice of the model, an event, or a counter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from moereplay.results.result import Event, Result
from moereplay.traces.passes import Passes, schedule
from moereplay.traces.schema import Trace

#: Compared fields of events: their place first, then the most informative.
FIELDS = ("step_pass", "layer", "kind", "expert", "precision", "cause", "t0", "t1")
GATE = "gate"  #: cause of the events that classify what a gate demands
WORDS = {"step_pass": "pass", "t0": "time", "t1": "time"}


class Divergence(NamedTuple):
    """The first difference; fields that do not apply are None."""

    what: str  #: the model's choice, a field of an event, the end of a log, a counter's name
    live: str
    replayed: str
    layer: int | None = None
    step_pass: int | None = None
    request: int | None = None
    tokens: tuple[int, int] | None = None  #: tokens of the request in the pass, first and one past the last

    def text(self) -> str:
        """Return one line: the place, what differs, and both values."""
        place = ", ".join(self._place())
        return f"{place}: {self.what} differs: live {self.live}; replayed {self.replayed}"

    def _place(self) -> Iterator[str]:
        if self.request is not None:
            yield f"request {self.request}"
        if self.tokens is not None:
            first, last = self.tokens[0], self.tokens[1] - 1
            yield f"token {first}" if first == last else f"tokens {first}-{last}"
        if self.step_pass is not None:
            yield f"pass {self.step_pass}"
        if self.layer is not None:
            yield f"layer {self.layer}"
        if self.layer is None and self.request is None:
            yield "in total"


def first_choice(live: Trace, recorded: Trace, passes: str) -> Divergence | None:
    """Return the first step and token for which the model chose other experts than were recorded.

    Both traces hold the same requests. `passes` is the schedule that they ran under.
    """
    ours, theirs = live.read("chosen"), recorded.read("chosen")
    if ours.shape != theirs.shape:
        return Divergence("tokens, layers and experts per token", str(ours.shape), str(theirs.shape))
    token, layer = np.nonzero((ours != theirs).any(axis=-1))
    if not len(token):
        return None
    plan = schedule(recorded, passes)
    row = np.empty(len(ours), np.int64)
    row[plan.tokens(0, len(ours))] = np.arange(len(ours))
    step_pass = np.searchsorted(plan.stop, row[token], side="right")
    first = np.lexsort((token, layer, step_pass))[0]  # a pass finishes a layer before it begins the next
    at, where = int(token[first]), int(layer[first])
    request = int(np.searchsorted(recorded.request_offsets, at, side="right")) - 1
    inside = at - int(recorded.request_offsets[request])
    said, was = (str(ids[at, where].tolist()) for ids in (ours, theirs))
    return Divergence("the model's choice", said, was, where, int(step_pass[first]), request, (inside, inside + 1))


def first_divergence(live: Result, replayed: Result, trace: Trace) -> Divergence | None:
    """Return the first event that differs, or else the first counter; None if the runs are identical.

    Runs without a log are compared by their counters alone. `trace` holds the requests of both.
    """
    return _of_events(live, replayed, trace) or _of_counters(live, replayed)


def _of_events(live: Result, replayed: Result, trace: Trace) -> Divergence | None:
    if not (live.events and replayed.events):
        return None
    pairs = zip(live.events, replayed.events, strict=False)
    at = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    shorter = min(len(live.events), len(replayed.events))
    if at is None and len(live.events) == len(replayed.events):
        return None
    at = shorter if at is None else at
    ours, theirs = (run.events[at] if at < len(run.events) else None for run in (live, replayed))
    return _apart(ours, theirs, schedule(trace, str(replayed.config["passes"])), trace)


def _apart(ours: Event | None, theirs: Event | None, passes: Passes, trace: Trace) -> Divergence:
    """Return the difference of a pair of events, at the earlier of their places."""
    there = [event for event in (ours, theirs) if event is not None]
    step_pass, layer = min((event.step_pass, event.layer) for event in there)
    what = _what(ours, theirs)
    live, replayed = (_spelled(event, elsewhere=what in ("pass", "layer")) for event in (ours, theirs))
    if passes.rows is not None:  # a pass of several requests
        return Divergence(what, live, replayed, layer, step_pass)
    request = int(passes.request[step_pass])
    before = int(trace.request_offsets[request])
    tokens = int(passes.start[step_pass]) - before, int(passes.stop[step_pass]) - before
    return Divergence(what, live, replayed, layer, step_pass, request, tokens)


def _what(ours: Event | None, theirs: Event | None) -> str:
    if ours is None or theirs is None:
        return "the end of the log"
    name = next(name for name in FIELDS if getattr(ours, name) != getattr(theirs, name))
    if name in ("kind", "expert") and ours.cause == theirs.cause == GATE and ours.expert != theirs.expert:
        return "the demanded expert"
    return WORDS.get(name, name)


def _spelled(event: Event | None, elsewhere: bool) -> str:
    """Format an event, with its place if the two events are `elsewhere`."""
    if event is None:
        return "nothing more"
    expert = "" if event.expert < 0 else f" expert {event.expert}"
    span = f"{event.t0:,} ns" if event.t0 == event.t1 else f"{event.t0:,}-{event.t1:,} ns"
    place = f" in pass {event.step_pass}, layer {event.layer}" if elsewhere else ""
    return f"{event.kind}{expert} ({event.cause}){place} at {span}"


def _of_counters(live: Result, replayed: Result) -> Divergence | None:
    """Compare by layer, then by request, then in total: the end time can differ in the totals alone."""
    for ours, theirs in zip(live.per_layer, replayed.per_layer, strict=False):
        for name, mine, other in _unequal(ours, theirs):
            return Divergence(f"{name} ({ours['phase']})", mine, other, layer=ours["layer"])
    for ours, theirs in zip(live.per_request, replayed.per_request, strict=False):
        for name, mine, other in _unequal(ours, theirs):
            return Divergence(name, mine, other, request=ours["request"])
    for name, mine, other in _unequal(live.totals, replayed.totals):
        return Divergence(name, mine, other)
    return None


def _unequal(ours: Mapping[str, object], theirs: Mapping[str, object]) -> Iterator[tuple[str, str, str]]:
    for name, value in ours.items():
        if value != theirs.get(name):
            yield name, str(value), str(theirs.get(name))
