"""Where a part of a sweep comes from: its experiment, and what every result comes from. Never in a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from simulator.provenance import provenance
from simulator.sweep.parts import SWEEP_VERSION
from traces.schema import Trace


def sweep_provenance(
    experiment: str,
    traces: Iterable[Trace],
    engine: str,
    platforms: Iterable[str],
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Of a run of a sweep; `experiment` names its file. Raises ConfigError if a platform cannot be read."""
    own = {"sweep_version": SWEEP_VERSION, "experiment": experiment}
    return own | provenance(traces, engine, platforms, command)
