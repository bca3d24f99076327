"""Where demand comes from: a recorded trace, or anything that can answer at a gate as one would (a live model)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from policies.contract import Prefetch
from policies.grammar import Chosen
from traces import routers
from traces.demand import Union, demand_of, to_units
from traces.lookahead import Predicted, predicted
from traces.passes import schedule
from traces.schema import Geometry, Trace

READ_AHEAD = 512  #: tokens, one shard


class Pass(NamedTuple):
    """One forward pass."""

    index: int
    request: int
    phase: int  #: PREFILL or DECODE
    tokens: int
    start: int  #: first token in the source's token axis


class Gate(NamedTuple):
    """What is known when a gate has run; lists over the pass's T tokens, () where the source has none."""

    ids: Sequence[Sequence[int]]  #: (T, k) the model's own choice in rank order, -1 none
    demand: Union  #: its union in demand order
    mass: Sequence[Sequence[int]] = ()  #: (T, k) its gate weights in UNITs
    logits: Sequence[Sequence[float]] = ()  #: (T, E)
    choice: Sequence[Sequence[float]] = ()  #: (T, E) choice scores after group masking
    scores: Sequence[Sequence[int]] = ()  #: (T, E) router probabilities in UNITs
    look_order: Sequence[Sequence[Sequence[int]]] = ()  #: (D, T, E)
    look_score: Sequence[Sequence[Sequence[int]]] = ()  #: (D, T, E)


class Source(Protocol):
    """The demand side of an engine. Asked in order: every pass, and for each pass every layer."""

    @property
    def geometry(self) -> Geometry:
        """Sizes of the model's MoE part."""
        ...

    def passes(self) -> Iterator[Pass]:
        """Passes in run order."""
        ...

    def gate(self, step: Pass, layer: int) -> Gate:
        """The gate of a layer."""
        ...

    def weigh(self, step: Pass, layer: int, ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Gate weights in UNITs (T, k) of other ids than the model's own, from the unmodified logits."""
        ...

    def used(self, step: Pass, layer: int, ids: Sequence[Sequence[int]]) -> None:
        """What the policies made of the gate: the experts each token runs, -1 for dropped. A live model obeys."""
        ...

    def first_uses(self) -> Sequence[int]:
        """Position of each expert's first demand; () if the future is unknown."""
        ...


class Window:
    """The rows of one array around the pass in progress; a compressed store is slow to read token by token."""

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace, self._name = trace, name
        self._first = self._last = 0
        self._rows = np.empty(0)

    def rows(self, step: Pass) -> np.ndarray:
        """The rows of the pass's tokens."""
        stop = step.start + step.tokens
        if not self._first <= step.start < stop <= self._last:
            self._first, self._last = step.start, min(max(stop, step.start + READ_AHEAD), self._trace.tokens)
            self._rows = self._trace.read(self._name, self._first, self._last)
        return self._rows[step.start - self._first : stop - self._first]


class TraceSource:
    """A recorded trace under a schedule of passes; reads only the arrays that the policies need."""

    def __init__(self, trace: Trace, passes: str, prefetch: Chosen[Prefetch], needs: frozenset[str]) -> None:
        self._trace, self._plan = trace, schedule(trace, passes)
        self._demand = demand_of(trace, passes)
        self._ids = Window(trace, "chosen")
        self._weights = Window(trace, "weights") if "weights" in trace.arrays else None
        self._logits = Window(trace, "logits") if "logits" in needs else None
        self._look = self._predictions(prefetch)

    @property
    def geometry(self) -> Geometry:
        """The trace's."""
        return self._trace.geometry

    def _predictions(self, prefetch: Chosen[Prefetch]) -> list[Predicted]:
        depth = prefetch.policy.depth(prefetch.params)
        if prefetch.policy.own_scores(prefetch.params):
            return [predicted(self._trace, 0)] * depth
        return [predicted(self._trace, d) for d in range(1, depth + 1)]

    def passes(self) -> Iterator[Pass]:
        """The schedule."""
        plan = self._plan
        for index in range(len(plan)):
            start, stop = int(plan.start[index]), int(plan.stop[index])
            yield Pass(index, int(plan.request[index]), int(plan.phase[index]), stop - start, start)

    def gate(self, step: Pass, layer: int) -> Gate:
        """The recorded gate."""
        rows = slice(step.start, step.start + step.tokens)
        return Gate(
            ids=self._ids.rows(step)[:, layer].tolist(),
            demand=self._demand.step(step.index * self.geometry.layers + layer),
            mass=() if self._weights is None else to_units(self._weights.rows(step)[:, layer]).tolist(),
            look_order=[look.order[rows, layer].tolist() for look in self._look],
            look_score=[look.score[rows, layer].tolist() for look in self._look],
            **self._scores(step, layer),
        )

    def _scores(self, step: Pass, layer: int) -> dict[str, list]:
        if self._logits is None:
            return {}
        logits, router, bias = self._logits.rows(step)[:, layer], self.geometry.router, self._bias(layer)
        return {
            "logits": logits.tolist(),
            "choice": routers.choice_scores(router, logits, bias).tolist(),
            "scores": to_units(routers.scores(router, logits, bias)).tolist(),
        }

    def _bias(self, layer: int) -> np.ndarray | None:
        return None if self._trace.router_bias is None else self._trace.router_bias[layer]

    def weigh(self, step: Pass, layer: int, ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """From the recorded logits, by the router's own rule."""
        if self._logits is None:
            raise AssertionError("a policy that changes the mixture must declare that it needs logits")
        logits = self._logits.rows(step)[:, layer]
        return to_units(routers.weigh(self.geometry.router, logits, np.asarray(ids))).tolist()

    def used(self, step: Pass, layer: int, ids: Sequence[Sequence[int]]) -> None:
        """A trace does not react: replays of changed routing are open loop."""

    def first_uses(self) -> list[int]:
        """From the derived demand."""
        return self._demand.first_use.tolist()
