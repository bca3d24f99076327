"""Arrays derived once from a trace and kept as memory-mapped .npy files, keyed by the trace's digest.

They lie beside the trace in `NAME.derived/`, or in the user's cache where that cannot be written, or where somebody
else's lie there. They are used only as their manifest (`traces/manifest.py`) says; what is damaged is made anew.
A trace in memory, or one still being recorded, is derived afresh.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from moereplay.traces.files import is_private, user_cache
from moereplay.traces.growing import Growing, InFile, InMemory, Rows
from moereplay.traces.manifest import Manifest, describe, keep, manifest_of, mapped
from moereplay.traces.schema import Trace
from moereplay.traces.shared import read_only, shared

VERSION = 3  # a change in the meaning of any derived array
LOG = logging.getLogger(__name__)

Columns = Mapping[str, Rows]
Fill = Callable[[Mapping[str, Growing]], None]


def derived(trace: Trace, what: str, columns: Columns, fill: Fill) -> dict[str, np.ndarray]:
    """The arrays of `what`, which `fill` makes a block at a time; memory-mapped where they can be kept.

    All replays of this process share them. Raises TraceError if the trace's rows are damaged.
    """
    return shared(trace, what, partial(_derived, trace, what, columns, fill))


def _derived(trace: Trace, what: str, columns: Columns, fill: Fill) -> dict[str, np.ndarray]:
    if trace.path is None or not trace.complete:
        return _in_memory(columns, fill)
    key = f"{trace.digest[:32]}-v{VERSION}-{what.replace(':', '').replace('/', '-')}"
    folders = _folders(trace.path.absolute(), key)
    found = _found(folders, key)
    return _made(folders, key, columns, fill) if found is None else found


def _folders(path: Path, key: str) -> list[Path]:
    """Where arrays of that key may lie, the best place first."""
    beside, cache = path.with_name(path.name + ".derived") / key, user_cache()
    return [beside] if cache is None else [beside, cache / "derived" / key]


def _found(folders: list[Path], key: str) -> dict[str, np.ndarray] | None:
    manifest = manifest_of(key)
    if manifest is None:
        return None
    for folder in folders:
        arrays = mapped(folder, manifest)
        if arrays is not None:
            return arrays
        if os.path.lexists(folder):
            LOG.warning("%s is damaged or was changed; it is derived anew", folder)
    return None


def _made(folders: list[Path], key: str, columns: Columns, fill: Fill) -> dict[str, np.ndarray]:
    for folder in folders:
        # without a manifest, what lies beside a trace is another user's or machine's, who may have it mapped
        if folder is folders[0] and os.path.lexists(folder) and manifest_of(key) is None:
            continue
        try:
            manifest = _written(folder, key, columns, fill)
        except OSError:
            continue
        arrays = mapped(folder, manifest)
        if arrays is not None:
            return arrays
    return _in_memory(columns, fill)


def _in_memory(columns: Columns, fill: Fill) -> dict[str, np.ndarray]:
    arrays = {name: InMemory(rows) for name, rows in columns.items()}
    fill(arrays)
    return {name: read_only(held.array) for name, held in arrays.items()}


def _written(folder: Path, key: str, columns: Columns, fill: Fill) -> Manifest:
    """Fill a folder beside it, keep its manifest, then put it in its place. Raises OSError where the disk refuses."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=key, dir=folder.parent))
    try:
        if not is_private(scratch):
            raise PermissionError(f"{folder.parent} does not keep others out of a folder made there")
        with ExitStack() as opened:
            files = {
                name: opened.enter_context(InFile(scratch / f"{name}.npy", rows)) for name, rows in columns.items()
            }
            fill(files)
            for file in files.values():
                file.finish()
        manifest = describe(key, folder, files)
        keep(manifest)
        _replace(folder, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return manifest


def _replace(folder: Path, scratch: Path) -> None:
    """Put `scratch` in the place of a folder, or of whatever else is there."""
    if os.path.lexists(folder):
        aside = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
        try:
            folder.rename(aside / "old")
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    scratch.rename(folder)
