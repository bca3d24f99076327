"""A live model as a source of demand: the reference engine decides at its gates.

The model drives. At each gate the engine advances until it has decided what every token runs; it reads the gate's
output said as it would read a trace's rows, through the same code, so a replay of the rows kept here decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moereplay.policies.contract import DECODE, NONE, PREFILL, PolicyError
from moereplay.simulator.reference.counters import reweighed
from moereplay.simulator.reference.engine import Driven, FinishedRun
from moereplay.simulator.replay import Plan
from moereplay.simulator.source import Gate, GateReadings, Mixture, Pass, gate_of, weigh
from moereplay.tracegen.capture import Reading, Rows, watching
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.experts import Orders, Tiers, check_obeyed, executing
from moereplay.tracegen.live.offloaded import Transfers
from moereplay.tracegen.modules import MoeModules
from moereplay.tracegen.offload.machine import undisturbed
from moereplay.traces import routers
from moereplay.traces.demand import union_of
from moereplay.traces.routers import to_units
from moereplay.traces.schema import Geometry
from moereplay.traces.token_arrays import Predicted, rank


class Said(NamedTuple):
    """A reading as a trace keeps it; copies."""

    chosen: np.ndarray  #: (T, k) int16
    weights: np.ndarray  #: (T, k) f32
    logits: np.ndarray  #: (T, E) f32
    lookahead: tuple[np.ndarray, ...]  #: [d-1] (T, E) f32, zeros beyond the last gate


class LiveGates:
    """A `simulator.source.Gates` with one gate at a time: the one at which the model waits."""

    def __init__(self, modules: MoeModules, ready: Plan) -> None:
        self._geometry, self._bias = modules.geometry, modules.bias
        self._logits = "logits" in ready.chosen.needs  # otherwise none are handed on, as by a trace
        prefetch = ready.chosen.prefetch
        self._depth, self._own_scores = prefetch.policy.depth(prefetch.params), _own_scores(ready)
        self._said: Said | None = None
        self._at = -1
        self.verdict: Mixture | None = None

    @property
    def geometry(self) -> Geometry:
        """The model's."""
        return self._geometry

    def receive(self, layer: int, said: Said) -> None:
        """Take the reading of the gate at which the model waits."""
        self._at, self._said, self.verdict = layer, said, None

    def gate(self, step: Pass, layer: int) -> Gate:
        """Return the choice of the gate."""
        said = self._received(layer)
        ids = said.chosen.astype(np.int64)
        look = [self._look(layer, distance, said) for distance in range(1, self._depth + 1)]
        readings = GateReadings(ids, said.weights, said.logits if self._logits else None, look)
        demand = union_of(ids.tolist(), to_units(said.weights).tolist())
        return gate_of(readings, demand, self._geometry.router, self._bias_of(layer))

    def _received(self, layer: int) -> Said:
        if self._said is None or layer != self._at:
            raise AssertionError(f"the engine is at gate {layer}, the model at gate {self._at}")
        return self._said

    def _look(self, layer: int, distance: int, said: Said) -> Predicted:
        target, logits = (layer, said.logits) if self._own_scores else (layer + distance, said.lookahead[distance - 1])
        if target >= self._geometry.layers:
            return rank(np.zeros(logits.shape, np.int32))
        return rank(to_units(routers.scores(self._geometry.router, logits, self._bias_of(target))))

    def _bias_of(self, layer: int) -> np.ndarray | None:
        return None if self._bias is None else self._bias[layer]

    def weigh(self, step: Pass, layer: int, ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Compute gate weights from the logits of the current gate."""
        return weigh(self._geometry.router, self._received(layer).logits if self._logits else None, ids)

    def used(self, step: Pass, layer: int, mixture: Mixture) -> None:
        """Store the policies' decisions, for the model to run."""
        self._received(layer)
        self.verdict = mixture

    def first_uses(self) -> tuple[int, ...]:
        """Raise: a live run does not know the future."""
        return ()

    def pass_of(self, position: int) -> int:
        """Raises AssertionError: a plan refuses policies that need the future in a live run."""
        raise AssertionError(f"a live run does not know the pass of demand {position}")

    def popularity(self, tokens: int) -> Sequence[int]:
        """Raises AssertionError: a plan refuses policies that are fitted to the demand of a live run."""
        raise AssertionError(f"a live run does not know the demand of its first {tokens} tokens")


def depth_needed(ready: Plan) -> int:
    """Return the layers of look-ahead that the prefetch policy reads."""
    prefetch = ready.chosen.prefetch
    return 0 if _own_scores(ready) else prefetch.policy.depth(prefetch.params)


def rounding(ready: Plan, stored: float) -> list[float | None]:
    """Return the bits to which experts are rounded, per precision tier; None where weights have no more."""
    bits = ready.chosen.miss.policy.bits(ready.chosen.miss.params)
    return [None if bit >= stored else bit for bit in bits]


def changes_experts(ready: Plan, stored: float) -> bool:
    """Return whether experts may be dropped, replaced or rounded; otherwise the model's own experts run."""
    chosen = ready.chosen
    return chosen.routing.policy.drops or chosen.miss.policy.changes_output or any(rounding(ready, stored))


def _own_scores(ready: Plan) -> bool:
    return ready.chosen.prefetch.policy.own_scores(ready.chosen.prefetch.params)


class Emulation:
    """A model under one configuration: pass after pass through `forward`, then `close`."""

    def __init__(
        self,
        modules: MoeModules,
        ready: Plan,
        log: bool,
        lookahead: int,
        transfers: Transfers | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        """Evaluate and keep `lookahead` gates, at least `depth_needed`.

        With `transfers` the clock is real, and experts are computed from slots. `tiers` has the weights of few bits.
        """
        self._modules, self._lookahead, stored = modules, lookahead, modules.geometry.expert_bits
        self._gates = LiveGates(modules, ready)
        machine, slots = (transfers.thread.machine, transfers.slots) if transfers else (None, None)
        self._engine, self._transfers = Driven(self._gates, ready.spec(log), machine, slots), transfers
        self._bits, self._routing = rounding(ready, stored), ready.chosen.routing.policy.name
        #: What experts modules must do in a pass, inside `under_orders`; None where the model's own run is right.
        served = partial(self._served, transfers) if transfers else None
        ordered = transfers or changes_experts(ready, stored)
        self.orders = Orders(tiers=tiers or Tiers(), elsewhere=served) if ordered else None
        self._kept: list[list[Said]] = [[] for _ in modules.sites]
        self._executed: list[list[np.ndarray]] = [[] for _ in modules.sites]
        self._passes = self._tokens = 0

    def forward(self, model_pass: Callable[[], Tensor], tokens: int, request: int, prefill: bool) -> Tensor:
        """Run `model_pass`, one forward pass of the model over `tokens` tokens; returns what it returns."""
        self.begin(tokens, request, prefill)
        with watching(self._modules, self._lookahead, self.at_gate), under_orders(self._modules, self.orders):
            return self._whole(model_pass) if self._transfers is None else self._timed(model_pass, self._transfers)

    def begin(self, tokens: int, request: int, prefill: bool) -> None:
        """Begin a pass over `tokens` tokens: every gate calls `at_gate`; call `end` afterwards.

        `forward` does all of it.
        """
        phase = PREFILL if prefill else DECODE
        self._engine.begin(Pass.of_slice(self._passes, request, phase, tokens, self._tokens))
        self._passes, self._tokens, self._next = self._passes + 1, self._tokens + tokens, 0

    def end(self) -> None:
        """End the pass. Raises RecordError if gates were left out."""
        if self._next != len(self._modules.sites):
            raise RecordError(f"{self._modules.name}: a pass ran {self._next} of {len(self._modules.sites)} gates")

    def _timed(self, model_pass: Callable[[], Tensor], transfers: Transfers) -> Tensor:
        """Run the transfers' clock during the block."""
        with undisturbed():
            transfers.begin(self._engine)
            logits = self._whole(model_pass)
            transfers.end(self._engine)
        return logits

    def _whole(self, model_pass: Callable[[], Tensor]) -> Tensor:
        logits = model_pass()
        self.end()
        return logits

    def take(self) -> tuple[Rows, np.ndarray]:
        """Return the rows kept since the last take, and the executed experts (T, L, k) int16."""
        kept, executed = self._kept, self._executed
        self._kept, self._executed = [[] for _ in kept], [[] for _ in executed]
        ahead = [_by_token([[said.lookahead[d] for said in layer] for layer in kept]) for d in range(self._lookahead)]
        rows = Rows(
            chosen=_by_token([[said.chosen for said in layer] for layer in kept]),
            weights=_by_token([[said.weights for said in layer] for layer in kept]),
            logits=_by_token([[said.logits for said in layer] for layer in kept]),
            lookahead=tuple(ahead),
        )
        return rows, _by_token(executed)

    def close(self) -> FinishedRun:
        """End the run; returns the engine's counters and events."""
        return self._engine.close() if self._transfers is None else self._transfers.finish(self._engine)

    def at_gate(self, layer: int, reading: Reading) -> tuple[Tensor, Tensor] | None:
        """Return the ids and weights (T, k) that the policies give the experts; None for the gate's own choice."""
        if layer != self._next:
            raise RecordError(f"{self._modules.name}: gate {layer} ran where gate {self._next} was due")
        self._next += 1
        said = _said(reading, self._lookahead)
        if not np.isfinite(said.logits).all():
            raise RecordError(
                f"{self._modules.name}: router logits of MoE layer {layer} are not numbers (NaN); try another --dtype"
            )
        self._kept[layer].append(said)
        self._gates.receive(layer, said)
        if self._transfers is not None:
            self._transfers.come_to_gate(self._engine)
            return None  # it runs its own choice, which `prepare` has made sure of
        self._engine.advance(lambda: self._gates.verdict is not None)
        assert self._gates.verdict is not None
        self._keep(layer, self._gates.verdict)
        self._order(layer, self._gates.verdict)
        return as_ordered(self._modules, reading, said, self._gates.verdict)

    def _keep(self, layer: int, mixture: Mixture) -> None:
        shape = self._kept[layer][-1].chosen.shape
        self._executed[layer].append(np.array(mixture.run, np.int16).reshape(shape))

    def _served(self, transfers: Transfers, module: nn.Module, hidden: Tensor, ids: Tensor) -> Mapping[int, Tensor]:
        """Compute the step's experts from slots as they arrive; the engine has then decided what every token runs."""
        states = transfers.serve(self._engine, module, hidden, ids)
        assert self._gates.verdict is not None
        self._keep(self._next - 1, self._gates.verdict)
        return states

    def _order(self, layer: int, mixture: Mixture) -> None:
        pairs = zip(mixture.gate.ids, mixture.run, strict=True)
        if self.orders is None and any(NONE in run and NONE not in own for own, run in pairs):
            raise PolicyError(f"routing {self._routing} dropped an expert without declaring it: expected drops=True")
        if self.orders is not None and self._bits:
            rounded = {expert: self._bits[tier] for expert, tier in mixture.tiers.items()}
            self.orders.bits[self._modules.sites[layer].experts] = {e: bits for e, bits in rounded.items() if bits}


@contextmanager
def under_orders(modules: MoeModules, orders: Orders | None) -> Iterator[None]:
    """Make experts follow `orders` in this block, which is one pass. Raises RecordError at its end if some did not."""
    if orders is None:
        yield
        return
    with executing(modules.model, orders):
        yield
    check_obeyed(orders, [site.experts for site in modules.sites])


def as_ordered(modules: MoeModules, reading: Reading, said: Said, mixture: Mixture) -> tuple[Tensor, Tensor] | None:
    """Return the ids and weights (T, k) for the experts, or None if no token's set of experts has changed.

    As in the fidelity counters, a token that was routed to fewer experts, or runs one that its router did not choose,
    is reweighted from its logits; a token that only lost experts at a miss keeps the others' weights.
    """
    own = said.chosen.tolist()
    changed = [t for t, run in enumerate(mixture.run) if set(run) != set(own[t])]
    if not changed:
        return None
    ids, weights = reading.ids.clone(), reading.weights.clone()
    for t in changed:
        ids[t] = torch.tensor(mixture.run[t])
        weights[t] = torch.from_numpy(_weights(modules, said, t, own[t], mixture)).to(weights)
    return ids, weights


def _weights(modules: MoeModules, said: Said, t: int, own: list[int], mixture: Mixture) -> np.ndarray:
    """Return (k,) f32 for one token."""
    run = mixture.run[t]
    if reweighed(own, mixture.routed[t], run):
        return routers.weigh(modules.geometry.router, said.logits[t], np.asarray(run))
    kept = dict(zip(own, said.weights[t], strict=True))
    return np.array([kept[e] if e >= 0 else 0 for e in run], np.float32)


def _said(reading: Reading, lookahead: int) -> Said:
    ahead = [_numpy(logits) for logits in reading.lookahead]
    logits = _numpy(reading.logits)
    beyond = [np.zeros_like(logits)] * (lookahead - len(ahead))
    return Said(_numpy(reading.ids, torch.int16), _numpy(reading.weights), logits, (*ahead, *beyond))


def _numpy(tensor: Tensor, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Return a copy: the model may write into its own tensor later."""
    return tensor.to("cpu", dtype, copy=True).numpy()


def _by_token(layers: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Return (T, L, n) from (T', n) per layer and pass."""
    return np.stack([np.concatenate(passes) for passes in layers], axis=1)
