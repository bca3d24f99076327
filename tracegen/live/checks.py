"""Checks of a sweep, each beside a replay of what was run.

Live, the model runs a trace's first requests again on an emulated clock. Measured, part of the first request is
offloaded for real on this machine, and replayed on the configuration's own platform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from moereplay.policies.contract import PolicyError
from moereplay.results.checks import How, Side, side_of
from moereplay.simulator.calibration import Calibration
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Platform
from moereplay.simulator.platforms import platform
from moereplay.simulator.replay import Plan, plan, replay
from moereplay.sweeps.checks import Run
from moereplay.tracegen.checkpoint import Loaded
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.requests import check_live, requests_of
from moereplay.tracegen.live.run import Prepared, prepare, proven
from moereplay.tracegen.modules import MoeModules
from moereplay.tracegen.offload.bench import (
    Bench,
    SlowTiers,
    bits_of,
    bits_of_all,
    check_measurable,
    replayed,
    slots_of,
)
from moereplay.tracegen.offload.compute import layout_of
from moereplay.tracegen.offload.memory import compute_on, described, free_memory
from moereplay.tracegen.offload.part import tokens_of
from moereplay.tracegen.offload.slow_tier import kind_of
from moereplay.traces.geometry import by_spelling
from moereplay.traces.schema import Geometry, Trace, memory_trace
from moereplay.traces.units import GB, MB


@dataclass(frozen=True)
class Running:
    """A `Checker`: the first requests of a trace, run live on an emulated clock. Models are loaded when needed."""

    load: Callable[[Trace], Loaded]  #: the model of a trace; raises RecordError for another one's
    model: str  #: what a check calls it
    device: str
    requests: int
    _models: dict[str, tuple[Loaded, MoeModules]] = field(default_factory=dict)

    def how(self, trace: Trace) -> How:
        """Describe the check. Raises RecordError for a trace without token ids."""
        requests_of(trace, 1)
        part = self._part(trace)
        return How(
            way="live",
            device=described(self._device()),
            model=self.model,
            layers=part.geometry.layers,
            requests=part.requests,
            prompt=int(part.prompt_lengths.sum()),
            tokens=part.tokens,
        )

    def refusal(self, trace: Trace, config: ReplayConfig) -> str | None:
        """Return why a configuration cannot run live on any model or, once loaded, on this one."""
        try:
            check_live(config)
            plan(self._part(trace), config)
        except (ConfigError, PolicyError) as error:
            return str(error)
        loaded = self._model(trace)
        try:
            self._prepared(loaded, trace, config)
        except (ConfigError, PolicyError, RecordError) as error:
            return str(error)
        return None

    @contextmanager
    def opened(self, trace: Trace, configs: Sequence[ReplayConfig]) -> Iterator[Run]:
        """Load the model, which all checks share."""
        loaded = self._model(trace)
        yield lambda config: self._ran(self._prepared(loaded, trace, config), self._part(trace))

    def _ran(self, ready: Prepared, part: Trace) -> tuple[Side, Side]:
        live, replayed = ready.run(quality=False).result, replay(part, ready.plan.config)
        return side_of(live, part.tokens), side_of(replayed, part.tokens)

    def _prepared(self, model: tuple[Loaded, MoeModules], trace: Trace, config: ReplayConfig) -> Prepared:
        return prepare(model[0], requests_of(trace, self.requests), config, modules=model[1])

    def _model(self, trace: Trace) -> tuple[Loaded, MoeModules]:
        if trace.digest not in self._models:
            self._models.clear()  # one in memory is enough
            loaded = self.load(trace)
            self._models[trace.digest] = loaded, proven(loaded)
        return self._models[trace.digest]

    def _device(self) -> str:
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.device

    def _part(self, trace: Trace) -> Trace:
        """Return the requests to run, as a separate trace."""
        if self.requests >= trace.requests:
            return trace
        return memory_trace(trace.header, [trace.request(at) for at in range(self.requests)], trace.router_bias)


# -- By real offloading on this machine.

OpenSlow = Callable[[Geometry, Sequence[float]], AbstractContextManager[SlowTiers]]


@dataclass(frozen=True)
class Measuring:
    """A `Checker`: the first tokens of a trace's first request, at its first layers, offloaded for real."""

    named: str  #: the slow tier: disk:DIR, disk:DIR:buffered or pinned
    open_slow: OpenSlow
    device: str
    throttle: float | None  #: bytes per second
    layers: int  #: at most
    prompt: int  #: tokens in one pass
    decoded: int  #: tokens after them
    _parts: dict[str, Trace] = field(default_factory=dict)

    def how(self, trace: Trace) -> How:
        """Return the description of a check. Raises ConfigError if the trace is too short."""
        part = self._part(trace)
        return How(
            way="measured",
            device=described(self.device),
            slow_tier=kind_of(self.named),
            throttle_bytes_per_s=self.throttle,
            layers=part.geometry.layers,
            prompt=self.prompt,
            tokens=part.tokens,
        )

    def check_calibrated(self, platforms: Iterable[str], model: str) -> None:
        """Raise ConfigError, with the command to run, for a platform that is not a calibration of this machine."""
        free_memory(self.device)  # or there is no such device
        for name in sorted(set(platforms)):
            if reason := mismatch(platform(name), self._here):
                raise ConfigError(f"platform {name} {reason}; a check needs this machine's: {self._command(model)}")

    @property
    def _here(self) -> Calibration:
        slow = kind_of(self.named)
        return Calibration(device=described(self.device), slow_tier=slow, throttle_bytes_per_s=self.throttle)

    def _command(self, model: str) -> str:
        rate = f" --throttle {in_words(self.throttle)}" if self.throttle else ""
        where = f"--slow-tier {self.named} --device {self.device}{rate}"
        of = model if model.lower() in by_spelling() else "MODEL"
        return f"moereplay calibrate machine {where} --model {of} --layers {self.layers} --out here.toml"

    def refusal(self, trace: Trace, config: ReplayConfig) -> str | None:
        """Return why a check cannot run: policies without a real run, other figures, too little memory."""
        part = self._part(trace)
        try:
            ready = check_measurable(part, config)
        except (ConfigError, PolicyError) as error:
            return str(error)
        if reason := mismatch(ready.machine, self._here):
            return f"platform {config.platform} {reason}"
        needed, free = self._memory(part, ready), free_memory(self.device)
        if needed > free:
            return f"capacity {config.capacity}: {needed / GB:.3g} GB are needed and {free / GB:.3g} GB are free"
        return None

    def _memory(self, part: Trace, ready: Plan) -> int:
        """Return the bytes of the device's memory that a run takes."""
        pinned = self.named == "pinned" and self.device == "cpu"
        beside = sum(layout_of(part.geometry, bits).total for bits in bits_of(ready)) if pinned else 0
        return sum(size * slots for size, slots in slots_of([ready]).items()) + beside

    @contextmanager
    def opened(self, trace: Trace, configs: Sequence[ReplayConfig]) -> Iterator[Run]:
        """Allocate memory and open the slow tier for all runs. Raises ConfigError if this machine lacks either."""
        part = self._part(trace)
        compute_on(1)  # the default of `calibrate`
        plans = [check_measurable(part, config) for config in configs]
        with self.open_slow(part.geometry, bits_of_all(plans)) as slow:
            bench = Bench.of(plans, slow, max(1, self.prompt), self.device)
            yield lambda config: self._measured(bench, part, config)

    def _measured(self, bench: Bench, part: Trace, config: ReplayConfig) -> tuple[Side, Side]:
        ran, _ = bench.measured(part, config, self.throttle)
        return side_of(ran.result, part.tokens), side_of(replayed(part, config).result, part.tokens)

    def _part(self, trace: Trace) -> Trace:
        if trace.digest not in self._parts:
            layers, tokens = min(self.layers, trace.geometry.layers), self.prompt + self.decoded
            first = int(trace.request_offsets[1])
            if tokens > first:
                raise ConfigError(
                    f"a check runs {tokens} tokens, and the first request of {trace.path} has {first}: "
                    "pass a smaller --check-tokens"
                )
            self._parts[trace.digest] = tokens_of(trace, layers, 0, tokens, self.prompt)
        return self._parts[trace.digest]


def mismatch(machine: Platform, here: Calibration) -> str | None:
    """Return how figures differ from this device, slow tier or throttle; None if they match."""
    said = machine.calibration
    if said is None:
        return "has no [calibration]"
    if machine.is_edited:
        return f"was edited after its calibration on {said.device!r}"
    if said.device != here.device:
        return f"was calibrated on {said.device!r}, and this machine is {here.device!r}"
    if said.slow_tier != here.slow_tier:
        return f"was calibrated with slow tier {said.slow_tier or 'unknown'}, and checks would use {here.slow_tier}"
    if said.throttle_bytes_per_s != here.throttle_bytes_per_s:
        rates = in_words(said.throttle_bytes_per_s), in_words(here.throttle_bytes_per_s)
        return "was calibrated with throttle {}, and checks would have {}".format(*rates)
    return None


def in_words(rate: float | None) -> str:
    """Return the throttle in the form of `--throttle`."""
    return "none" if rate is None else f"{rate / MB:g}MB/s"
