"""Real offloading in small: tiny experts in memory, a link that is slow enough to be what counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import wraps

import numpy as np
from torch import Tensor

from moereplay.simulator.config import ReplayConfig, configure
from moereplay.tracegen.offload.bench import Bench, bits_of_all, check_measurable
from moereplay.tracegen.offload.compute import layout_of
from moereplay.tracegen.offload.memory import Layout
from moereplay.tracegen.offload.slow_tier import Memory, SlowTier
from moereplay.traces.schema import Geometry, Header, Provenance, Request, Trace, memory_trace

LAYERS, EXPERTS, K = 2, 8, 2
HIDDEN = 32
BYTES = 3 * HIDDEN * HIDDEN * 2  #: of an expert at 16 bits: 6,144, a page and a half
RATE = BYTES / 4e-3  #: bytes per second: a transfer takes 4 ms


def undisturbed(test: Callable[..., None]) -> Callable[..., None]:
    """Try a comparison with the clock up to five times: another process may hold the core during one of them."""

    @wraps(test)
    def tried(*arguments: object, **named: object) -> None:
        for _ in range(4):
            with suppress(AssertionError):
                return test(*arguments, **named)
        return test(*arguments, **named)

    return tried


def trace_of(tokens: int = 10, prompt: int = 2, seed: int = 5) -> Trace:
    """One request; the look-ahead is right for one of the two experts."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(tokens, LAYERS, EXPERTS)).astype(np.float32)
    chosen = np.argsort(-logits, -1)[..., :K].astype(np.int16)
    look = np.zeros_like(logits)
    look[:, :-1] = logits[:, 1:] + draw.normal(size=logits[:, 1:].shape) / 2
    weights = np.take_along_axis(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True), chosen.astype(int), -1)
    request = Request(chosen, prompt, weights=weights, logits=logits, lookahead=(look.astype(np.float32),))
    return memory_trace(
        Header(geometry=geometry(), lookahead_depth=1, provenance=Provenance(importer="test")), [request]
    )


def geometry(**said: object) -> Geometry:
    """Return the geometry of square experts."""
    sizes = {"layers": LAYERS, "experts": EXPERTS, "k": K, "expert_bytes": (BYTES,) * LAYERS}
    more = {"dense_params": 4 * HIDDEN * HIDDEN, "head_params": 8 * HIDDEN * HIDDEN}
    return Geometry.model_validate(sizes | more | said)


def bench_of(
    trace: Trace, configs: list[ReplayConfig], slow: SlowTier | None = None, way: str = "auto", most_tokens: int = 4
) -> Bench:
    """Memory for all of them; experts lie in memory unless a slow tier is given."""
    plans = [check_measurable(trace, config) for config in configs]
    layouts = [layout_of(trace.geometry, bits) for bits in bits_of_all(plans)]
    shelves = {layout.sizes: slow or Memory(layout, "cpu") for layout in layouts}
    return Bench.of(plans, shelves, most_tokens, "cpu", way)


def config_of(**settings: object) -> ReplayConfig:
    """A quarter of the experts, unless said."""
    return configure(**{"capacity": "50%", **settings})


class Broken:
    """A slow tier that fails, or delivers another expert, from its n-th read on."""

    label = "broken"

    def __init__(self, layout: Layout, fails_at: int, error: OSError | None) -> None:
        """Without an error the bytes of expert 0 come for everything."""
        self.layout, self._whole = layout, Memory(layout, "cpu")
        self._left, self._error = fails_at, error

    def read(self, y: int, into: Tensor) -> None:
        self._left -= 1
        if self._left > 0:
            self._whole.read(y, into)
        elif self._error is not None:
            raise self._error
        else:
            self._whole.read(0, into)

    def read_bytes(self, begin: int, into: Tensor) -> None:
        self._whole.read_bytes(begin, into)

    def on_host(self, y: int) -> Tensor:
        return self._whole.on_host(y)

    def buffer(self) -> Tensor:
        return self._whole.buffer()

    def close(self) -> None:
        pass


def document_of(text: str) -> dict:
    return json.loads(text)
