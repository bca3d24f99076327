"""Experts that policies have dropped, replaced or rounded: one function in transformers' experts interface.

It equals a model's own `eager` implementation bit for bit, except that id -1 runs nothing and that an expert requested
at few bits runs with weights that a quantiser stored and restored; biases are left alone. The most recently used packed
and restored weights stay in memory as space permits: packing takes several times as long as restoring, and packed
weights are much smaller.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import linear

from moereplay.simulator.errors import ConfigError
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.modules import MoeModules
from moereplay.tracegen.offload.memory import free_memory
from moereplay.tracegen.precision import DEFAULT
from moereplay.tracegen.precision.contract import Packed, Quantiser, quantiser_at, stored, titled

ROOM = 2**30  #: bytes of restored weights in memory, and of packed ones, at least
#: Shares of the memory that is free after loading the model, if that is more.
PACKED_SHARE, RESTORED_SHARE = 1 / 2, 1 / 4
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
    weight = next((parameter for site in modules.sites for parameter in site.experts.parameters()), None)
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


# -- Experts in transformers' interface.

NAME = "moereplay"
Weights = Mapping[str, Tensor]  #: of one expert, by name of the parameter
PLAIN = {torch.float32, torch.bfloat16, torch.float16}
FIX = "use --miss fetch or split, a routing policy that drops nothing, and no --slow-tier"


@dataclass
class Orders:
    """The experts that run in the current pass, and their bits."""

    bits: dict[nn.Module, Mapping[int, float]] = field(default_factory=dict)  #: experts module -> expert -> bits
    tiers: Tiers = field(default_factory=Tiers)  #: where weights of few bits come from
    served: set[nn.Module] = field(default_factory=set)  #: experts modules that have requested their orders
    #: Computes experts elsewhere: (module, hidden (T, H), ids (T, k)) to states (n, H) by expert.
    elsewhere: Callable[[nn.Module, Tensor, Tensor], Mapping[int, Tensor]] | None = None


#: The interface calls one function for every model and passes it nothing of ours.
_ORDERS: ContextVar[Orders | None] = ContextVar("orders", default=None)


@contextmanager
def executing(model: transformers.PreTrainedModel, orders: Orders) -> Iterator[None]:
    """Make the model's experts follow `orders` in this block; restore its own implementation afterwards."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # brings much more than recording needs

    ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)
    token = _ORDERS.set(orders)
    try:
        with implemented(model, NAME):
            yield
    finally:
        _ORDERS.reset(token)


@contextmanager
def implemented(model: transformers.PreTrainedModel, name: str) -> Iterator[None]:
    """Compute the model's experts by another function of transformers' interface in this block."""
    own = model.get_experts_implementation()
    model.set_experts_implementation(name)
    try:
        yield
    finally:
        model.set_experts_implementation(own)


def check_computable(experts: list[nn.Module]) -> None:
    """Raise RecordError, naming the obstacle, unless `run_experts` can compute these modules."""
    for module in experts:
        stored = {parameter.dtype for parameter in module.parameters()} - PLAIN
        if len(projections(module)) != 2 or stored:
            how = f"stores experts as {', '.join(map(str, stored))}" if stored else "does not keep its experts together"
            raise RecordError(f"{type(module).__name__} {how}: its experts cannot be dropped, rounded or moved; {FIX}")


def projections(experts: nn.Module) -> list[str]:
    """Return the names of the parameters that hold all experts' matrices."""
    return [name for name, _ in experts.named_parameters(recurse=False) if name.endswith("_proj")]


def check_obeyed(orders: Orders, experts: list[nn.Module]) -> None:
    """Raises RecordError if a pass ran an experts module that does not go through the interface."""
    foreign = next((module for module in experts if module not in orders.served), None)
    if foreign is not None:
        raise RecordError(
            f"{type(foreign).__name__} does not use transformers' experts interface: nothing can be dropped, rounded "
            f"or moved there; {FIX}"
        )


def run_experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return (T, H) from hidden (T, H), ids (T, k) with -1 for nothing, and gate weights (T, k).

    Experts run in ascending order over their tokens in (rank, token) order, as in `eager`: sums depend on it.
    """
    bits, states = _bits(module), _elsewhere(module, hidden, ids)
    # the one family without a gate projection, Nemotron-H, sums in the weights' precision, all others in the state's
    out = torch.zeros_like(hidden, dtype=hidden.dtype if module.has_gate else weights.dtype)
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        rank, token = ids.T.eq(expert).nonzero(as_tuple=True)
        state = run_expert(module, expert, hidden[token], bits.get(expert)) if states is None else states[expert]
        out.index_add_(0, token, (state * weights[token, rank, None]).to(out.dtype))
    return out.to(hidden.dtype)


def run_expert(
    module: Any, expert: int, state: Tensor, bits: float | None = None, weights: Weights | None = None
) -> Tensor:
    """Run an expert on its tokens (n, H) at `bits`; None uses its weights unchanged.

    `weights` are used in place of the module's own.
    """
    name = "gate_up_proj" if module.has_gate else "up_proj"
    own = weights or _weights(module, (name, "down_proj"), expert, bits)
    state = _project(module, name, expert, state, own[name])
    state = module._apply_gate(state) if module.has_gate else module.act_fn(state)
    state = _project(module, "down_proj", expert, state, own["down_proj"])
    return module.post_expert_norm(state) if getattr(module, "has_post_expert_norm", False) else state


def _weights(module: Any, names: tuple[str, str], expert: int, bits: float | None) -> Weights:
    if bits is None:
        return {name: getattr(module, name)[expert] for name in names}
    tiers = (_ORDERS.get() or Orders()).tiers
    return {name: tiers.weight(module, name, expert, bits) for name in names}


def _project(module: Any, name: str, expert: int, state: Tensor, weight: Tensor) -> Tensor:
    # a bias is added to the product, as in eager, and not inside one fused operation
    product = state @ weight if module.is_transposed else linear(state, weight)
    return product + getattr(module, f"{name}_bias")[expert] if module.has_bias else product


def _elsewhere(module: nn.Module, hidden: Tensor, ids: Tensor) -> Mapping[int, Tensor] | None:
    orders = _ORDERS.get()
    return orders.elsewhere(module, hidden, ids) if orders and orders.elsewhere else None


def _bits(module: Any) -> Mapping[int, float]:
    orders = _ORDERS.get()
    if orders is None:
        return {}
    orders.served.add(module)
    return orders.bits.get(module, {})
