"""The small arrays of a store, which opening reads whole: request ranges, and the router's correction bias.

A copy of their values lies in the user's cache, so that opening a known trace decodes nothing. It is named by the
sha256 of the very files that hold them, and good only if its values have the sha256 that the trace records.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from math import prod
from pathlib import Path

import numpy as np

from moereplay.traces.bias import check_bias
from moereplay.traces.metadata import OFFSETS, PARTIAL, PROMPTS, Attributes
from moereplay.traces.private import private_folder
from moereplay.traces.schema import TraceError
from moereplay.traces.scratch import write_whole
from moereplay.traces.stored import Stored

MOST_BYTES = 1 << 20  #: of a copy


def router_bias(path: Path, array: Stored, attributes: Attributes) -> np.ndarray:
    """The bias (L, E). Raises TraceError if it is damaged, or no bias."""
    bias = _values(path, array, attributes)
    check_bias(bias, str(path))
    return bias


def request_ranges(path: Path, arrays: dict[str, Stored], attributes: Attributes) -> tuple[np.ndarray, np.ndarray]:
    """Offsets (R + 1,) and prompt lengths (R,). Raises TraceError if they are damaged, or do not fit each other."""
    offsets, prompts = (_values(path, arrays[name], attributes) for name in (OFFSETS, PROMPTS))
    lengths, tokens = np.diff(offsets), attributes.committed.tokens
    if offsets[0] != 0 or offsets[-1] != tokens or (lengths < 1).any():
        raise TraceError(f"{path}: {OFFSETS} do not rise from 0 to {tokens}; restore the trace from a copy")
    if (prompts < 0).any() or (prompts > lengths).any():
        raise TraceError(f"{path}: {PROMPTS} exceed the lengths of their requests; restore the trace from a copy")
    return offsets, prompts


def _values(path: Path, array: Stored, attributes: Attributes) -> np.ndarray:
    size = array.rows * array.dtype.itemsize * prod(array.row)
    if path.suffix == PARTIAL or size > MOST_BYTES:
        return _decoded(path, array)
    copy, recorded = _copy_of(path, array), attributes.arrays[array.name]
    with suppress(OSError):
        content = copy.read_bytes()
        if len(content) == size and hashlib.sha256(content).hexdigest() == recorded:
            return np.frombuffer(content, array.dtype).reshape(array.rows, *array.row)
    values = _decoded(path, array)
    content = np.ascontiguousarray(values).tobytes()
    if hashlib.sha256(content).hexdigest() == recorded:
        with suppress(OSError):
            write_whole(copy, content)
    return values


def _copy_of(path: Path, array: Stored) -> Path:
    """Where the copy of these very files lies. Raises TraceError if they cannot be read."""
    hasher = hashlib.sha256()
    try:
        for file in array.files():
            hasher.update((path / array.name / file).read_bytes())
    except OSError as broken:
        raise _damaged(path, array, broken) from broken
    return private_folder("opened") / f"{array.name}-{hasher.hexdigest()[:32]}"


def _decoded(path: Path, array: Stored) -> np.ndarray:
    try:
        return array[: array.rows]
    except (ValueError, RuntimeError, OSError, MemoryError) as broken:
        raise _damaged(path, array, broken) from broken


def _damaged(path: Path, array: Stored, broken: Exception) -> TraceError:
    return TraceError(f"{path}: {array.name} is damaged ({broken}); restore the trace from a copy")
