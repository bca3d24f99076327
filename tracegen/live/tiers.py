"""Weights of experts at few bits for a live run: restored from the quantiser's packed form.

The most recently used packed and restored weights stay in memory as space permits, so that a step does not repeat
the previous one's work. Packing takes several times as long as restoring, and packed weights are much smaller.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from moereplay.simulator.errors import ConfigError
from moereplay.tracegen.modules import MoeModules
from moereplay.tracegen.offload.device import free_memory
from moereplay.tracegen.precision import DEFAULT
from moereplay.tracegen.precision.contract import Packed, Quantiser
from moereplay.tracegen.precision.registry import quantiser_at, titled
from moereplay.tracegen.precision.store import stored

ROOM = 2**30  #: bytes of restored weights in memory, and of packed ones, at least
PACKED_SHARE, RESTORED_SHARE = (
    1 / 2,
    1 / 4,
)  #: share of the memory that is free after loading the model, if that is more
Which = tuple[nn.Module, str, int, float]  #: module, parameter, expert, bits


class Stored(NamedTuple):
    """Storage of the experts that ran at one width."""

    bits: float  #: that the policy named, and the simulator charges
    quantiser: str  #: with its library's version
    bits_per_weight: float  #: that were stored, scales too; of matrices alone


class Tiers:
    """Restored weights of one model, always of the requested tier."""

    def __init__(
        self,
        quantiser: str = DEFAULT,
        weights_sha256: str = "",
        sites: Mapping[nn.Module, int] | None = None,
        room: int = ROOM,
        packed_room: int = ROOM,
    ) -> None:
        """Key stored weights by `weights_sha256` of the checkpoint and the number of each experts module."""
        self._name, self._sha256, self._sites = quantiser, weights_sha256, sites or {}
        self._restored: LruCache[Which, Tensor] = LruCache(room)
        self._packed: LruCache[Which, Packed] = LruCache(packed_room)
        self._stored: dict[tuple[float, str], tuple[int, int]] = {}

    def weight(self, module: Any, parameter: str, expert: int, bits: float) -> Tensor:
        """Return an expert's matrix at `bits`, in the orientation, dtype and device of the model's own.

        Raises RecordError if the quantiser lacks that width, or its library cannot be imported.
        """
        which = module, parameter, expert, bits
        return self._restored.get(which, lambda: self._restore(which), lambda weight: weight.nbytes)

    def packed(self, module: Any, parameter: str, expert: int, bits: float) -> Packed:
        """Return the packed weight of an expert, of shape (out, in)."""
        which = module, parameter, expert, bits
        return self._packed.get(which, lambda: self._pack(which), lambda packed: packed.bytes)

    def _pack(self, which: Which) -> Packed:
        """Pack a weight, or load it from disk if the quantiser keeps packed weights."""
        module, parameter, expert, bits = which
        quantiser, own = quantiser_at(self._name, bits), getattr(module, parameter).data[expert]
        weight = own.T if module.is_transposed else own
        weight = weight.cpu() if quantiser.moves else weight
        if not quantiser.keeps:
            return quantiser.pack(weight, bits)
        key = self._key(quantiser, which, weight)
        return stored(key, (weight.shape[0], weight.shape[1]), bits, lambda: quantiser.pack(weight, bits))

    def stored(self) -> tuple[Stored, ...]:
        """Return the storage of every width that was used, the most bits first."""
        found = sorted(self._stored.items(), reverse=True)
        return tuple(Stored(bits, name, 8 * size / weights) for (bits, name), (size, weights) in found)

    def _restore(self, which: Which) -> Tensor:
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

    def _key(self, quantiser: Quantiser, which: Which, weight: Tensor) -> dict[str, object]:
        """Return the key of a weight.

        It includes the digest of the weight: a model in memory may have changed since its checkpoint was read.
        """
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
    """Return the tiers of a model; packed and restored weights are limited to the memory that the model leaves free."""
    free = _free_beside(modules)
    rooms = (max(ROOM, int(share * free)) for share in (RESTORED_SHARE, PACKED_SHARE))
    return Tiers(quantiser, weights_sha256, {site.experts: at for at, site in enumerate(modules.sites)}, *rooms)


def _free_beside(modules: MoeModules) -> int:
    """Return the free bytes on the device of the first experts; 0 if the system does not report them."""
    weight = next((each for site in modules.sites for each in site.experts.parameters()), None)
    try:
        return free_memory(str(weight.device)) if weight is not None else 0
    except (OSError, ConfigError):
        return 0


def said(quantiser: str, bits: Sequence[float | None]) -> str:
    """Describe the experts at these bits for a recording's header; empty if none are rounded.

    Raises RecordError for a width that the quantiser lacks, or a library that is not installed.
    """
    by = [f"{each:g} bits by {titled(quantiser_at(quantiser, each))}" for each in bits if each]
    return f"experts at {', '.join(by)}" if by else ""


# -- A cache of values by bytes, with LRU eviction.

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """Values by key. What is larger than the capacity is kept alone."""

    def __init__(self, capacity: int) -> None:
        """Cache values up to `capacity` bytes."""
        self._capacity, self._size = capacity, 0
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def get(self, key: Key, make: Callable[[], Value], size: Callable[[Value], int]) -> Value:
        """Return the value of a key, computed if it is not cached; `size` returns its bytes."""
        if key not in self._values:
            made = make()
            self._values[key] = made, size(made)
            self._size += size(made)
            self._evict()
        self._values.move_to_end(key)
        return self._values[key][0]

    def _evict(self) -> None:
        while self._size > self._capacity and len(self._values) > 1:
            self._size -= self._values.popitem(last=False)[1][1]
