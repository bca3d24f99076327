"""Check, before writing, that the recording matches the model: one short probe run, every layer.

Bit for bit: the logits are the gate's matrix on its input, and again on the norm of the residual (look-ahead at depth
0); the experts are given the gate's own ids and weights. By `tracegen/routing.py`, with ties and rounding counted:
choice and weights follow from the logits by `traces/routers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moereplay.tracegen.capture import look
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.modules import Call, MoeModules, Site, probe
from moereplay.tracegen.routing import Agreement, agree, spelled

TOKENS = 32


class SelfCheck(NamedTuple):
    """Findings of a passed check, over all layers."""

    family: str
    rule: str  #: the routing rule in one line
    dtype: str  #: of the gate weights
    rows: int  #: (token, layer) pairs compared
    ties: int  #: of them, choices that only a tie explains
    ulps: int  #: largest difference of a gate weight from the rule's, in units in the last place of `dtype`


def check(modules: MoeModules) -> SelfCheck:
    """Check the modules on TOKENS seeded random tokens. Raises RecordError naming model, layer and what differs."""
    calls = probe(modules.model, TOKENS, [part for site in modules.sites for part in (site.norm, site.block)])
    found: list[Agreement] = []
    for number, site in enumerate(modules.sites):
        found.append(_agreement(modules, number, calls[site.gate][0]))
        problem = next(_differences(site, calls), None) or _disagreement(modules, found[-1])
        if problem:
            raise RecordError(f"{modules.name}, layer {site.layer}: {problem}; it cannot be recorded faithfully")
    first = modules.sites[0]
    dtype = str(calls[first.gate][0].output[first.index + 1].dtype).removeprefix("torch.")
    rows, _, ties, ulps, _ = zip(*found, strict=True)
    return SelfCheck(modules.family, spelled(modules.geometry.router), dtype, sum(rows), sum(ties), max(ulps))


def _differences(site: Site, calls: dict[nn.Module, list[Call]]) -> Iterator[str]:
    """Yield what differs at a site, bit for bit."""
    gate, experts = calls[site.gate][0], calls[site.experts][0]
    logits, weights, ids = gate.output[site.index : site.index + 3]
    if not logits.isfinite().all():
        yield "the router logits are not all numbers; try another dtype"
    with torch.inference_mode():
        ahead = look(site, calls[site.norm][0].first, gate.first.shape)
        linear = any(torch.equal(each.float(), logits.float()) for each in by_hand(site, gate.first))
    if not linear:
        yield "the router logits are not the gate's matrix on its input"
    if not torch.equal(ahead, logits):
        yield f"{type(site.norm).__name__} and gate on the residual do not give the gate's logits again"
    for name, tensor in (("ids", ids), ("weights", weights)):
        if not any(_same(part, tensor) for part in experts.given):
            yield f"the experts run with other {name} than the gate gave"


def by_hand(site: Site, state: Tensor) -> Iterator[Tensor]:
    """Yield the gate's matrix (E, H), and its bias (E,) if any, applied to its input: in its precision and f32."""
    matrix = next((each for each in site.gate.parameters() if each.ndim == 2), None)
    bias = getattr(site.gate, "bias", None)
    if matrix is None or matrix.shape[-1] != state.shape[-1]:
        return
    flat = state.reshape(-1, state.shape[-1])
    for dtype in (matrix.dtype, torch.float32):
        offset = bias.to(dtype) if isinstance(bias, Tensor) else None
        yield nn.functional.linear(flat.to(dtype), matrix.to(dtype), offset)


def _same(part: Any, tensor: Tensor) -> bool:
    return isinstance(part, Tensor) and part.shape == tensor.shape and torch.equal(part, tensor)


def _agreement(modules: MoeModules, number: int, gate: Call) -> Agreement:
    index = modules.sites[number].index
    bias = None if modules.bias is None else modules.bias[number]
    return agree(modules.geometry.router, bias, *gate.output[index : index + 3])


def _disagreement(modules: MoeModules, found: Agreement) -> str:
    rule = spelled(modules.geometry.router)
    if found.wrong:
        return f"{found.wrong} of {found.rows} choices are not those of {rule}"
    if found.ulps > found.bound:
        return f"gate weights are up to {found.ulps} units in the last place from those of {rule}, not {found.bound}"
    return ""
