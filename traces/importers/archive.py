"""Reading npz archives of others: never a pickle, and a damaged one is a one-line error."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from traces.importers.sources import ZIP_DAMAGE, names_in_zip
from traces.schema import TraceError


def members(file: Path) -> frozenset[str]:
    """Names of the arrays in an npz; empty if it is no readable archive."""
    return frozenset(name.removesuffix(".npy") for name in names_in_zip(file) or ())


def arrays(file: Path, *names: str) -> list[np.ndarray]:
    """The named arrays. Raises TraceError if one is missing, damaged or pickled."""
    missing = sorted(set(names) - members(file))
    if missing:
        raise TraceError(f"{file}: no array {', '.join(missing)}; expected {', '.join(names)}")
    try:
        with np.load(file, allow_pickle=False) as archive:
            return [archive[name] for name in names]
    except ZIP_DAMAGE as broken:
        raise TraceError(f"{file}: damaged ({broken}); download or record it again") from broken
    except ValueError as broken:
        raise TraceError(f"{file}: pickled objects or broken arrays ({broken}); expected plain arrays") from broken


def expert_ids(file: Path, name: str) -> np.ndarray:
    """A 3-D array of whole numbers. Raises TraceError otherwise."""
    (ids,) = arrays(file, name)
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or ids.size == 0:
        raise TraceError(f"{file}: {name} is {ids.dtype}{ids.shape}; expected three axes of whole numbers, none empty")
    return ids
