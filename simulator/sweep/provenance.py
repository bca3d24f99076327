"""Where a part comes from: versions, commit, host. Beside the rows and never in them."""

from __future__ import annotations

import platform
import socket
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from simulator.config import SEMANTICS_VERSION
from simulator.sweep.parts import SWEEP_VERSION
from traces.schema import Trace

PACKAGES = ("moereplay", "numpy", "polars", "numba", "simpy", "zarr")


def provenance(traces: Iterable[Trace], engine: str, experiment: str) -> dict[str, Any]:
    """Of a run of a sweep; `experiment` names its file."""
    return {
        "sweep_version": SWEEP_VERSION,
        "semantics": SEMANTICS_VERSION,
        "engine": engine,
        "experiment": experiment,
        "traces": {trace.digest: str(trace.path) for trace in traces},
        "versions": {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "commit": _commit(Path(__file__).parent),
        "host": socket.gethostname(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit(folder: Path) -> str | None:
    """`git describe` of the program's own checkout; None where there is none."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
