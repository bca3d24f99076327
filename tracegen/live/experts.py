"""Experts that policies have dropped, replaced or rounded: one function in transformers' experts interface.

It equals a model's own `eager` implementation bit for bit, except that id -1 runs nothing and that an
expert requested at few bits runs with weights that a quantiser stored and restored (`tiers`); biases are
left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import linear

from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.tiers import Tiers

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
