"""Compare a live run with replays of the same requests.

Each live run has two replays. The *closed loop* replays what the live run recorded, so it must make the same decisions
to the last event under any policy. The *open loop* replays the baseline trace. It must be identical as well under
policies that leave the model's output alone. Under other policies the recording does not react, and tolerances limit
its error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl
from pydantic import Field

from moereplay.analysis.ranking import capacities, of_trace
from moereplay.analysis.tables import LONG
from moereplay.results import validation
from moereplay.results.errors import ResultError
from moereplay.results.result import MISS_RATE, Event, Result, Row, values_of
from moereplay.results.schema import ROWS_VERSION
from moereplay.results.settings import POLICIES
from moereplay.results.validation import LAYER_COUNTERS
from moereplay.traces.passes import Passes, schedule
from moereplay.traces.schema import Frozen, Trace

TIMES = ("TTFT ms", "TPOT ms")
DRAFTED = "recorded with drafts: its passes of several rows round otherwise than the live run's, in last digits"


# The first difference between two runs: a choice of the model, an event, or a counter

#: Compared fields of events: their place first, then the most informative.
FIELDS = ("step_pass", "layer", "kind", "expert", "precision", "cause", "t0", "t1")
GATE = "gate"  #: cause of the events that classify what a gate demands
TERMS = {"step_pass": "pass", "t0": "time", "t1": "time"}


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
    live, replayed = (_event_in_words(event, elsewhere=what in ("pass", "layer")) for event in (ours, theirs))
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
    return TERMS.get(name, name)


def _event_in_words(event: Event | None, elsewhere: bool) -> str:
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


# Comparisons


class Tolerances(Frozen):
    """Largest allowed error of an open-loop replay."""

    hit_rate: float = Field(default=0.01, ge=0)  #: absolute
    time: float = Field(default=0.02, ge=0)  #: of TTFT and TPOT, relative to the live run's


class Measure(NamedTuple):
    """One number of both runs; None if there was nothing to measure."""

    name: str
    live: float | None
    replayed: float | None
    relative: bool = False  #: whether `error` and `allowed` are shares of the live number
    allowed: float | None = None  #: None: reported without a limit

    @property
    def error(self) -> float | None:
        """Replayed minus live, as a share of live if `relative`; None if either is missing or live is zero."""
        if self.live is None or self.replayed is None:
            return None
        difference = self.replayed - self.live
        if not self.relative:
            return difference
        return difference / self.live if self.live else None

    @property
    def within(self) -> bool:
        """True if the error is allowed; a number that only one run has is not."""
        if self.allowed is None or self.live == self.replayed:
            return True
        return self.error is not None and abs(self.error) <= self.allowed


class Runs(NamedTuple):
    """Results of one configuration on the same requests, all with or all without event logs."""

    live: Result
    replayed: Result  #: of the baseline trace
    closed: Result | None = None  #: replay of the live run's recording
    recorded: Trace | None = None  #: routing that the live run recorded under its policies


@dataclass(frozen=True)
class Comparison:
    """One policy set, live and replayed."""

    name: str
    config: Row
    about: Row  #: of the replay
    exact: bool  #: whether the open loop must be identical
    measures: tuple[Measure, ...]
    layers: tuple[Row, ...]  #: per layer, LAYER_COUNTERS of either run as `live_*` and `replayed_*`
    events: int  #: in both logs; 0 without logs
    open_loop: Divergence | None
    closed_loop: Divergence | None
    closed_ran: bool
    quality: Mapping[str, float | None]  #: `results.validation.QUALITY`, or empty if it was not measured

    @property
    def passed(self) -> bool:
        """True if every difference is allowed."""
        return not self.complaints()

    def complaints(self) -> list[str]:
        """Return the differences that are not allowed, one line each."""
        wrong = []
        if self.closed_loop is not None:
            wrong.append(f"closed loop: {self.closed_loop.text()}")
        if self.exact and self.open_loop is not None:
            wrong.append(self.open_loop.text())
        outside = [measure for measure in self.measures if not self.exact and not measure.within]
        return wrong + [f"{measure.name} is outside its tolerance of {measure.allowed:g}" for measure in outside]

    def verdict(self) -> str:
        """Return identical, differs, within tolerance, or outside tolerance."""
        if self.open_loop is None and self.closed_loop is None:
            return "identical"
        if self.exact or self.closed_loop is not None:
            return "differs"
        return "within tolerance" if self.passed else "outside tolerance"

    @property
    def lam(self) -> float | None:
        """The strength of cache-aware routing; None if the routing policy has no such parameter."""
        found = re.search(r":lam=([^:]+)", str(self.about["policies"]["routing"]))
        return float(found[1]) if found else None


def compare(
    name: str,
    runs: Runs,
    trace: Trace,
    tolerances: Tolerances | None = None,
    quality: Mapping[str, float | None] | None = None,
) -> Comparison:
    """Compare runs of one configuration on the requests of `trace`.

    Raises ResultError if the runs have different configurations.
    """
    live, replayed, closed, recorded = runs
    for other in (replayed, closed):
        if other is not None and other.config != live.config:
            raise ResultError(f"{name}: the runs have different configurations; compare runs of one")
    choice = recorded and first_choice(recorded, trace, str(live.config["passes"]))
    exact = "open-loop" not in replayed.about["label"]
    allowed = Tolerances(hit_rate=0, time=0) if exact else tolerances or Tolerances()
    limits = {"hit rate": allowed.hit_rate, "TTFT ms": allowed.time, "TPOT ms": allowed.time}
    ours, theirs = _numbers(live), _numbers(replayed)
    return Comparison(
        name=name,
        config=replayed.config,
        about=replayed.about,
        exact=exact,
        measures=tuple(Measure(name, ours[name], theirs[name], name in TIMES, limits.get(name)) for name in ours),
        layers=tuple(_layers(live, replayed)),
        events=min(len(live.events), len(replayed.events)),
        open_loop=choice or first_divergence(live, replayed, trace),
        closed_loop=None if closed is None else first_divergence(live, closed, trace),
        closed_ran=closed is not None,
        quality=quality or {},
    )


def _numbers(result: Result) -> dict[str, float | None]:
    found = values_of(result)
    return {
        "hit rate": found["hit_rate"],
        "collisions": result.totals["collisions"],
        "GB moved": found["gb_moved"],
        "TTFT ms": found["ttft_mean_ms"],
        "TPOT ms": found["tpot_ms"],
    }


def _layers(live: Result, replayed: Result) -> list[Row]:
    ours, theirs = _by_layer(live), _by_layer(replayed)
    nothing = dict.fromkeys(LAYER_COUNTERS, 0)
    return [
        {"layer": layer}
        | {f"live_{name}": count for name, count in ours.get(layer, nothing).items()}
        | {f"replayed_{name}": count for name, count in theirs.get(layer, nothing).items()}
        for layer in sorted({*ours, *theirs})
    ]


def _by_layer(result: Result) -> dict[int, dict[str, int]]:
    sums: dict[int, dict[str, int]] = {}
    for row in result.per_layer:
        found = sums.setdefault(row["layer"], dict.fromkeys(LAYER_COUNTERS, 0))
        for name in LAYER_COUNTERS:
            found[name] += row[name]
    return sums


# -- Comparisons as rows: for the terminal, as one JSON document, and as a Parquet file that figures are drawn from.

#: Settings above a table; the others are in the document.
SHOWN = (*POLICIES, "platform", "contract", "scope")


def document(comparisons: Sequence[Comparison]) -> Row:
    """Return all comparisons as one JSON-ready document."""
    passed = all(comparison.passed for comparison in comparisons)
    return {"passed": passed, "sets": [_row(comparison) for comparison in comparisons]}


def to_frame(comparisons: Sequence[Comparison]) -> pl.DataFrame:
    """Return one row per comparison, as `results.validation` stores them."""
    return validation.to_frame([_row(comparison) | {"config": _flat(comparison.config)} for comparison in comparisons])


def heading(trace: Trace, comparisons: Sequence[Comparison]) -> list[str]:
    """Return the title lines: the runs, and how to read the table."""
    alike = {name for name in SHOWN if len({comparison.config[name] for comparison in comparisons}) == 1}
    first = comparisons[0].config
    return [
        f"LIVE, emulated, versus SIMULATED: {of_trace(trace)}",
        "; ".join(f"{name} {first[name]}" for name in SHOWN if name in alike),
        *(f"set {comparison.name}: {said}" for comparison in comparisons if (said := _settings(comparison, alike))),
        *capacities([(comparison.config, comparison.about) for comparison in comparisons]),
        *([] if trace.verified is None else [DRAFTED]),
        "replayed: the trace, without the model; closed loop: replay of the live run's own recording",
        "allowed 0: policies that do not change the output must be identical; the others are replayed open loop",
        "",
    ]


def measure_rows(comparisons: Sequence[Comparison]) -> list[Row]:
    """Return a table row per set and measure; the words of a long set name are spread over its rows."""
    outside = any(not measure.within for comparison in comparisons for measure in comparison.measures)
    return [
        {"set": words, **_shown(measure, outside)}
        for comparison in comparisons
        for words, measure in zip(_down(comparison.name, len(comparison.measures)), comparison.measures, strict=True)
    ]


def _down(name: str, rows: int) -> list[str]:
    """Spread a long name over the rows, one word each and the rest in the last."""
    words = name.split(maxsplit=rows - 1) if len(name) > LONG else [name]
    return words + [""] * (rows - len(words))


def quality_rows(comparisons: Sequence[Comparison]) -> list[Row]:
    """Return a table row per set that changes the model's output: miss rates and quality."""
    return [
        {
            "set": comparison.name,
            "lam": comparison.lam,
            "miss rate live": miss_rate(comparison, "live"),
            "miss rate replayed": miss_rate(comparison, "replayed"),
            "tokens scored": comparison.quality["tokens"],
            "perplexity": comparison.quality["perplexity"],
            "of the model alone": comparison.quality["perplexity_base"],
            "mean KL, nats": comparison.quality["mean_kl"],
            "same top-1": comparison.quality["top1"],
        }
        for comparison in comparisons
        if comparison.quality and not comparison.exact
    ]


def lines(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a verdict per set, and a line per exceeded tolerance."""
    verdicts = []
    for comparison in comparisons:
        closed = "; closed loop identical" if comparison.closed_ran and comparison.closed_loop is None else ""
        counted = f"{comparison.events:,} events of either log" if comparison.events else "counters only"
        verdicts.append(f"{comparison.name}: {comparison.verdict()} ({counted}{closed})")
        if comparison.open_loop is not None and not comparison.exact:
            verdicts.append(f"  open loop first differs at {comparison.open_loop.text()}")
        verdicts += [f"  not allowed: {complaint}" for complaint in comparison.complaints()]
    return verdicts


def miss_rate(each: Comparison, side: str) -> float | None:
    """Return misses per access of a side, `live` or `replayed`; None without accesses."""
    sums = {name: sum(layer[f"{side}_{name}"] for layer in each.layers) for name in ("misses", "accesses")}
    return MISS_RATE.value(sums)


def _settings(each: Comparison, alike: AbstractSet[str]) -> str:
    """Return the settings that are neither shared by all sets nor part of the set's name."""
    named = each.name.split()
    own = {name: each.config[name] for name in SHOWN if name not in alike}
    return "; ".join(f"{name} {value}" for name, value in own.items() if f"{name}={value}" not in named)


def _shown(measure: Measure, outside: bool) -> Row:
    shown: Row = {
        "what": measure.name,
        "live": measure.live,
        "replayed": measure.replayed,
        "error": _spelled(measure, measure.error),
        "allowed": _spelled(measure, measure.allowed),
    }
    return shown | ({"": "" if measure.within else "outside"} if outside else {})


def _spelled(measure: Measure, share: float | None) -> str:
    if share is None:
        return "-"
    return f"{100 * share:.3g} %" if measure.relative else f"{share:.3g}"


def _row(each: Comparison) -> Row:
    return {
        "rows_version": ROWS_VERSION,
        "name": each.name,
        "verdict": each.verdict(),
        "passed": each.passed,
        "exact": each.exact,
        "lam": each.lam,
        "config": each.config,
        "about": each.about,
        "measures": [_measure(measure) for measure in each.measures],
        "layers": list(each.layers),
        "events": each.events,
        "open_loop": _divergence(each.open_loop),
        "closed_ran": each.closed_ran,
        "closed_loop": _divergence(each.closed_loop),
        "quality": dict(each.quality) or None,
    }


def _measure(measure: Measure) -> Row:
    row: Row = {**measure._asdict(), "error": measure.error}
    numbers = ("live", "replayed", "error", "allowed")
    return row | {name: None if row[name] is None else float(row[name]) for name in numbers}


def _divergence(found: Divergence | None) -> Row | None:
    if found is None:
        return None
    return found._asdict() | {"tokens": None if found.tokens is None else list(found.tokens)}


def _flat(config: Row) -> Row:
    """Write lists of experts as text, as `results.read` does."""
    lists = {name: value for name, value in config.items() if isinstance(value, list)}
    return config | {name: " ".join(f"{layer}:{expert}" for layer, expert in value) for name, value in lists.items()}
