"""List the candidates of a recommendation: usable policies, starts of the cache, and sets that engines support.

A policy is usable if it needs no knowledge of the future and nothing that the trace lacks. It is lossless if it changes
no output of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import compress
from math import prod
from typing import Any, NamedTuple

import numpy as np

from moereplay import policies
from moereplay.policies.contract import Miss, PolicyError, Prefetch
from moereplay.policies.grammar import Chosen, parse
from moereplay.simulator.capacity import bytes_before, pairs_of
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import of_platform
from moereplay.simulator.platforms import platform
from moereplay.simulator.presets import NAMES, SPECMD, preset
from moereplay.simulator.replay import plan
from moereplay.sweeps.recommend.engines import LAYERS, PLACED, UNIFORM, Engine, engines
from moereplay.sweeps.recommend.engines import STAYS as STATIC
from moereplay.traces.demand import demand_of
from moereplay.traces.derived import shared
from moereplay.traces.growing import token_blocks
from moereplay.traces.schema import Trace
from moereplay.traces.units import NEVER

#: Parameters to try besides every policy's defaults.
MORE = {
    "prefetch": ("top_k:factor=2", "side_buffer:count=inside"),
    "miss": ("split:q=.25", "split:q=.5", "split:q=.75"),
}
SCOPES = ("global", "per_layer")
#: Settings that may change the output, from little to much.
LOSSY = (
    *({"routing": f"cache_prior:lam={lam}"} for lam in (".1", ".25", ".5")),
    *({"routing": f"max_rank:m={ranks}"} for ranks in (6, 10, 16)),
    *({"miss": f"drop_below:f={share}"} for share in (".25", ".5")),
    {"miss": "substitute_band"},
    *({"miss": f"fetch:bits={bits}"} for bits in (8, 4, 3, 2)),
)


@dataclass(frozen=True)
class Space:
    """Lossless values of each axis; every combination is a candidate."""

    eviction: tuple[str, ...]
    prefetch: tuple[str, ...]
    miss: tuple[str, ...]
    scope: tuple[str, ...]

    @property
    def combinations(self) -> int:
        """Number of candidates."""
        return prod(len(values) for values in self.axes().values())

    def axes(self) -> dict[str, tuple[str, ...]]:
        """Return the values by name of the setting."""
        return asdict(self)


#: Space if every expert fits: nothing is evicted, and each expert misses once.
ALL_FIT = Space(("lru",), ("none",), ("fetch",), ("global",))


def space_of(trace: Trace, base: Mapping[str, object]) -> Space:
    """Return the space of a trace under the settings of `base`: platform, capacity, and optionally the scope."""
    scopes = (str(base["scope"]),) if "scope" in base else SCOPES
    usable = {kind: tuple(_usable(trace, base, kind)) for kind in ("eviction", "prefetch", "miss")}
    return Space(**usable, scope=tuple(each for each in scopes if _planned(trace, {**base, "scope": each})))


def lossy_of(trace: Trace, base: Mapping[str, object]) -> list[ReplayConfig]:
    """Return the configurations that may change the output: `base` with one policy replaced."""
    stored = trace.geometry.expert_bits
    found = (_planned(trace, {**base, **change}) for change in LOSSY if (bits_of(change) or 0) < stored)
    return [config for config in found if config is not None]


def bits_of(policies: Mapping[str, str]) -> float | None:
    """Return the precision at which a change fetches all experts, or None."""
    name, _, bits = policies.get("miss", "").partition(":bits=")
    return float(bits) if name == "fetch" and bits else None


def _usable(trace: Trace, base: Mapping[str, object], kind: str) -> Iterable[str]:
    for text in (*policies.NAMES[kind], *MORE.get(kind, ())):
        if is_lossless(kind, text) and _planned(trace, {**base, kind: text}) is not None:
            yield text


def is_lossless(kind: str, text: str) -> bool:
    """Return whether a policy changes no output, needs no knowledge of the future and no memory besides the cache."""
    try:
        chosen = parse(kind, text)
    except PolicyError:
        return False
    changing = isinstance(chosen.policy, Miss) and chosen.policy.changes_output
    return "future" not in chosen.needs and not changing and not _takes_more_memory(chosen)


def _takes_more_memory(chosen: Chosen[Any]) -> bool:
    """Return whether a policy has buffers on top of the capacity."""
    policy = chosen.policy
    return (
        isinstance(policy, Prefetch) and policy.side_slots(chosen.params) > 0 and not policy.side_inside(chosen.params)
    )


def can_replay(trace: Trace, config: ReplayConfig) -> bool:
    """Return whether trace, machine and capacity allow the configuration."""
    try:
        plan(trace, config)
    except (ConfigError, PolicyError):
        return False
    return True


def _planned(trace: Trace, settings: Mapping[str, object]) -> ReplayConfig | None:
    """Return the configuration, or None if it cannot be replayed."""
    try:
        config = configure(**settings)
    except (ConfigError, PolicyError):
        return None
    return config if can_replay(trace, config) else None


# -- Start of a cache: empty, or full as in a system that has served for long.
#
# A recommendation is about steady decoding, but a recording is short: its compulsory misses may be most of its misses.
# So sets are searched from a full cache: of whole layers, counted from the last one, as engines without a profile keep
# them; or of the experts that the first half of the trace's tokens used most per byte. A short trace gives no profile:
# its own uses would tell the cache which experts are to come. There, arbitrary experts of all layers stand for what
# other requests left.

EMPTY, USED, ANY = "empty", "used", "any"  #: besides LAYERS
SHORT = 0.95  #: of hits: a trace that allows fewer from an empty cache is short
GIVEN = "profile=given"

Experts = tuple[tuple[int, int], ...]  #: (layer, expert)


def started(trace: Trace, config: ReplayConfig, start: str) -> ReplayConfig | None:
    """Return the configuration with its cache filled at the start; None if it cannot be replayed that way.

    A policy that is fitted to a given profile gets the order of filling, or the content of whole layers.
    """
    order = order_of(trace, USED if start == EMPTY else start)
    empty = config.model_copy(update={"warm": (), "profile": order if GIVEN in config.eviction else ()})
    if start == EMPTY:
        return empty
    try:
        ready = plan(trace, empty)
    except (ConfigError, PolicyError):
        return None
    warm = filled(order, ready.capacity.pools, ready.layout.tiers[0], trace.geometry.experts * (start == LAYERS))
    if not warm:
        return None
    profile = warm if start == LAYERS and empty.profile else empty.profile
    return empty.model_copy(update={"warm": warm, "profile": profile})


def filling(trace: Trace, passes: str) -> str:
    """Return the start of a set that does not place whole layers: USED, or ANY for a short trace."""
    return USED if compulsory_limit(trace, passes) >= SHORT else ANY


def start_of(trace: Trace, config: ReplayConfig) -> str:
    """Return the start of a configuration: LAYERS if every layer in the cache is complete."""
    if not config.warm:
        return EMPTY
    layers = {layer for layer, _ in config.warm}
    return LAYERS if len(layers) * trace.geometry.experts == len(config.warm) else filling(trace, config.schedule)


def order_of(trace: Trace, start: str) -> Experts:
    """Return all experts in the order in which a start fills the cache. Raises TraceError if the trace is damaged."""
    return shared(trace, f"start {start}", partial(_order, trace, start))


def compulsory_limit(trace: Trace, passes: str) -> float:
    """Return the highest hit rate of any cache that starts empty."""
    demand = demand_of(trace, passes)
    return 1 - float((np.asarray(demand.first_use) != NEVER).sum()) / max(1, len(demand.expert))


def _order(trace: Trace, start: str) -> Experts:
    geometry = trace.geometry
    pairs = [(layer, expert) for layer in reversed(range(geometry.layers)) for expert in range(geometry.experts)]
    if start == LAYERS:
        return tuple(pairs)
    if start == ANY:
        drawn = np.random.default_rng(0).permuted(np.tile(np.arange(geometry.experts), (geometry.layers, 1)), axis=1)
        return tuple(
            (layer, int(drawn[layer, at])) for at in range(geometry.experts) for layer in range(geometry.layers)
        )
    worth = _first_uses(trace) / np.array(geometry.expert_bytes)[:, None]
    return tuple(sorted(pairs, key=lambda pair: -worth[pair]))  # of equals, the later layer first


def _first_uses(trace: Trace) -> np.ndarray:
    """Count how often each expert was chosen in the first half of the tokens, (L, E)."""
    geometry, half = trace.geometry, -(-trace.tokens // 2)
    counts = np.zeros((geometry.layers, geometry.experts), np.int64)
    for begin, end in token_blocks(trace, geometry.layers * geometry.k):
        chosen = trace.read("chosen", begin, min(end, half)) if begin < half else np.empty((0, geometry.layers, 1))
        for layer in range(geometry.layers):
            ids = chosen[:, layer].ravel().astype(np.int64)
            counts[layer] += np.bincount(ids[ids >= 0], minlength=geometry.experts)
    return counts


def filled(order: Experts, pools: Sequence[int], sizes: Sequence[int], together: int) -> Experts:
    """Return the first experts of an order that fit their pools; with `together`, in complete groups of that size."""
    step = max(1, together)
    layers = pairs_of(order)[::step, 0]
    needed, pool, left = step * np.array(sizes)[layers], layers * (len(pools) > 1), np.array(pools)
    fits, rest = np.zeros(len(layers), bool), np.arange(len(layers))
    while len(rest):  # each round takes those before the first that does not fit, and drops all that no longer do
        taken = bytes_before(pool[rest], needed[rest]) + needed[rest] <= left[pool[rest]]
        if together:
            return order[: step * int(np.argmin([*taken, False]))]
        fits[rest[taken]] = True
        np.subtract.at(left, pool[rest[taken]], needed[rest[taken]])
        rest = rest[~taken]
        rest = rest[needed[rest] <= left[pool[rest]]]
    return tuple(compress(order, fits.tolist()))


# -- Sets that engines support

AXES = ("eviction", "prefetch", "miss", "scope")
PAPER = (*SPECMD, "cache-prior-paper")  #: evaluated, in no engine


class Known(NamedTuple):
    """A policy set that an engine supports, by name of the setting."""

    name: str
    made: Engine | None  #: its profile
    machines: frozenset[str]  #: kinds that it runs on, where there is a profile
    change: dict[str, str]
    start: str

    def runs(self, config: ReplayConfig, start: str, machine: str, model: str) -> bool:
        """Return whether a configuration has this set, for a model on a machine; static sets differ by their start."""
        able = self.made is None or (machine in self.machines and self.made.runs(model))
        starts = self.change["eviction"] != STATIC or (start == LAYERS) == (self.start == LAYERS)
        return able and starts and all(getattr(config, name) == text for name, text in self.change.items())


@cache
def known_sets() -> tuple[Known, ...]:
    """Return the sets of engines: those of profiles, and presets of engines that keep the model's routing."""
    return (*_of_engines(), *_of_presets())


def engines_of(config: ReplayConfig, start: str, model: str) -> list[str]:
    """Return the names of the engines that support a configuration for a model on its platform."""
    kind = of_platform(platform(config.platform)).kind
    return list(dict.fromkeys(each.name for each in known_sets() if each.runs(config, start, kind, model)))


def _of_engines() -> Iterator[Known]:
    """Yield the sets of engines' modes; a preset says more of an engine's cache than its profile."""
    for each in engines():
        for mode in each.modes:
            if mode.least_rows == 1 and mode.holds != UNIFORM and (mode.holds in PLACED or each.name not in NAMES):
                start = LAYERS if mode.holds == LAYERS else USED
                yield Known(f"{each.name} {mode.name}", each, frozenset(mode.machines), mode.policies, start)


def _of_presets() -> Iterator[Known]:
    for name in NAMES:
        values = preset(name).values()
        if name.removesuffix("+ls") in PAPER or values["routing"] != "standard":
            continue
        change = {axis: values.get(axis, "global") for axis in AXES}
        change["eviction"] = _fitted(change["eviction"])
        made = max(
            (each for each in engines() if name.startswith(each.name)), key=lambda of: len(of.name), default=None
        )
        machines = frozenset(kind for mode in made.modes for kind in mode.machines) if made else frozenset[str]()
        yield Known(f"preset {name}", made, machines, change, USED)


def _fitted(eviction: str) -> str:
    """Return an eviction policy with its fitted profile replaced by a given one."""
    if eviction == "static":
        return STATIC
    return eviction.replace("profile=trace", GIVEN)
