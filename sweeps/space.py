"""What a recommendation chooses from: policies that can be used with a trace on a machine, lossless or not.

Usable is what needs no knowledge of the future and no more than the trace has. Lossless is what leaves every output of
the model as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from moereplay import policies
from moereplay.policies.contract import Miss, PolicyError, Prefetch
from moereplay.policies.grammar import Chosen, parse
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import plan
from moereplay.traces.schema import Trace

#: Spellings beside every policy's defaults.
MORE = {
    "prefetch": ("top_k:factor=2", "side_buffer:count=inside"),
    "miss": ("split:q=.25", "split:q=.5", "split:q=.75"),
}
SCOPES = ("global", "per_layer")
#: What may change the output, from little to much.
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
        """How many candidates there are."""
        return prod(len(values) for values in self.axes().values())

    def axes(self) -> dict[str, tuple[str, ...]]:
        """By the names of settings."""
        return asdict(self)


#: Where every expert fits: nothing is evicted, and what a miss costs is paid once.
ALL_FIT = Space(("lru",), ("none",), ("fetch",), ("global",))


def space_of(trace: Trace, base: Mapping[str, object]) -> Space:
    """The space of a trace under the settings of `base`: machine, capacity, and the scope if that is given."""
    scopes = (str(base["scope"]),) if "scope" in base else SCOPES
    usable = {kind: tuple(_usable(trace, base, kind)) for kind in ("eviction", "prefetch", "miss")}
    return Space(**usable, scope=tuple(each for each in scopes if _planned(trace, {**base, "scope": each})))


def lossy_of(trace: Trace, base: Mapping[str, object]) -> list[ReplayConfig]:
    """The configurations that may change the output, `base` but for one policy."""
    stored = trace.geometry.expert_bits
    found = (_planned(trace, {**base, **change}) for change in LOSSY if (bits_of(change) or 0) < stored)
    return [config for config in found if config is not None]


def bits_of(policies: Mapping[str, str]) -> float | None:
    """The precision at which all experts are fetched, if a change says so."""
    name, _, bits = policies.get("miss", "").partition(":bits=")
    return float(bits) if name == "fetch" and bits else None


def _usable(trace: Trace, base: Mapping[str, object], kind: str) -> Iterable[str]:
    for text in (*policies.NAMES[kind], *MORE.get(kind, ())):
        if is_lossless(kind, text) and _planned(trace, {**base, kind: text}) is not None:
            yield text


def is_lossless(kind: str, text: str) -> bool:
    """Return whether a policy changes no output, needs no knowledge of the future and no memory beside the cache."""
    try:
        chosen = parse(kind, text)
    except PolicyError:
        return False
    changing = isinstance(chosen.policy, Miss) and chosen.policy.changes_output
    return "future" not in chosen.needs and not changing and not _takes_more_memory(chosen)


def _takes_more_memory(chosen: Chosen[Any]) -> bool:
    """Whether it has buffers on top of the capacity."""
    policy = chosen.policy
    return (
        isinstance(policy, Prefetch) and policy.side_slots(chosen.params) > 0 and not policy.side_inside(chosen.params)
    )


def can_replay(trace: Trace, config: ReplayConfig) -> bool:
    """Whether trace, machine and capacity allow the configuration."""
    try:
        plan(trace, config)
    except (ConfigError, PolicyError):
        return False
    return True


def _planned(trace: Trace, settings: Mapping[str, object]) -> ReplayConfig | None:
    """The configuration, None where it cannot be replayed."""
    try:
        config = configure(**settings)
    except (ConfigError, PolicyError):
        return None
    return config if can_replay(trace, config) else None
