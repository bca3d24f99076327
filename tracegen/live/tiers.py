"""Weights of experts at few bits, as a live run computes with them: restored from what the quantiser stored.

The last that were used stay in memory, so that a step does not pack or restore again what the one before did.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tracegen.modules import MoeModules
from tracegen.precision import DEFAULT
from tracegen.precision.contract import Packed, Quantiser
from tracegen.precision.registry import quantiser_at, titled
from tracegen.precision.store import stored

ROOM = 2**30  #: bytes of restored weights in memory
Which = tuple[nn.Module, str, int, float]  #: module, parameter, expert, bits


class Stored(NamedTuple):
    """How the experts that ran at one width were stored."""

    bits: float  #: that the policy named, and the simulator charges
    quantiser: str  #: with its library's version
    bits_per_weight: float  #: that were stored, scales too; of matrices alone


class Tiers:
    """Restored weights of one model. The tier that is asked for is the tier that is restored, whatever was before."""

    def __init__(
        self,
        quantiser: str = DEFAULT,
        weights_sha256: str = "",
        sites: Mapping[nn.Module, int] | None = None,
        room: int = ROOM,
    ) -> None:
        """`weights_sha256` of the checkpoint and the number of each experts module name what is kept on disk."""
        self._name, self._sha256, self._sites, self._room = quantiser, weights_sha256, sites or {}, room
        self._held: OrderedDict[Which, Tensor] = OrderedDict()
        self._stored: dict[tuple[float, str], tuple[int, int]] = {}

    def weight(self, module: Any, parameter: str, expert: int, bits: float) -> Tensor:
        """An expert's matrix at so many bits, in the orientation, dtype and place of the model's own.

        Raises RecordError where the quantiser lacks that width, or its library cannot be imported.
        """
        which = module, parameter, expert, bits
        if which not in self._held:
            self._hold(which, self._restored(which))
        self._held.move_to_end(which)
        return self._held[which]

    def packed(self, module: Any, parameter: str, expert: int, bits: float) -> Packed:
        """The same as it is stored, of (out, in): from disk, if its quantiser keeps what it packs."""
        quantiser, own = quantiser_at(self._name, bits), getattr(module, parameter).data[expert]
        weight = own.T if module.is_transposed else own
        weight = weight.cpu() if quantiser.moves else weight
        if not quantiser.keeps:
            return quantiser.pack(weight, bits)
        key = self._key(quantiser, (module, parameter, expert, bits), weight)
        return stored(key, (weight.shape[0], weight.shape[1]), bits, lambda: quantiser.pack(weight, bits))

    def stored(self) -> tuple[Stored, ...]:
        """Of every width that was asked for, the most bits first."""
        found = sorted(self._stored.items(), reverse=True)
        return tuple(Stored(bits, name, 8 * size / weights) for (bits, name), (size, weights) in found)

    def _restored(self, which: Which) -> Tensor:
        module, parameter, expert, bits = which
        own, quantiser = getattr(module, parameter).data[expert], quantiser_at(self._name, bits)
        kept = self.packed(*which)
        self._count(kept, quantiser)
        weight = quantiser.restore(kept, own.dtype).to(own.device)
        return weight.T if module.is_transposed else weight

    def _count(self, kept: Packed, quantiser: Quantiser) -> None:
        at = kept.bits, titled(quantiser)
        size, weights = self._stored.get(at, (0, 0))
        self._stored[at] = size + kept.bytes, weights + kept.shape[0] * kept.shape[1]

    def _hold(self, which: Which, weight: Tensor) -> None:
        """What was not used for longest goes first; what is larger than the room is held alone."""
        self._held[which] = weight
        size = sum(each.nbytes for each in self._held.values())
        while size > self._room and len(self._held) > 1:
            size -= self._held.popitem(last=False)[1].nbytes

    def _key(self, quantiser: Quantiser, which: Which, weight: Tensor) -> dict[str, object]:
        """The weight's own digest is in it: a model in memory may have changed since its checkpoint was read."""
        module, parameter, expert, bits = which
        content = weight.contiguous().view(-1).view(torch.uint8).numpy().data
        return {
            "checkpoint": self._sha256,
            "site": self._sites.get(module, -1),
            "expert": expert,
            "parameter": parameter,
            "quantiser": titled(quantiser),
            "bits": bits,
            "dtype": str(weight.dtype),
            "sha256": hashlib.sha256(content).hexdigest(),
        }


def tiers_of(modules: MoeModules, quantiser: str, weights_sha256: str) -> Tiers:
    """Of a model."""
    return Tiers(quantiser, weights_sha256, {site.experts: at for at, site in enumerate(modules.sites)})


def said(quantiser: str, bits: Sequence[float | None]) -> str:
    """What a recording says of its experts at these bits; empty where none are rounded.

    Raises RecordError for a width that the quantiser lacks, or a library that is not installed.
    """
    by = [f"{each:g} bits by {titled(quantiser_at(quantiser, each))}" for each in bits if each]
    return f"experts at {', '.join(by)}" if by else ""
