"""A live model with real transfers: its experts' weights lie in a slow tier, and it computes from slots.

The model's own thread is the accelerator. When it comes to a gate the engine goes on; when it comes to its experts it
computes what the engine asks for, as it is asked: from the slot that the expert was read into, after its bytes were
compared with the model's. States are added in the order of the model's `eager` experts, so no bit of those changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from simulator.errors import ConfigError
from simulator.reference.clock import COMPUTE, LINK, Activity, Span
from simulator.reference.driven import Driven
from simulator.reference.machine import Machine
from simulator.reference.transfers import Transfer
from simulator.replay import Plan
from tracegen.errors import RecordError
from tracegen.live.experts import Weights, projections, run_expert
from tracegen.modules import MoeModules
from tracegen.offload.arena import Arena, Slots
from tracegen.offload.clock import RealClock, Worker
from tracegen.offload.durations import DENSE, NoProcessor
from tracegen.offload.experts import Layout
from tracegen.offload.slow_tier import SlowTier


class Asked(NamedTuple):
    """What the engine waits for the model to do."""

    y: int  #: expert, or DENSE
    activity: Activity
    begun: int


class ModelThread:
    """Accelerator and link of a live run on a real clock."""

    depth = 1

    def __init__(self, slots: Slots, slow: SlowTier) -> None:
        """A thread begins that reads; `close` ends it."""
        self._slots, self._slow = slots, slow
        self.asked: deque[Asked] = deque()
        self.clock = RealClock()
        self._loader = Worker(self.clock, LINK)
        self.machine = Machine(self.clock, self, NoProcessor(), (self,))

    def dense(self, layer: int, tokens: int) -> Activity:
        """Ends when the model comes to its gate."""
        return self._ask(DENSE)

    def expert(self, layer: int, y: int, tokens: int) -> Activity:
        """Ends when the model has computed it."""
        return self._ask(y)

    def _ask(self, y: int) -> Activity:
        activity = Activity(self.clock, COMPUTE)
        self.asked.append(Asked(y, activity, self.clock.now))
        return activity

    def done(self) -> None:
        """The model has done what was asked first."""
        first, now = self.asked.popleft(), self.clock.now
        first.activity.finish(Span(first.begun, now, now - first.begun))

    def start(self, transfer: Transfer, contended: bool) -> Activity:
        """On the loader's thread."""
        slot, y = self._slots.of(transfer.y), transfer.y
        return self._loader.begin(lambda: self._slow.read(y, slot))

    def abandon(self) -> None:
        """The loader ends what it has begun; what takes the slot is read after that."""

    def close(self) -> None:
        """The thread ends after what it has begun."""
        self._loader.close()


class Transfers:
    """What an `Emulation` needs for real transfers: a machine, slots, and who computes from them."""

    def __init__(self, modules: MoeModules, slow: SlowTier, arena: Arena) -> None:
        """`slow` has the model's experts (`contents_of`); `close` ends its reader."""
        self._layers = {site.experts: layer for layer, site in enumerate(modules.sites)}
        self._experts = modules.geometry.experts
        self.slots = Slots(arena, slow)
        self.thread = ModelThread(self.slots, slow)

    def come_to_gate(self, engine: Driven) -> None:
        """The model has computed a dense part."""
        engine.advance(lambda: bool(self.thread.asked))
        self.thread.done()

    def serve(self, engine: Driven, module: nn.Module, hidden: Tensor, ids: Tensor) -> dict[int, Tensor]:
        """Compute what the engine asks for, as it comes, until the step is over: states (n, H) by expert."""
        states: dict[int, Tensor] = {}
        while True:
            engine.advance(lambda: bool(self.thread.asked) or engine.waits_for_a_pass)
            if not self.thread.asked or self.thread.asked[0].y == DENSE:
                return states
            y = self.thread.asked[0].y
            expert = y - self._layers[module] * self._experts
            states[expert] = computed(expert, self.slots.of(y), module, hidden, ids)
            self.thread.done()

    def close(self) -> None:
        """No more is read."""
        self.thread.close()


def check_offloadable(plan: Plan) -> None:
    """Raises ConfigError for policies under which the model does not run its own choice, whole, on one device."""
    chosen, miss = plan.chosen, plan.chosen.miss
    changes = miss.policy.changes_output or miss.policy.bits(miss.params) or miss.policy.uses_cpu(miss.params)
    if chosen.routing.policy.name != "standard" or changes:
        raise ConfigError(
            f"routing {chosen.routing.text()}, miss {miss.text()}: with real transfers a model runs its own choice; "
            "use routing standard and miss fetch"
        )


def layout_of(modules: MoeModules) -> Layout:
    """Of the model's own experts. Raises RecordError for a model whose experts do not lie together."""
    for site in modules.sites:
        if len(projections(site.experts)) != 2:
            raise RecordError(f"{modules.name} does not keep its experts together; they cannot be offloaded")
    sizes = tuple(sum(each[0].nbytes for each in _weights(site.experts)) for site in modules.sites)
    return Layout(modules.geometry.experts, sizes, "of the model")


def contents_of(modules: MoeModules, layout: Layout) -> Iterator[np.ndarray]:
    """The bytes of every expert, in whole pages, (n,) uint8."""
    for layer, site in enumerate(modules.sites):
        for expert in range(layout.experts):
            content = np.zeros(layout.padded(layer * layout.experts + expert), np.uint8)
            parts = [each[expert].contiguous().cpu().view(-1).view(torch.uint8) for each in _weights(site.experts)]
            content[: layout.sizes[layer]] = torch.cat(parts).numpy()
            yield content


def _weights(experts: nn.Module) -> list[Tensor]:
    return [getattr(experts, name).data for name in projections(experts)]


def weights_in(slot: Tensor, experts: nn.Module, expert: int) -> Weights:
    """One expert's weights by name, as they lie in a slot. Raises AssertionError for other bytes than the model's."""
    found, begin = {}, 0
    for name in projections(experts):
        own = getattr(experts, name).data[expert]
        here = slot[begin : begin + own.nbytes].view(own.dtype).view(own.shape)
        if not torch.equal(here, own):
            raise AssertionError(f"the slot of expert {expert} holds other bytes; what it computes would be wrong")
        found[name], begin = here, begin + own.nbytes
    return found


def computed(expert: int, slot: Tensor, module: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """One expert over its tokens, from its slot: (n, H)."""
    _, token = ids.T.eq(expert).nonzero(as_tuple=True)
    return run_expert(module, expert, hidden[token], weights=weights_in(slot, module, expert))
