"""Checks of a sweep by live runs: the model runs a trace's first requests again, and a replay of them is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from moereplay.policies.contract import PolicyError
from moereplay.results.checks import How, Side, side_of
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import plan, replay
from moereplay.sweeps.checks import Run
from moereplay.tracegen.checkpoint import Loaded
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.requests import check_live, requests_of
from moereplay.tracegen.live.run import Prepared, prepare, proven
from moereplay.tracegen.modules import MoeModules
from moereplay.tracegen.offload.experts import described
from moereplay.traces.schema import Trace, memory_trace


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
