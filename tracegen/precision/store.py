"""Packed weights in the user's cache: one file each, safetensors after its sha256, so that nothing is unpickled.

Files are written atomically and recomputed if damaged. They may be removed at any time.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from moereplay.tracegen.precision.contract import Packed
from moereplay.traces.files import private_folder, write_whole
from moereplay.traces.schema import canonical

FORM = 1  #: raised when the same tensors come to mean other weights
DIGEST = 32  #: bytes of a sha256
LOG = logging.getLogger(__name__)


def stored(key: Mapping[str, object], shape: tuple[int, int], bits: float, make: Callable[[], Packed]) -> Packed:
    """Load the packed weight of a key, or pack it by `make` and store it if the disk has space."""
    path = path_of(key)
    tensors = None if path is None else _read(path)
    if tensors is not None:
        return Packed(tensors, shape, bits)
    made = make()
    if path is not None:
        with suppress(OSError):
            write_whole(path, _sealed(made.tensors))
    return made


def path_of(key: Mapping[str, object]) -> Path | None:
    """Return the file of a key; None if the user has no cache folder."""
    name = hashlib.sha256(canonical({**key, "form": FORM})).hexdigest()
    try:
        return private_folder("packed-experts") / name[:2] / f"{name}.packed"
    except OSError:
        return None


def _sealed(tensors: Mapping[str, Tensor]) -> bytes:
    content = save({name: each.contiguous().cpu() for name, each in tensors.items()})
    return hashlib.sha256(content).digest() + content


def _read(path: Path) -> dict[str, Tensor] | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:
        LOG.warning("%s is damaged; it is made anew", path)
        return None
    return load(data[DIGEST:])
