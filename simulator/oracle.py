"""Oracle information: when every expert is demanded first, and the ranking that a fitted policy goes by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from moereplay.policies.contract import GIVEN_PROFILE, NO_PROFILE, Eviction, PolicyError
from moereplay.policies.grammar import Chosen
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.source import Gates
from moereplay.traces.schema import Trace
from moereplay.traces.shared import read_only, shared


class Oracle(NamedTuple):
    """What policies may know before a run; a field is empty where it is unknown or no policy needs it."""

    first_uses: Sequence[int] | np.ndarray  #: position of each expert's first demand
    first_passes: Sequence[int] | np.ndarray  #: and the pass of that
    ranking: Sequence[int]  #: experts x of the profile, the most valuable first


NO_ORACLE = Oracle((), (), ())


def oracle_of_trace(
    trace: Trace, source: Callable[[], Gates], config: ReplayConfig, eviction: Chosen[Eviction]
) -> Oracle:
    """The oracle information of a trace, taken from its `source` once for all replays of this process."""
    what = ("oracle", config.passes, eviction.policy.profile(eviction.params), config.profile)
    return shared(trace, what, lambda: _as_arrays(oracle_of(source(), config, eviction)))


def _as_arrays(oracle: Oracle) -> Oracle:
    """int64 arrays, read-only: every replay copies them."""
    first_uses, first_passes = (read_only(np.array(uses, np.int64)) for uses in oracle[:2])
    return Oracle(first_uses, first_passes, oracle.ranking)


def oracle_of(source: Gates, config: ReplayConfig, eviction: Chosen[Eviction]) -> Oracle:
    """The oracle information of a source."""
    first_uses = source.first_uses()
    first_passes = [source.pass_of(position) for position in first_uses]
    return Oracle(first_uses, first_passes, ranking(source, config, eviction))


def ranking(source: Gates, config: ReplayConfig, eviction: Chosen[Eviction]) -> list[int]:
    """Experts x, the most valuable first; [] if the policy is not fitted to anything.

    By demand: the most often chosen first, ties by lowest id, without those that were never chosen.
    """
    wanted = eviction.policy.profile(eviction.params)
    if wanted == NO_PROFILE:
        return []
    if wanted == GIVEN_PROFILE:
        return [layer * source.geometry.experts + expert for layer, expert in config.profile]
    counts = source.popularity(wanted)
    return sorted((x for x, count in enumerate(counts) if count > 0), key=lambda x: (-counts[x], x))


def check_profile_is_read(configs: Sequence[ReplayConfig]) -> None:
    """Raises ConfigError for a given profile that no policy of theirs is fitted to."""
    evictions = [config.policy_set().eviction for config in configs if config.profile]
    if evictions and not any(each.policy.profile(each.params) == GIVEN_PROFILE for each in evictions):
        raise ConfigError("--profile: no policy here reads it; write for example --eviction static:profile=given")


def check_profile(config: ReplayConfig, eviction: Chosen[Eviction]) -> None:
    """Raises PolicyError if the policy is fitted to a profile that is not given."""
    if eviction.policy.profile(eviction.params) == GIVEN_PROFILE and not config.profile:
        raise PolicyError(f"eviction {eviction.text()} is fitted to a profile; give one with --profile FILE")
