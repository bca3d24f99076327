"""Arrays derived once from a trace and kept as memory-mapped .npy files, keyed by the trace's digest.

They lie beside the trace in `NAME.derived/`, or in the user's cache folder where that cannot be written.
A trace in memory, or one still being recorded, is derived afresh.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from traces.schema import Trace

VERSION = 1  # a change in the meaning of any derived array


def derived(
    trace: Trace, what: str, names: Sequence[str], make: Callable[[], Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The arrays `names` of `what`, memory-mapped where they can be kept."""
    if trace.path is None or not trace.complete:
        return dict(make())
    key, folders = _key(trace, what), _folders(trace)
    for folder in folders:
        found = _load(folder / key, names)
        if found is not None:
            return found
    arrays = dict(make())
    for folder in folders:
        if _save(folder / key, arrays):
            return _load(folder / key, names) or arrays
    return arrays


def filled(
    trace: Trace,
    what: str,
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    fill: Callable[[Mapping[str, np.ndarray]], None],
) -> dict[str, np.ndarray]:
    """The same for arrays of known dtype and shape, which `fill` writes in place: they may be larger than memory."""
    if trace.path is None or not trace.complete:
        return _filled_in_memory(shapes, fill)
    key = _key(trace, what)
    for folder in _folders(trace):
        found = _load(folder / key, list(shapes))
        if found is not None:
            return found
    for folder in _folders(trace):
        if _fill(folder / key, shapes, fill):
            found = _load(folder / key, list(shapes))
            if found is not None:
                return found
    return _filled_in_memory(shapes, fill)


def _filled_in_memory(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]], fill: Callable[[Mapping[str, np.ndarray]], None]
) -> dict[str, np.ndarray]:
    arrays = {name: np.zeros(shape, dtype) for name, (dtype, shape) in shapes.items()}
    fill(arrays)
    return arrays


def _key(trace: Trace, what: str) -> str:
    return f"{trace.digest[:32]}-v{VERSION}-{what.replace(':', '').replace('/', '-')}"


def _folders(trace: Trace) -> list[Path]:
    assert trace.path is not None
    return [trace.path.with_name(trace.path.name + ".derived"), _user_cache()]


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moereplay"


def _load(folder: Path, names: Sequence[str]) -> dict[str, np.ndarray] | None:
    """The arrays, or None if any is missing or cannot be a whole .npy file."""
    try:
        return {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
    except (OSError, ValueError, EOFError):
        return None


def _save(folder: Path, arrays: Mapping[str, np.ndarray]) -> bool:
    """Write all or nothing; False where the folder cannot be written."""

    def write(scratch: Path) -> None:
        for name, array in arrays.items():
            np.save(scratch / f"{name}.npy", array)

    return _written(folder, write)


def _fill(
    folder: Path,
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    fill: Callable[[Mapping[str, np.ndarray]], None],
) -> bool:
    """The same, with the arrays written in place."""

    def write(scratch: Path) -> None:
        arrays = {
            name: np.lib.format.open_memmap(scratch / f"{name}.npy", "w+", np.dtype(dtype), shape)
            for name, (dtype, shape) in shapes.items()
        }
        fill(arrays)
        for array in arrays.values():
            array.flush()

    return _written(folder, write)


def _written(folder: Path, write: Callable[[Path], None]) -> bool:
    """`write` into a folder beside it, then rename; False where that fails for reasons of the disk."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    except OSError:
        return False
    try:
        write(scratch)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    except OSError:
        return False
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True
