"""The plan of a measured run, and what refuses it without torch."""

from __future__ import annotations

from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import Plan, plan
from moereplay.traces.schema import Trace


def planned(trace: Trace, config: ReplayConfig) -> Plan:
    """Raises ConfigError or PolicyError for what cannot be replayed, and for platforms that no real run has."""
    ready = plan(trace, config)
    if len(ready.machine.links) > 1 or ready.machine.tiers:
        raise ConfigError(f"platform {ready.machine.name}: a measured run has one link and no lower tier")
    return ready
