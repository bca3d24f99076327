"""The contract of a quantiser, which packs a weight and restores it; quantisers by name; packed weights on disk."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from safetensors.torch import load as read_tensors
from safetensors.torch import save
from torch import Tensor

from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.precision import DEFAULT, GROUP, at_width, check_quantiser
from moereplay.traces.files import private_folder, write_whole
from moereplay.traces.plugins import plugins, using
from moereplay.traces.schema import canonical


class Packed(NamedTuple):
    """A weight as stored."""

    tensors: Mapping[str, Tensor]  #: values, scales and everything else that the quantiser stores
    shape: tuple[int, int]  #: (out, in) of the weight
    bits: float  #: as requested

    @property
    def bytes(self) -> int:
        """Bytes of everything that is stored."""
        return sum(each.nbytes for each in self.tensors.values())

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight of everything that is stored, scales included."""
        return 8 * self.bytes / (self.shape[0] * self.shape[1])


@dataclass(frozen=True)
class Quantiser:
    """Stores weights in few bits. The same weight gives the same bytes, and the same bytes the same weight."""

    name: str
    summary: str
    pack: Callable[[Tensor, float], Packed]  #: of a weight (out, in) of float32, bfloat16 or float16
    restore: Callable[[Packed, torch.dtype], Tensor]  #: (out, in)
    widths: tuple[int, ...] | None  #: bits that it has, most first; None: any number, fractions too
    moves: bool = True  #: whether weights are moved to a CPU to be packed
    keeps: bool = False  #: whether packing is so slow that packed weights are kept on disk
    library: str = ""  #: distribution whose version determines the bytes; of a plug-in, by default, its own


# -- Libraries of other people's quantisers, imported when first used, and quietly.


@cache
def imported(module: str) -> ModuleType:
    """Import a module of a quantiser's library; suppress its warnings about missing kernels, which are not used.

    Raises RecordError if it is not installed or cannot be loaded.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            return import_module(module)
    except (ImportError, OSError) as error:
        library = module.partition(".")[0]
        fix = f"install {library} again, or take quantiser {DEFAULT}"
        raise RecordError(f"{library} cannot be imported ({str(error).splitlines()[0]}): {fix}") from None
    finally:
        logging.disable(before)


def version_of(library: str) -> str:
    """Return the version of an installed library; empty if it is not installed."""
    return version(library) if library else ""


# -- Quantisers by name and width.


def load(name: str) -> Quantiser:
    """Return the quantiser of that name: ours, or that of an installed package. Raises RecordError if it is broken."""
    if name == DEFAULT:
        return import_module(f"moereplay.tracegen.precision.{name}").QUANTISER
    point = plugins(GROUP)[name]
    with using(point, RecordError):
        quantiser = point.load()
        if not isinstance(quantiser, Quantiser) or quantiser.name != name:
            raise RecordError(f"invalid entry point {point.value!r}: expected a Quantiser named {name!r}")
    return quantiser if quantiser.library or not point.dist else replace(quantiser, library=point.dist.name)


def quantiser_at(name: str, bits: float) -> Quantiser:
    """Return the quantiser that `name` selects at `bits`. Raises RecordError for a width that it lacks."""
    check_quantiser(name)
    found = load(at_width(name, bits))
    if found.widths is not None and bits not in found.widths:
        has = ", ".join(map(str, found.widths))
        raise RecordError(f"quantiser {name} has {has} bits, not {bits:g}; take {DEFAULT}, or other bits of --miss")
    return found


def titled(quantiser: Quantiser) -> str:
    """Return a quantiser's name with its library's version, which together determine its bytes."""
    return f"{quantiser.name} {version_of(quantiser.library)}".strip()


# -- Packed weights in the user's cache: one file each, safetensors after its sha256, so that nothing is unpickled.
# -- Files are written atomically and recomputed if damaged. They may be removed at any time.

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
    return read_tensors(data[DIGEST:])
