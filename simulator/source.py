"""Source of demand: a recorded trace, or anything that answers at a gate as a trace would (a live model)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from moereplay.policies.contract import NONE, PolicyError, Prefetch
from moereplay.policies.grammar import Chosen
from moereplay.traces import routers
from moereplay.traces.demand import Union, demand_of, union_of
from moereplay.traces.drafts import KNOWN, REJECTED
from moereplay.traces.passes import Passes, schedule
from moereplay.traces.routers import to_units
from moereplay.traces.schema import Geometry, Router, Trace
from moereplay.traces.token_arrays import Predicted, predicted
from moereplay.traces.units import NEVER

READ_AHEAD = 512  #: tokens, one shard
BLOCKS = 32  #: of so many tokens that an array keeps, at least, for passes whose tokens do not follow each other


class Row(NamedTuple):
    """One token of a pass."""

    request: int
    token: int  #: in the source's token axis
    phase: int  #: PREFILL or DECODE
    reads: int = NONE  #: the token whose routing it has; its own by default
    draft: int = KNOWN

    @property
    def routed(self) -> int:
        """The token whose routing it has."""
        return self.token if self.reads == NONE else self.reads

    @property
    def kept(self) -> bool:
        """False for a draft that is rejected: its output is thrown away."""
        return self.draft != REJECTED


class Pass(NamedTuple):
    """One forward pass: tokens of one or several requests that go through the model together.

    Policies see the request, phase and position of its first row.
    """

    index: int  #: in run order, from 0
    rows: Sequence[Row]  #: at least one

    @classmethod
    def of_slice(cls, index: int, request: int, phase: int, tokens: int, start: int) -> Pass:
        """Return a pass of `tokens` consecutive tokens of one request, from `start`."""
        return cls(index, [Row(request, token, phase) for token in range(start, start + tokens)])

    @classmethod
    def planned(cls, index: int, plan: Passes) -> Pass:
        """Return a pass of a schedule."""
        start, stop = int(plan.start[index]), int(plan.stop[index])
        if plan.rows is None:
            return cls.of_slice(index, int(plan.request[index]), int(plan.phase[index]), stop - start, start)
        rows = plan.rows
        columns = (rows.request, rows.token, rows.phase, rows.reads, rows.draft)
        return cls(index, list(map(Row, *(column[start:stop].tolist() for column in columns))))

    @property
    def tokens(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @property
    def request(self) -> int:
        """Number of the first row's request."""
        return self.rows[0].request

    @property
    def phase(self) -> int:
        """Phase of the first row: prefill or decode."""
        return self.rows[0].phase

    @property
    def leader(self) -> tuple[int, int]:
        """Request and phase of the first row, which are charged with a pass's shared work."""
        return self.request, self.phase

    @property
    def start(self) -> int:
        """Token of the first row."""
        return self.rows[0].token

    @property
    def at(self) -> slice | list[int]:
        """Tokens whose routing the rows have, as an index of the token axis: a slice if they are consecutive."""
        if len(self.rows) == 1:
            return slice(self.rows[0].routed, self.rows[0].routed + 1)
        tokens = [row.routed for row in self.rows]
        follow = tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        return slice(tokens[0], tokens[-1] + 1) if follow else tokens

    def parts(self) -> dict[tuple[int, int], list[int]]:
        """Return (request, phase) -> positions of its rows in the pass; one entry in a pass of one request."""
        if len(self.rows) == 1:
            return {self.leader: [0]}
        parts: dict[tuple[int, int], list[int]] = {}
        for t, row in enumerate(self.rows):
            parts.setdefault((row.request, row.phase), []).append(t)
        return parts

    def kept_parts(self) -> dict[tuple[int, int], list[int]]:
        """Return `parts` without rejected drafts; a part never loses all its rows."""
        if all(row.kept for row in self.rows):
            return self.parts()
        return {part: [t for t in places if self.rows[t].kept] for part, places in self.parts().items()}


class Gate(NamedTuple):
    """State of a gate after it has run; lists over the pass's T tokens, () where the source has none."""

    ids: Sequence[Sequence[int]]  #: (T, k) the model's own choice in rank order, -1 none
    demand: Union  #: its union in demand order
    mass: Sequence[Sequence[int]] = ()  #: (T, k) its gate weights in UNITs
    logits: Sequence[Sequence[float]] = ()  #: (T, E)
    choice: Sequence[Sequence[float]] = ()  #: (T, E) choice scores after group masking
    scores: Sequence[Sequence[int]] = ()  #: (T, E) router probabilities in UNITs
    look_order: Sequence[Sequence[Sequence[int]]] = ()  #: (D, T, E)
    look_score: Sequence[Sequence[Sequence[int]]] = ()  #: (D, T, E)


class GateReadings(NamedTuple):
    """Readings of one gate over the pass's T tokens, as arrays; None where the source has none or none is needed."""

    ids: np.ndarray  #: (T, k) in rank order, -1 none
    weights: np.ndarray | None  #: (T, k) f32
    logits: np.ndarray | None  #: (T, E) f32
    look: Sequence[Predicted]  #: [d] (T, E)


class Mixture(NamedTuple):
    """The executed mixture of a gate; (T, k) each, -1 for none."""

    gate: Gate  #: the router's own
    routed: Sequence[Sequence[int]]  #: after the routing policy
    run: Sequence[Sequence[int]]  #: after the miss policy, slot by slot
    tiers: Mapping[int, int]  #: executed expert -> precision tier (0 is the most precise) it ran at


class Gates(Protocol):
    """The gates of a run, requested in every pass, layer after layer."""

    @property
    def geometry(self) -> Geometry:
        """Sizes of the model's MoE part."""
        ...

    def gate(self, step: Pass, layer: int) -> Gate:
        """Return the gate of a layer."""
        ...

    def weigh(self, step: Pass, layer: int, ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return gate weights in UNITs (T, k) of ids other than the model's own, from the unmodified logits."""
        ...

    def used(self, step: Pass, layer: int, mixture: Mixture) -> None:
        """Report the mixture that the policies decided on. A live model executes it."""
        ...

    def first_uses(self) -> Sequence[int]:
        """Return the position of each expert's first demand; () if the future is unknown."""
        ...

    def pass_of(self, position: int) -> int:
        """Return the pass of a position in the demand stream; NEVER for NEVER. Only called if the future is known."""
        ...

    def popularity(self, tokens: int) -> Sequence[int]:
        """Count how often the first `tokens` tokens (0: all) chose each expert. Only called if the future is known."""
        ...


class Source(Gates, Protocol):
    """Gates with a schedule of passes."""

    def passes(self) -> Iterator[Pass]:
        """Yield passes in run order."""
        ...


@dataclass(frozen=True)
class Idle:
    """Compute has nothing to do until a later time, ns; links go on."""

    until: int


class Scheduler(Protocol):
    """Decides the rows of each pass when the previous pass has ended."""

    def next_rows(self, now: int) -> Sequence[Row] | Idle:
        """Return the rows of the pass that begins at `now` ns, or how long compute idles before it is asked again.

        An empty list ends the run.
        """
        ...


class InOrder:
    """The default schedule: the source's own passes, one after the other."""

    def __init__(self, source: Source) -> None:
        self._passes = source.passes()

    def next_rows(self, now: int) -> Sequence[Row]:
        """Return the rows of the source's next pass."""
        step = next(self._passes, None)
        return step.rows if step else ()


def gate_of(readings: GateReadings, demand: Union, router: Router, bias: np.ndarray | None) -> Gate:
    """Return the policies' view of a gate, from any source; `bias` (E,) is the layer's correction bias."""
    return Gate(
        ids=readings.ids.tolist(),
        demand=demand,
        mass=() if readings.weights is None else to_units(readings.weights).tolist(),
        look_order=[look.order.tolist() for look in readings.look],
        look_score=[look.score.tolist() for look in readings.look],
        **({} if readings.logits is None else _scores(readings.logits, router, bias)),
    )


def _scores(logits: np.ndarray, router: Router, bias: np.ndarray | None) -> dict[str, list]:
    return {
        "logits": logits.tolist(),
        "choice": routers.choice_scores(router, logits, bias).tolist(),
        "scores": to_units(routers.scores(router, logits, bias)).tolist(),
    }


def weigh(router: Router, logits: np.ndarray | None, ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return gate weights in UNITs (T, k) of any ids (T, k) by the router's rule. Raises PolicyError without logits."""
    if logits is None:
        raise PolicyError("a policy that changes the mixture must declare that it needs logits: needs=always('logits')")
    return to_units(routers.weigh(router, logits, np.asarray(ids))).tolist()


class Window:
    """Rows of one array around the current pass; a compressed store is slow to read token by token."""

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace, self._name = trace, name
        self._first = self._last = 0
        self._rows = np.empty(0)
        self._blocks: dict[int, np.ndarray] = {}  # of READ_AHEAD tokens each, in the order of their reading

    def rows(self, step: Pass) -> np.ndarray:
        """Return the rows of the pass's tokens, (T, L, ...)."""
        at = step.at
        if not isinstance(at, slice):
            return np.stack([self._row(token, most=max(BLOCKS, len(at))) for token in at])
        if not self._first <= at.start < at.stop <= self._last:
            self._first, self._last = at.start, min(max(at.stop, at.start + READ_AHEAD), self._trace.rows)
            self._rows = self._trace.read(self._name, self._first, self._last)
        return self._rows[at.start - self._first : at.stop - self._first]

    def _row(self, token: int, most: int) -> np.ndarray:
        """Return one token's row. Keeps `most` blocks, as many as the pass may span."""
        block, offset = divmod(token, READ_AHEAD)
        if block not in self._blocks:
            if len(self._blocks) >= most:
                del self._blocks[next(iter(self._blocks))]
            first = block * READ_AHEAD
            self._blocks[block] = self._trace.read(self._name, first, min(first + READ_AHEAD, self._trace.rows))
        return self._blocks[block][offset]


class TraceGates:
    """Recorded gates of a trace, in passes of any rows; reads only the arrays that the policies need.

    Future demand is unknown: it depends on the passes to come.
    """

    def __init__(
        self,
        trace: Trace,
        prefetch: Chosen[Prefetch],
        needs: frozenset[str],
        look: tuple[str, int] = ("recorded", 0),
    ) -> None:
        """`look` is the control of the look-ahead and its seed, see `traces.lookahead`."""
        self._trace = trace
        self._ids = Window(trace, "chosen")
        self._weights = Window(trace, "weights") if "weights" in trace.arrays else None
        self._logits = Window(trace, "logits") if "logits" in needs else None
        self._prefetch, self._control = prefetch, look

    @property
    def geometry(self) -> Geometry:
        """Sizes of the trace's model."""
        return self._trace.geometry

    @cached_property
    def _look(self) -> list[Predicted]:
        prefetch, look = self._prefetch, self._control
        depth = prefetch.policy.depth(prefetch.params)
        if prefetch.policy.own_scores(prefetch.params):
            return [predicted(self._trace, 0, *look)] * depth
        return [predicted(self._trace, d, *look) for d in range(1, depth + 1)]

    def gate(self, step: Pass, layer: int) -> Gate:
        """Return the recorded gate of each row."""
        readings = self._readings(step, layer)
        mass = () if readings.weights is None else to_units(readings.weights).tolist()
        return self._gate(readings, union_of(readings.ids.tolist(), mass), layer)

    def _gate(self, readings: GateReadings, demand: Union, layer: int) -> Gate:
        return gate_of(readings, demand, self.geometry.router, self._bias(layer))

    def _readings(self, step: Pass, layer: int) -> GateReadings:
        at = step.at
        return GateReadings(
            ids=self._ids.rows(step)[:, layer],
            weights=None if self._weights is None else self._weights.rows(step)[:, layer],
            logits=self._logits_of(step, layer),
            look=[Predicted(look.order[at, layer], look.score[at, layer]) for look in self._look],
        )

    def _logits_of(self, step: Pass, layer: int) -> np.ndarray | None:
        return None if self._logits is None else self._logits.rows(step)[:, layer]

    def _bias(self, layer: int) -> np.ndarray | None:
        return None if self._trace.router_bias is None else self._trace.router_bias[layer]

    def weigh(self, step: Pass, layer: int, ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Weigh by the recorded logits."""
        return weigh(self.geometry.router, self._logits_of(step, layer), ids)

    def used(self, step: Pass, layer: int, mixture: Mixture) -> None:
        """Do nothing: a trace does not react, so replays of changed routing are open loop."""

    def first_uses(self) -> Sequence[int]:
        """Return (): unknown."""
        return ()

    def pass_of(self, position: int) -> int:
        """Raises AssertionError: only called when future demand is known."""
        raise AssertionError(f"the pass of demand {position} depends on a schedule that is not known yet")

    def popularity(self, tokens: int) -> list[int]:
        """Count over the recorded choice."""
        sizes, last = self.geometry, self._trace.tokens if tokens == 0 else min(tokens, self._trace.tokens)
        counts = np.zeros(sizes.layers * sizes.experts, np.int64)
        base = np.arange(sizes.layers)[:, None] * sizes.experts
        for first in range(0, last, READ_AHEAD):
            chosen = self._trace.read("chosen", first, min(first + READ_AHEAD, last)).astype(np.int64)
            counts += np.bincount((chosen + base)[chosen >= 0], minlength=len(counts))
        return counts.tolist()


class TraceSource(TraceGates):
    """A recorded trace under the schedule of `--passes`, with known future demand."""

    def __init__(
        self,
        trace: Trace,
        passes: str,
        prefetch: Chosen[Prefetch],
        needs: frozenset[str],
        look: tuple[str, int] = ("recorded", 0),
    ) -> None:
        super().__init__(trace, prefetch, needs, look)
        self._plan, self._demand = schedule(trace, passes), demand_of(trace, passes)
        self._begins = np.asarray(self._demand.offsets)[:: trace.geometry.layers]  # a view: no list of all passes

    def passes(self) -> Iterator[Pass]:
        """Yield the passes of the schedule."""
        return (Pass.planned(index, self._plan) for index in range(len(self._plan)))

    def gate(self, step: Pass, layer: int) -> Gate:
        """Return the recorded gate, with the demand derived from the trace."""
        demand = self._demand.step(step.index * self.geometry.layers + layer)
        return self._gate(self._readings(step, layer), demand, layer)

    def first_uses(self) -> Sequence[int]:
        """Return the first uses of the derived demand."""
        return self._demand.first_use.tolist()

    def pass_of(self, position: int) -> int:
        """Bisect the positions at which passes begin."""
        return NEVER if position == NEVER else bisect_right(self._begins, position) - 1
