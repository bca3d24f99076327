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
from moereplay.results.errors import unknown
from moereplay.results.parts import SWEEP_VERSION, TABLES, Part, part_of, streamed_bytes
from moereplay.results.stored import frames_of, load, sources
from moereplay.simulator.bounds import bound_of
from moereplay.simulator.config import SEMANTICS_VERSION, ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platforms import platform
from moereplay.sweeps.grid import Outcome
from moereplay.sweeps.store import Folder, Place, place_of
from moereplay.traces.documents import json_text
from moereplay.traces.files import leaving_no_folders
from moereplay.traces.schema import Trace
from moereplay.traces.texts import without_password

PACKAGES = ("moereplay", "numpy", "polars", "numba", "simpy", "zarr")
CHECKOUT = Path(__file__).resolve().parents[1]


def provenance(
    traces: Iterable[Trace], engine: str, platforms: Iterable[str], command: Sequence[str] | None = None
) -> dict[str, Any]:
    """Describe the origin of this process's replays. `command` defaults to its command line.

    `platforms` are named as in settings. Their values are stored without the changes by settings, which are in the
    rows. Raises ConfigError if one cannot be read.
    """
    machines = sorted({name.partition(":")[0] for name in platforms})
    return {
        "sweep_version": SWEEP_VERSION,
        "semantics": SEMANTICS_VERSION,
        "engine": engine,
        "traces": {trace.digest: str(trace.path) for trace in traces},
        "platforms": {name: platform(name).figures() for name in machines},
        "policy_files": [_policy_file(path, content) for content, path in _once(files.registered())],
        "command": [without_password(word) for word in (sys.argv if command is None else command)],
        "versions": {name: version(name) for name in PACKAGES} | {"python": python.python_version()},
        "commit": commit(),
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
    """Describe a run of a sweep; `experiment` is its file. Raises ConfigError if a platform cannot be read."""
    return {"experiment": without_password(experiment)} | provenance(traces, engine, platforms, command)


def _once(taken: Iterable[tuple[str, bytes]]) -> Iterable[tuple[bytes, str]]:
    """Return each file content once, with one of its paths."""
    return {content: path for path, content in taken}.items()


def _policy_file(path: str, content: bytes) -> dict[str, str]:
    """Describe a user policy file; writing `source` with surrogateescape restores it byte for byte."""
    source = content.decode("utf-8", "surrogateescape")
    return {"path": path, "sha256": hashlib.sha256(content).hexdigest(), "source": source}


def version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return `git describe` of this program's own checkout, or None; never of an enclosing repository."""
    if not (CHECKOUT / ".git").exists():
        return None
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        # A limit on file sizes is an error for git too: its signal would kill it, and leave the checkout locked.
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False, restore_signals=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


# -- Writing


def keep(
    folder: Path, trace: Trace, configs: Sequence[ReplayConfig], outcomes: Iterable[Outcome], engine: str
) -> Iterator[Outcome]:
    """Store each outcome as a separate part, and yield it. Raises ConfigError.

    Parts are stored in the grid's order: results after a failed or interrupted replay are lost.
    """
    place = Folder(folder)
    origin = provenance([trace], engine, {config.platform for config in configs})
    with leaving_no_folders(folder):
        place.prepare()
        for config, (result, counted) in zip(configs, outcomes, strict=True):
            bound = bound_of(trace, config)
            place.store(part_of(result, bound and bound.identity(trace), counted), origin)
            yield result, counted


# -- Merging


class Merged(NamedTuple):
    """Location and size of a merged part."""

    where: str
    configurations: int
    errors: int


def merge(places: Sequence[Place], out: Place) -> Merged:
    """Merge all parts of `places` into one part in `out`: each row once, sorted, so that bytes are reproducible.

    Raises ConfigError if `out` holds parts or one of `places` none, ResultError if a part is damaged.
    """
    if out.names():
        raise ConfigError(f"{out} holds results already; merge into a new folder")
    of_each = [(place, sources(place.local())) for place in places]
    if empty := [place for place, parts in of_each if not parts]:
        raise ConfigError(f"no results in {empty[0]}; make some with: moereplay sweep run FILE --out {empty[0]}")
    found = [part for _, parts in of_each for part in parts]
    holds: dict[str, list[str]] = {}
    tables = {name: streamed_bytes(_noted(name, frames_of(found, name), holds)) for name in TABLES}
    part = Part({name: data for name, data in tables.items() if data}, holds)
    out.store(part, _provenance(each.provenance for each in found))
    return Merged(f"{out}/{part.name}", len(holds.get("configuration", ())), len(holds.get("error", ())))


def _noted(name: str, frames: Iterable[pl.DataFrame], holds: dict[str, list[str]]) -> Iterator[pl.DataFrame]:
    """Yield the frames of a table, and note the identities that they hold, by kind."""
    for rows in frames:
        kinds = {name: rows}
        if name == "configurations":
            failed = pl.col("error").is_not_null()
            kinds = {"configuration": rows.filter(~failed), "error": rows.filter(failed)}
        for kind, own in {"bound" if kind == "bounds" else kind: own for kind, own in kinds.items()}.items():
            if len(own) and kind != "layers":
                holds.setdefault(kind, []).extend(own["identity"].unique(maintain_order=True))
        yield rows


def _provenance(sources: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return each distinct provenance of the parts once."""
    of_the_part = ("holds", "sha256", "digest")
    own = [{name: value for name, value in source.items() if name not in of_the_part} for source in sources]
    texts = sorted({json_text(each, sort_keys=True) for each in own})
    return {"sweep_version": SWEEP_VERSION, "merged": [json.loads(text) for text in texts]}


# -- Reading

READERS = {name: getattr(read, name) for name in ("runs", "layers", "requests", "request_layers")}


def read_results(folder: str | Path, table: str = "runs") -> pl.DataFrame:
    """Read the results of `replay --out`, `sweep run` or `sweep merge` in a folder, or at a URL, as one frame.

    `table` is "runs" (a row per configuration), "layers" (per configuration, layer and phase), "requests" (per
    configuration and request) or "request_layers" (per configuration, request, layer and phase).
    Columns: settings, then counters; names that end in `_ns` are in nanoseconds.
    Raises ResultError if there are no results, or naming a damaged file.
    """
    if table not in READERS:
        raise unknown("table", table, READERS)
    return READERS[table](load(place_of(str(folder)).local(), columns=all_of(table)))


def all_of(table: str) -> dict[str, tuple[str, ...]]:
    """Return the argument `columns` of `load` for a whole table; "runs" has the rows that are always loaded."""
    return {} if table == "runs" else {table: ()}
