"""A live model with real transfers: its experts' weights are in a slow tier, and it computes from slots.

The model's own thread is the accelerator. At a gate the engine continues; at the experts the model
computes what the engine asks for, as it is asked: from the slot that the expert was read into, after its bytes were
compared with the model's. States are added in the order of the model's `eager` experts, so no bit of those changes.

The clock runs while the model's pass does. It stands while bytes are compared, and between passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from moereplay.simulator.errors import ConfigError
from moereplay.simulator.reference.engine import Driven, FinishedRun
from moereplay.simulator.reference.machine import COMPUTE, LINK, Activity, Machine, Span
from moereplay.simulator.reference.state import Transfer
from moereplay.simulator.replay import Plan
from moereplay.tracegen.checkpoint import Loaded
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.experts import Weights, check_computable, projections, run_expert
from moereplay.tracegen.modules import MoeModules
from moereplay.tracegen.offload.bench import slots_needed
from moereplay.tracegen.offload.durations import DENSE, NoProcessor
from moereplay.tracegen.offload.machine import RealClock, Worker
from moereplay.tracegen.offload.memory import Arena, Layout, Slots, arena_of, described
from moereplay.tracegen.offload.part import Named
from moereplay.tracegen.offload.slow_tier import SlowTier, faults_named, opened, throttled
from moereplay.traces.documents import canonical_digest

HEAD = DENSE - 1  #: in the place of an expert: what follows the last layer


class Asked(NamedTuple):
    """A request of the engine that it waits for the model to carry out."""

    y: int  #: expert, DENSE or HEAD
    activity: Activity
    begun: int


class ModelThread:
    """Accelerator and link of a live run on a real clock, which stands until the first pass."""

    depth = 1

    def __init__(self, slots: Slots, slow: SlowTier, device: torch.device) -> None:
        """Start the thread that reads; `close` ends it."""
        self._slots, self._slow, self._device = slots, slow, device
        self.asked: deque[Asked] = deque()
        self.clock = RealClock()
        self.clock.pause()
        self._loader = Worker(self.clock, LINK)
        self.machine = Machine(self.clock, self, NoProcessor(), (self,), head=self.head)

    def dense(self, layer: int, tokens: int) -> Activity:
        """Return an activity that ends when the model reaches its gate."""
        return self._ask(DENSE)

    def expert(self, layer: int, y: int, tokens: int) -> Activity:
        """Return an activity that ends when the model has computed the expert."""
        return self._ask(y)

    def head(self, tokens: int) -> Activity:
        """Return an activity that ends with the model's pass."""
        return self._ask(HEAD)

    def _ask(self, y: int) -> Activity:
        activity = Activity(self.clock, COMPUTE)
        self.asked.append(Asked(y, activity, self.clock.now))
        return activity

    def done(self) -> None:
        """Note that the model has finished its first open activity."""
        self.wait()
        first, now = self.asked.popleft(), self.clock.now
        first.activity.finish(Span(first.begun, now, now - first.begun))

    def wait(self) -> None:
        """Wait until the device has computed all of its work; a CPU already has."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def start(self, transfer: Transfer, contended: bool) -> Activity:
        """Start a transfer on the loader's thread."""
        slot, y = self._slots.of(transfer.y), transfer.y
        return self._loader.begin(lambda: self._slow.read(y, slot))

    def abandon(self) -> None:
        """Let the loader finish its read; the next read into the slot starts after that."""

    def close(self) -> None:
        """End the thread after the work that it has begun."""
        self.clock.resume()  # or a read that waits for it never ends
        self._loader.close()


class Transfers:
    """Parts that an `Emulation` needs for real transfers: a machine, slots, and the computation that uses them."""

    def __init__(self, modules: MoeModules, slow: SlowTier, arena: Arena, about: Mapping[str, object]) -> None:
        """Take the slow tier with the model's experts (`contents_of`).

        `close` ends its reader thread; `about` is stored in the result.
        """
        self._layers = {site.experts: layer for layer, site in enumerate(modules.sites)}
        self._experts, self.about = modules.geometry.experts, about
        self.slots = Slots([arena], slow)
        self.thread = ModelThread(self.slots, slow, device_of(modules))

    def begin(self, engine: Driven) -> None:
        """Begin a pass of the model, with the dense part of its first layer, and resume the clock."""
        self.thread.wait()
        self.thread.clock.resume()
        self._advance(engine)

    def come_to_gate(self, engine: Driven) -> None:
        """Note that the model has computed a dense part."""
        self._advance(engine)
        self.thread.done()

    def serve(self, engine: Driven, module: nn.Module, hidden: Tensor, ids: Tensor) -> dict[int, Tensor]:
        """Compute the experts that the engine requests, in order, until the step ends: states (n, H) by expert."""
        states: dict[int, Tensor] = {}
        while (y := self._advance(engine)) >= 0:
            expert = y - self._layers[module] * self._experts
            states[expert] = self._computed(expert, self.slots.of(y), module, hidden, ids)
            self.thread.done()
        return states

    def end(self, engine: Driven) -> None:
        """End the model's pass with its head, and pause the clock."""
        self.thread.done()
        with faults_named():
            engine.advance(lambda: engine.waits_for_a_pass)
        self.thread.clock.pause()

    def finish(self, engine: Driven) -> FinishedRun:
        """Wait for transfers on the link after the last pass."""
        self.thread.clock.resume()
        with faults_named():
            return engine.close()

    def close(self) -> None:
        """Stop reading."""
        self.thread.close()

    def _advance(self, engine: Driven) -> int:
        """Advance the engine to its next request. Raises ConfigError if the slow tier fails."""
        with faults_named():
            engine.advance(lambda: bool(self.thread.asked))
        return self.thread.asked[0].y

    def _computed(self, expert: int, slot: Tensor, module: Any, hidden: Tensor, ids: Tensor) -> Tensor:
        """Run an expert on its tokens from its slot: (n, H)."""
        self.thread.wait()
        with self.thread.clock.paused():
            weights = weights_in(slot, module, expert)
        _, token = ids.T.eq(expert).nonzero(as_tuple=True)
        return run_expert(module, expert, hidden[token], weights=weights)


@contextmanager
def real_transfers(
    loaded: Loaded, modules: MoeModules, plan: Plan, named: Named, bytes_per_s: float | None = None
) -> Iterator[Transfers]:
    """Open the real transfers of a run: the named slow tier, throttled, with the model's experts and slots for `plan`.

    Raises ConfigError where either has no room, RecordError for a model whose experts cannot be moved.
    """
    check_movable(modules)
    layout, device = layout_of(loaded, modules), str(device_of(modules))
    with opened(named, layout, device, contents_of(modules, layout)) as slow:
        about = {"device": described(device), "slow_tier": slow.label, "throttle_bytes_per_s": bytes_per_s}
        arena = arena_of(slots_needed(plan), max(layout.sizes), device)
        transfers = Transfers(modules, throttled(slow, bytes_per_s), arena, about)
        try:
            yield transfers
        finally:
            transfers.close()


def check_movable(modules: MoeModules) -> None:
    """Raises RecordError for a model whose experts do not lie together, as numbers, on one device."""
    check_computable([site.experts for site in modules.sites])
    devices = sorted({str(weight.device) for site in modules.sites for weight in site.experts.parameters()})
    if len(devices) > 1:
        raise RecordError(
            f"--slow-tier requires all experts on one device, found {', '.join(devices)}; omit --device-map"
        )


def device_of(modules: MoeModules) -> torch.device:
    """Return the device of the experts."""
    return next(modules.sites[0].experts.parameters()).device


def layout_of(loaded: Loaded, modules: MoeModules) -> Layout:
    """Return the layout of the model's experts, named by a digest of everything that determines their bytes."""
    shapes = [[str(weight.dtype), *weight.shape] for site in modules.sites for weight in _weights(site.experts)]
    document = [loaded.weights_sha256, loaded.dtype, transformers.__version__, shapes]
    sizes = tuple(sum(each[0].nbytes for each in _weights(site.experts)) for site in modules.sites)
    digest = canonical_digest(document)
    return Layout(modules.geometry.experts, sizes, loaded.dtype, digest)


def contents_of(modules: MoeModules, layout: Layout) -> Iterator[np.ndarray]:
    """Yield the bytes of every expert, in whole pages, (n,) uint8."""
    for layer, site in enumerate(modules.sites):
        for expert in range(layout.experts):
            content = np.zeros(layout.padded(layer * layout.experts + expert), np.uint8)
            parts = [weight[expert].contiguous().cpu().view(-1).view(torch.uint8) for weight in _weights(site.experts)]
            content[: layout.sizes[layer]] = torch.cat(parts).numpy()
            yield content


def _weights(experts: nn.Module) -> list[Tensor]:
    return [getattr(experts, name).data for name in projections(experts)]


def weights_in(slot: Tensor, experts: nn.Module, expert: int) -> Weights:
    """Return an expert's weights by name, as views of a slot. Raises ConfigError for other bytes than the model's."""
    found, begin = {}, 0
    for name in projections(experts):
        own = getattr(experts, name).data[expert]
        here = slot[begin : begin + own.nbytes].view(own.dtype).view(own.shape)
        if not torch.equal(here, own):
            raise ConfigError(f"--slow-tier returned wrong bytes for expert {expert}; if it is a disk, remove its file")
        found[name], begin = here, begin + own.nbytes
    return found
