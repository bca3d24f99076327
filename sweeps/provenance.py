"""Where results come from: versions, commit, host, command, machines and the user's own policies. Never in a row."""

from __future__ import annotations

import hashlib
import platform as python
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from moereplay.policies import files
from moereplay.results.parts import SWEEP_VERSION
from moereplay.simulator.config import SEMANTICS_VERSION
from moereplay.simulator.platform_files import platform
from moereplay.traces.schema import Trace

PACKAGES = ("moereplay", "numpy", "polars", "numba", "simpy", "zarr")
CHECKOUT = Path(__file__).resolve().parents[1]


def provenance(
    traces: Iterable[Trace], engine: str, platforms: Iterable[str], command: Sequence[str] | None = None
) -> dict[str, Any]:
    """Of replays that this process plans. `command` is its own command line unless another one is meant.

    `platforms` are as settings spell them; the figures of each are kept without a setting's own changes to them, which
    stand in the rows. Raises ConfigError if one cannot be read.
    """
    machines = sorted({name.partition(":")[0] for name in platforms})
    return {
        "sweep_version": SWEEP_VERSION,
        "semantics": SEMANTICS_VERSION,
        "engine": engine,
        "traces": {trace.digest: str(trace.path) for trace in traces},
        "platforms": {name: platform(name).figures() for name in machines},
        "policy_files": [_policy_file(path, content) for content, path in _once(files.registered())],
        "command": list(sys.argv if command is None else command),
        "versions": {name: version(name) for name in PACKAGES} | {"python": python.python_version()},
        "commit": _commit(),
        "host": socket.gethostname(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def sweep_provenance(
    experiment: str,
    traces: Iterable[Trace],
    engine: str,
    platforms: Iterable[str],
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Of a run of a sweep; `experiment` names its file. Raises ConfigError if a platform cannot be read."""
    return {"experiment": experiment} | provenance(traces, engine, platforms, command)


def _once(taken: Iterable[tuple[str, bytes]]) -> Iterable[tuple[bytes, str]]:
    """Each content with one of the paths that it was given by."""
    return {content: path for path, content in taken}.items()


def _policy_file(path: str, content: bytes) -> dict[str, str]:
    """A file of the user's own policy: `source` written with surrogateescape is the file again, byte for byte."""
    source = content.decode("utf-8", "surrogateescape")
    return {"path": path, "sha256": hashlib.sha256(content).hexdigest(), "source": source}


def version(package: str) -> str | None:
    """Of an installed package; None of one that is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """`git describe` of the program's own checkout; None without one, whatever repository it is installed in."""
    if not (CHECKOUT / ".git").exists():
        return None
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
