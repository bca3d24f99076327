"""Counters, lifetimes and the event log of a run, and the distance of the executed mixture from the router's own.

Counters are kept per (layer, phase) and per request. Parity, timelines and first divergence compare logs.

A recorded weight and one recomputed from recorded logits differ in their last bits, which would change demand order.
Therefore a policy that changes nothing changes no weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import simpy

from moereplay.policies.contract import NONE
from moereplay.results.counters import BY_LAYER, COUNTERS, LIFETIME_BUCKETS, PHASES, queued, reported
from moereplay.results.result import Columns, Event, Row
from moereplay.simulator.reference.machine import Activity, Span
from moereplay.simulator.reference.state import Tables
from moereplay.simulator.source import Gate, Gates, Mixture, Pass
from moereplay.traces.drafts import KNOWN


class Counters:
    """Statistics of a run. Work that a pass does once is charged to its first row; see `charge_to`."""

    def __init__(self, layers: int, arrivals: Sequence[int] = (), by_layer: bool = False) -> None:
        """`arrivals` are by request, ns; empty if all are there at the start. `by_layer` keeps `request_layers`."""
        self._arrivals = arrivals
        self._layered = BY_LAYER if by_layer else ()
        self._by_layer: dict[tuple[int, int, int], Row] = {}  # of request, layer, phase
        self._cells = [[_zeros() for _ in PHASES] for _ in range(layers)]
        self._lifetimes = [[[0] * LIFETIME_BUCKETS for _ in PHASES] for _ in range(layers)]
        self._requests: dict[int, Row] = {}
        self.phase = 0
        self._row: Row = {}

    def begin_pass(self, now: int, step_pass: Pass) -> None:
        """Charge to this pass from now on; a request begins with its first pass."""
        for (request, phase), places in step_pass.kept_parts().items():
            if request not in self._requests:
                self._requests[request] = {
                    "request": request,
                    "start_ns": now,
                    "ttft_ns": None,
                    "decode_ns": 0,
                    "decode_passes": 0,
                    "decode_tokens": 0,
                    "end_ns": now,
                    "tokens": 0,
                    **queued(self._arrivals, request, now),
                    **_zeros(),
                }
            self.charge_to(request, phase)
            self._row["tokens"] += len(places)
            self._row["decode_tokens"] += len(places) if phase else 0
        self._count_drafts(step_pass)
        self.charge_to(step_pass.request, step_pass.phase)

    def _count_drafts(self, step_pass: Pass) -> None:
        for row in step_pass.rows:
            if row.draft != KNOWN:
                self.charge_to(row.request, row.phase)
                self.count("draft_rows", 0)
                self.count("draft_rejected", 0, int(not row.kept))

    def charge_to(self, request: int, phase: int) -> None:
        """Charge to this request and phase from now on, for work of single tokens of a pass."""
        self.phase, self._row = phase, self._requests[request]

    def end_pass(self, began: int, now: int, step_pass: Pass) -> None:
        """Add the pass's time to the TTFT or TPOT of every request in it."""
        for request, phase in step_pass.parts():
            row = self._requests[request]
            row["end_ns"] = now
            if phase == 0:
                row["ttft_ns"] = now - row["start_ns"]
                continue
            row["decode_ns"] += now - began
            row["decode_passes"] += 1

    def count(self, name: str, layer: int, amount: int = 1) -> None:
        """Add to a counter of this layer, phase and request."""
        self._cells[layer][self.phase][name] += amount
        self._row[name] += amount
        if name in self._layered:
            key = self._row["request"], layer, self.phase
            self._by_layer.setdefault(key, dict.fromkeys(BY_LAYER, 0))[name] += amount

    def charge(self, activity: Activity, name: str, layer: int) -> None:
        """Count an activity's time for the pass in which it begins, now if it is known, else at its end."""
        cells = self._cells[layer][self.phase], self._row

        def add(span: Span) -> None:
            for cell in cells:
                cell[name] += span.spent

        activity.measured(add)

    def lived(self, layer: int, steps: int) -> None:
        """Record the lifetime of an evicted copy in steps."""
        self._lifetimes[layer][self.phase][min(steps.bit_length(), LIFETIME_BUCKETS - 1)] += 1

    def totals(self, end: int) -> Row:
        """Return sums over layers and phases."""
        cells = [cell for layer in self._cells for cell in layer]
        totals: Row = {name: sum(cell[name] for cell in cells) for name in COUNTERS}
        histograms = [histogram for layer in self._lifetimes for histogram in layer]
        return totals | {"time_ns": end, "lifetime": [sum(bucket) for bucket in zip(*histograms, strict=True)]}

    def per_layer(self) -> list[Row]:
        """Return a row per layer and phase, without phases that had no step."""
        return [
            {"layer": layer, "phase": PHASES[phase]}
            | reported(cell.values(), "layer")
            | {"lifetime": self._lifetimes[layer][phase]}
            for layer, cells in enumerate(self._cells)
            for phase, cell in enumerate(cells)
            if any(cell.values())
        ]

    def per_request(self) -> list[Row]:
        """Return a row per request in run order."""
        left_out = {name for name, counter in COUNTERS.items() if "request" not in counter.per}
        return [{name: it for name, it in row.items() if name not in left_out} for row in self._requests.values()]

    def request_layers(self) -> Columns:
        """Return the columns of a row per request, layer and phase; empty if they were not kept."""
        if not self._layered:
            return {}
        place = {request: at for at, request in enumerate(self._requests)}
        counted = [(key, row) for key, row in self._by_layer.items() if any(row.values())]
        counted.sort(key=lambda each: (place[each[0][0]], *each[0][1:]))
        key = {"request": [key[0] for key, _ in counted], "layer": [key[1] for key, _ in counted]}
        key |= {"phase": [PHASES[key[2]] for key, _ in counted]}
        return key | {name: [row[name] for _, row in counted] for name in BY_LAYER}


def _zeros() -> Row:
    return dict.fromkeys(COUNTERS, 0)


# the event log

NO_EXPERT = -1


class EventLog:
    """Events in order, with their times; empty unless `keep`."""

    def __init__(self, env: simpy.Environment, tables: Tables, keep: bool) -> None:
        self._env, self._now, self._keep = env, tables.now, keep
        self.events: list[Event] = []

    def note(self, kind: str, y: int, cause: str) -> None:
        """Add an event that takes no time."""
        if not self._keep:
            return
        now, layer, expert, precision = self._now, self._now["layer"], NO_EXPERT, 0
        if y != NO_EXPERT:
            x, precision = divmod(y, now["precisions"])
            layer, expert = divmod(x, now["experts"])
        at = int(self._env.now)
        self.events.append(Event(at, at, kind, now["pass"], layer, expert, precision, cause))

    def begin(self, kind: str, y: int, activity: Activity, cause: str) -> None:
        """Add an activity at its start; its times are filled in now if they are known, else at its end."""
        line = len(self.events)
        self.note(kind, y, cause)
        if self._keep:
            activity.measured(partial(self._fill_in, line))

    def _fill_in(self, line: int, span: Span) -> None:
        self.events[line] = replace(self.events[line], t0=span.began, t1=span.ended)


# the mixture: the gate weights that it runs with, and its distance from the router's own

Rows = Sequence[Sequence[int]]


def weights_of(source: Gates, step_pass: Pass, layer: int, gate: Gate, routed: Rows, run: Rows) -> Rows:
    """Return (T, k) UNITs of `run`, given the routed experts; () if nothing changed and none are recorded."""
    tokens = list(zip(gate.ids, routed, run, strict=True))
    anew = [reweighed(*token) for token in tokens]
    if not any(anew) and not gate.mass:
        return ()
    weighed = source.weigh(step_pass, layer, run) if any(anew) else ()
    if not gate.mass:
        return weighed
    return [weighed[t] if anew[t] else kept(gate, t, run[t]) for t in range(len(tokens))]


def kept(gate: Gate, t: int, run: Sequence[int]) -> list[int]:
    """Return the router's weights of those of its experts that token t runs."""
    own = dict(zip(gate.ids[t], gate.mass[t], strict=True))
    return [own[e] if e != NONE else 0 for e in run]


def reweighed(own: Sequence[int], routed: Sequence[int], run: Sequence[int]) -> bool:
    """Return True if a token's weights are recomputed: it has fewer experts, or one that is not its own.

    Otherwise every expert keeps its recorded weight; dropping one at a miss does not change the others.
    """
    return replaced(own, run) or sum(e != NONE for e in routed) < sum(e != NONE for e in own)


def replaced(own: Sequence[int], run: Sequence[int]) -> bool:
    """Return True if a token runs an expert that its router did not choose."""
    return any(e not in (*own, NONE) for e in run)


# distance: counted only if policies may change the mixture


def count_fidelity(counters: Counters, source: Gates, step_pass: Pass, layer: int, mixture: Mixture) -> None:
    """Count kept, substituted and dropped assignments and gate weight, rank displacement, total variation.

    Each token's are charged to its own request and phase; rejected drafts count nothing.
    """
    gate, run = mixture.gate, mixture.run
    same = list(map(list, gate.ids)) == run
    tokens = list(zip(gate.ids, mixture.routed, run, strict=True))
    anew = [] if same else [reweighed(*token) for token in tokens]
    weighed = source.weigh(step_pass, layer, run) if any(anew) else ()
    for part, places in step_pass.kept_parts().items():
        counters.charge_to(*part)
        if same:
            _count_kept(counters, layer, gate, places)
        else:
            for t in places:
                _count_token(counters, layer, gate, t, run[t], weighed[t] if anew[t] else ())
        _count_low(counters, layer, mixture, places)
    counters.charge_to(*step_pass.leader)


def _count_kept(counters: Counters, layer: int, gate: Gate, places: Sequence[int]) -> None:
    """Count tokens that run the router's choice; a foreign trace may have weights of unrouted experts."""
    counters.count("assignments_kept", layer, sum(e != NONE for t in places for e in gate.ids[t]))
    weighed = places if gate.mass else ()
    pairs = (pair for t in weighed for pair in zip(gate.ids[t], gate.mass[t], strict=True))
    mass = sum(mass for e, mass in pairs if e != NONE)
    counters.count("mass", layer, mass)
    counters.count("mass_kept", layer, mass)


def _count_token(counters: Counters, layer: int, gate: Gate, t: int, run: Sequence[int], anew: Sequence[int]) -> None:
    own = gate.ids[t]
    kept = [j for j, e in enumerate(own) if e != NONE and e in run]
    counters.count("assignments_kept", layer, len(kept))
    counters.count("rank_displacement", layer, _displacement(gate, t, own, run))
    if not gate.mass:
        return
    before = {e: mass for e, mass in zip(own, gate.mass[t], strict=True) if e != NONE}
    after = {e: mass for e, mass in (zip(run, anew, strict=True) if anew else before.items()) if e in run and e != NONE}
    counters.count("mass", layer, sum(before.values()))
    counters.count("mass_kept", layer, sum(before[own[j]] for j in kept))
    counters.count("variation", layer, sum(abs(before.get(e, 0) - after.get(e, 0)) for e in before | after) // 2)
    _count_lost(counters, layer, own, run, before)


def _count_lost(
    counters: Counters, layer: int, own: Sequence[int], run: Sequence[int], before: Mapping[int, int]
) -> None:
    """Count the weight of experts that did not run.

    Each substitute replaces one of them, first those whose own slot runs something.
    """
    lost = [j for j, e in enumerate(own) if e != NONE and e not in run]
    lost.sort(key=lambda j: (run[j] == NONE, j))
    foreign = sum(e not in (*own, NONE) for e in run)
    for name, slots in (("mass_substituted", lost[:foreign]), ("mass_dropped", lost[foreign:])):
        counters.count(name, layer, sum(before[own[j]] for j in slots))


def _count_low(counters: Counters, layer: int, mixture: Mixture, places: Sequence[int]) -> None:
    """Count the weight of the router's choice that ran below the highest precision, the second and the third."""
    if not any(mixture.tiers.values()) or not mixture.gate.mass:
        return
    for t in places:
        pairs = zip(mixture.gate.ids[t], mixture.gate.mass[t], strict=True)
        kept = [(mixture.tiers.get(e, 0), mass) for e, mass in pairs if e != NONE and e in mixture.run[t]]
        for tier, name in enumerate(("mass_low_precision", "mass_below_second", "mass_below_third")):
            counters.count(name, layer, sum(mass for below, mass in kept if below > tier))


def _displacement(gate: Gate, t: int, own: Sequence[int], run: Sequence[int]) -> int:
    """Return the sum over executed slots of |rank by choice score - slot|; chosen experts keep their rank."""
    if not gate.choice:
        return 0
    others = [e for e in range(len(gate.choice[t])) if e not in own]
    others.sort(key=lambda e: (-gate.choice[t][e], e))
    rank = {e: place for place, e in enumerate([*own, *others])}
    return sum(abs(rank[e] - slot) for slot, e in enumerate(run) if e != NONE)
