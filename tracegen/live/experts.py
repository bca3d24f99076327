"""Experts that policies have dropped, replaced or rounded: one function in transformers' experts interface.

It computes what a model's own `eager` implementation computes, bit for bit, except that id -1 runs nothing and that an
expert ordered at few bits runs with rounded weights. Weights are rounded to the nearest of 2**bits evenly spaced values
between the smallest and the largest of each group of 64 along the input axis (affine); biases are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tracegen.errors import RecordError

NAME = "moereplay"
Weights = Mapping[str, Tensor]  #: of one expert, by name of the parameter
PLAIN = {torch.float32, torch.bfloat16, torch.float16}
FIX = "use --miss fetch or split, a routing policy that drops nothing, and no --slow-tier"
GROUP = 64  #: weights that share a scale and an offset


@dataclass
class Orders:
    """Which experts run in the pass in progress, and at how many bits."""

    bits: dict[nn.Module, Mapping[int, float]] = field(default_factory=dict)  #: experts module -> expert -> bits
    served: set[nn.Module] = field(default_factory=set)  #: experts modules that asked for their orders
    #: Computes experts elsewhere: (module, hidden (T, H), ids (T, k)) to states (n, H) by expert.
    elsewhere: Callable[[nn.Module, Tensor, Tensor], Mapping[int, Tensor]] | None = None


#: The interface calls one function for every model and passes it nothing of ours.
_ORDERS: ContextVar[Orders | None] = ContextVar("orders", default=None)


@contextmanager
def executing(model: PreTrainedModel, orders: Orders) -> Iterator[None]:
    """In this block the model's experts follow `orders`; afterwards its own implementation is restored."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)
    token = _ORDERS.set(orders)
    try:
        with implemented(model, NAME):
            yield
    finally:
        _ORDERS.reset(token)


@contextmanager
def implemented(model: PreTrainedModel, name: str) -> Iterator[None]:
    """In this block the model's experts are computed by another function of transformers' interface."""
    own = model.get_experts_implementation()
    model.set_experts_implementation(name)
    try:
        yield
    finally:
        model.set_experts_implementation(own)


def check_computable(experts: list[nn.Module]) -> None:
    """Raises RecordError, naming what is in the way, unless `run_experts` can compute these modules."""
    for module in experts:
        stored = {parameter.dtype for parameter in module.parameters()} - PLAIN
        if len(projections(module)) != 2 or stored:
            how = f"stores experts as {', '.join(map(str, stored))}" if stored else "does not keep its experts together"
            raise RecordError(f"{type(module).__name__} {how}: nothing can be dropped, rounded or moved there; {FIX}")


def projections(experts: nn.Module) -> list[str]:
    """Names of the parameters that hold all experts' matrices."""
    return [name for name, _ in experts.named_parameters(recurse=False) if name.endswith("_proj")]


def check_obeyed(orders: Orders, experts: list[nn.Module]) -> None:
    """Raises RecordError if a pass ran an experts module that does not go through the interface."""
    deaf = next((module for module in experts if module not in orders.served), None)
    if deaf is not None:
        raise RecordError(
            f"{type(deaf).__name__} does not use transformers' experts interface: nothing can be dropped, rounded or "
            f"moved there; {FIX}"
        )


def run_experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """(T, H) from hidden (T, H), ids (T, k) with -1 for nothing, and gate weights (T, k).

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
    """One expert over its tokens (n, H); `bits` rounds its weights, None leaves them as they are.

    `weights` are used in place of the module's own.
    """
    name = "gate_up_proj" if module.has_gate else "up_proj"
    own = weights or {each: getattr(module, each)[expert] for each in (name, "down_proj")}
    state = _project(module, name, expert, state, own[name], bits)
    state = module._apply_gate(state) if module.has_gate else module.act_fn(state)
    state = _project(module, "down_proj", expert, state, own["down_proj"], bits)
    return module.post_expert_norm(state) if module.has_post_expert_norm else state


def _project(module: Any, name: str, expert: int, state: Tensor, weight: Tensor, bits: float | None) -> Tensor:
    if bits is not None:
        weight = rounded(weight.T, bits).T if module.is_transposed else rounded(weight, bits)
    # a bias is added to the rounded product, as in eager, and not inside one fused operation
    product = state @ weight if module.is_transposed else linear(state, weight)
    return product + getattr(module, f"{name}_bias")[expert] if module.has_bias else product


def rounded(weight: Tensor, bits: float) -> Tensor:
    """A weight (out, in) rounded to `bits` per value in groups of 64 along `in`; the last group may be shorter."""
    whole = weight.shape[-1] // GROUP * GROUP
    body, tail = weight[:, :whole].float(), weight[:, whole:].float()
    parts = [_nearest(body.unflatten(-1, (-1, GROUP)), bits).flatten(-2)] if whole else []
    parts += [_nearest(tail, bits)] if tail.shape[-1] else []
    return torch.cat(parts, -1).to(weight.dtype)


def _nearest(groups: Tensor, bits: float) -> Tensor:
    """Each row of the last axis on its own grid of 2**bits values."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step = (high - low) / (max(round(2**bits), 2) - 1)
    steps = torch.where(step > 0, (groups - low) / step, 0)  # a constant group is its own grid
    return low + steps.round() * step


def _elsewhere(module: nn.Module, hidden: Tensor, ids: Tensor) -> Mapping[int, Tensor] | None:
    orders = _ORDERS.get()
    return orders.elsewhere(module, hidden, ids) if orders and orders.elsewhere else None


def _bits(module: Any) -> Mapping[int, float]:
    orders = _ORDERS.get()
    if orders is None:
        return {}
    orders.served.add(module)
    return orders.bits.get(module, {})
