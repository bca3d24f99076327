"""The contract of a quantiser: it packs a weight and restores it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from io import StringIO
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from moereplay.tracegen.errors import RecordError
from moereplay.traces.installation import install_command


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
        fix = f"{install_command('quant')}, or take quantiser affine"
        raise RecordError(f"{library} cannot be imported ({str(error).splitlines()[0]}): {fix}") from None
    finally:
        logging.disable(before)


def version_of(library: str | None) -> str:
    """Return the version of an installed library; empty if it is not installed."""
    return version(library) if library else ""
