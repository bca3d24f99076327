"""Parts: written with their provenance, merged, and read as tables."""

from __future__ import annotations

import hashlib
import json
import platform as python
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from moereplay.policies import files
from moereplay.results import read
from moereplay.results.parts import SWEEP_VERSION, TABLES, Part
from moereplay.results.result import unknown
from moereplay.results.stored import load, sources, table_of
from moereplay.results.tables import frame_bytes, part_of
from moereplay.simulator.bounds import bound_of
from moereplay.simulator.config import SEMANTICS_VERSION, ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform_files import platform
from moereplay.sweeps.grid import Outcome
from moereplay.sweeps.store import Folder, Place, place_of
from moereplay.traces.documents import json_text
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


# -- Replays of a grid, each kept as a part of its own, in the form of a sweep's parts.


def keep(
    folder: Path, trace: Trace, configs: Sequence[ReplayConfig], outcomes: Iterable[Outcome], engine: str
) -> Iterator[Outcome]:
    """Every outcome, once it is stored. Raises ConfigError."""
    place = Folder(folder)
    origin = provenance([trace], engine, {config.platform for config in configs})
    for number, (config, (result, counted)) in enumerate(zip(configs, outcomes, strict=True)):
        if not number:  # a replay that is refused leaves no folder
            place.prepare()
        bound = bound_of(trace, config)
        place.store(part_of(result, bound and bound.identity(trace), counted), origin)
        yield result, counted


# -- Parts of any number of runs become one part: each row once, sorted, the same bytes whatever the way of running.


class Merged(NamedTuple):
    """Where a merge was written, and how much."""

    where: str
    configurations: int
    errors: int


def merge(places: Sequence[Place], out: Place) -> Merged:
    """Write all parts of `places` as the one part of `out`.

    Raises ConfigError if `out` is not new, ResultError if a part is damaged.
    """
    if out.names():
        raise ConfigError(f"{out} holds results already; merge into a new folder")
    found = [part for place in places for part in sources(place.local())]
    if not found:
        where = ", ".join(map(str, places))
        raise ConfigError(f"no parts in {where}; make some with: moereplay sweep run FILE --out DIR")
    tables = {name: table_of(found, name) for name in TABLES}
    part = Part({name: frame_bytes(table) for name, table in tables.items() if len(table)}, _holds(tables))
    out.store(part, _provenance(each.provenance for each in found))
    errors = tables["configurations"]["error"].count()
    return Merged(f"{out}/{part.name}", len(tables["configurations"]) - errors, errors)


def _holds(tables: dict[str, pl.DataFrame]) -> dict[str, list[str]]:
    made = tables["configurations"]
    holds = {
        "configuration": made.filter(pl.col("error").is_null())["identity"].to_list(),
        "error": made.filter(pl.col("error").is_not_null())["identity"].to_list(),
        "bound": tables["bounds"]["identity"].to_list(),
        "requests": tables["requests"]["identity"].unique().sort().to_list(),
    }
    return {what: identities for what, identities in holds.items() if identities}


def _provenance(sources: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Each distinct provenance of the parts once."""
    of_the_part = ("holds", "sha256", "digest")
    own = [{name: value for name, value in each.items() if name not in of_the_part} for each in sources]
    texts = sorted({json_text(each, sort_keys=True) for each in own})
    return {"sweep_version": SWEEP_VERSION, "merged": [json.loads(text) for text in texts]}


# -- Stored results as tidy polars frames, whichever command wrote them.

READERS = {"runs": read.runs, "layers": read.layers, "requests": read.requests}


def read_results(folder: str | Path, table: str = "runs") -> pl.DataFrame:
    """What `replay --out`, `sweep run` or `sweep merge` stored in a folder, or at a URL, as one frame of numbers.

    `table` is "runs" (a row per configuration), "layers" (per configuration, layer and phase) or "requests" (per
    configuration and request). Columns: settings, then counters; what ends in `_ns` is in nanoseconds.
    Raises ResultError if there is none, or naming the file that is damaged.
    """
    if table not in READERS:
        raise unknown("table", table, READERS)
    return READERS[table](load(place_of(str(folder)).local()))
