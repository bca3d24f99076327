"""Hooks that read each gate of a running model: its logits, its choice, and the logits of later gates (look-ahead).

Hooks sit on gates and on the norms before them. They change nothing unless `on_gate` returns a replacement, so a
watched model computes the same bits as an unwatched one. Look-ahead is the target gate on the target norm of this
layer's residual, that is gate_{l+d}(norm_{l+d}(h_l)) with h_l the input of layer l's norm: both class forwards, which
trigger no hook. Shapes use T tokens of one pass, L gates, E experts, k chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.families import Agreement, agree, spelled
from moereplay.tracegen.modules import Call, MoeModules, Site, probe
from moereplay.traces.schema import Router


class Reading(NamedTuple):
    """One gate in one pass; detached tensors on the gate's device, in the gate's dtypes."""

    logits: Tensor  #: (T, E) raw
    weights: Tensor  #: (T, k) as the experts get them
    ids: Tensor  #: (T, k) in rank order by choice score; ties stay in the model's order
    lookahead: tuple[Tensor, ...]  #: [d-1] is (T, E), logits of gate l + d; shorter near the last gate


class Rows(NamedTuple):
    """Rows that passes recorded, one per token."""

    chosen: np.ndarray  #: (T, L, k) int16
    weights: np.ndarray  #: (T, L, k) f32
    logits: np.ndarray  #: (T, L, E) f32
    lookahead: tuple[np.ndarray, ...]  #: [d-1] is (T, L, E) f32; zeros where layer l + d has no gate


OnGate = Callable[[int, Reading], tuple[Tensor, Tensor] | None]


@contextmanager
def watching(modules: MoeModules, depth: int, on_gate: OnGate, batch: int = 1) -> Iterator[None]:
    """Call `on_gate(site, reading)` after every gate, with look-ahead of `depth` gates, until the context ends.

    None leaves the gate's choice unchanged; (ids (T, k), weights (T, k)) replace the gate's choice, cast to its
    dtypes. A pass has `batch` sequences, whose tokens are concatenated in T. Raises RecordError inside the forward
    pass for another batch size.
    """
    watch = _Watch(modules, depth, on_gate, batch)
    try:
        for number, site in enumerate(modules.sites):
            watch.install(number, site)
        yield
    finally:
        for handle in watch.handles:
            handle.remove()


class Capture:
    """Records all passes inside `with Capture(modules, depth) as capture:`; memory grows until `take`."""

    def __init__(self, modules: MoeModules, depth: int = 0) -> None:
        self._modules, self._depth = modules, depth
        self._seen: list[list[Reading]] = [[] for _ in modules.sites]
        self._context: AbstractContextManager[None] | None = None

    def __enter__(self) -> Capture:
        self._context = watching(self._modules, self._depth, self.keep)
        self._context.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        if self._context:
            self._context.__exit__(*failure)

    def take(self) -> Rows:
        """Return the rows of all passes since the last `take`, in order.

        Raises RecordError if a pass was cut short, so that gates saw different numbers of tokens, or nothing ran.
        """
        seen, self._seen = self._seen, [[] for _ in self._modules.sites]
        tokens = {sum(len(reading.ids) for reading in readings) for readings in seen}
        if len(tokens) != 1 or tokens == {0}:
            raise RecordError(
                f"{self._modules.name}: gates ran on {sorted(tokens)} tokens; run whole passes before reading it"
            )
        ahead = tuple(self._ahead(seen, distance) for distance in range(1, self._depth + 1))
        chosen = _rows([[each.ids for each in readings] for readings in seen], torch.int16)
        weights = _rows([[each.weights for each in readings] for readings in seen], torch.float32)
        logits = _rows([[each.logits for each in readings] for readings in seen], torch.float32)
        return Rows(chosen, weights, logits, ahead)

    def keep(self, site: int, reading: Reading) -> None:
        """Keep a gate's reading; inside a `with` block every gate calls this."""
        # A later in-place operation of the model must not change the copy
        self._seen[site].append(reading._replace(logits=reading.logits.clone()))

    def _ahead(self, seen: list[list[Reading]], distance: int) -> np.ndarray:
        last = len(seen) - distance
        return _rows(
            [
                [
                    reading.lookahead[distance - 1] if site < last else torch.zeros_like(reading.logits)
                    for reading in readings
                ]
                for site, readings in enumerate(seen)
            ],
            torch.float32,
        )


def by_rank(router: Router, logits: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    """Return the order (T, k) that sorts ids (T, k) by choice score, best first; equal scores keep their order.

    Only the chosen are compared, so groups need no masking; without a bias, softmax ranks as its logits do.
    """
    scores = logits.float()
    if router.family == "sigmoid_groups":
        scores = scores.sigmoid()
    elif bias is not None:
        scores = scores.softmax(-1)
    if bias is not None:
        scores = scores + bias
    return scores.gather(-1, ids).argsort(dim=-1, descending=True, stable=True)


class _Watch:
    """The hooks of one `watching` and the residual that the norm of the gate about to run was given."""

    def __init__(self, modules: MoeModules, depth: int, on_gate: OnGate, batch: int) -> None:
        self.modules, self.depth, self.on_gate, self.batch = modules, depth, on_gate, batch
        self.handles: list[Any] = []
        self.residual: Tensor | None = None
        self.biases = [modules.bias_at(number) for number in range(len(modules.sites))]

    def install(self, number: int, site: Site) -> None:
        self.handles.append(site.norm.register_forward_pre_hook(self._before_norm, with_kwargs=True))
        self.handles.append(site.gate.register_forward_hook(partial(self._after_gate, number)))

    def _before_norm(self, norm: nn.Module, args: tuple, kwargs: dict) -> None:
        residual = args[0] if args else next(iter(kwargs.values()))
        if residual.shape[0] != self.batch:
            wrong = f"a batch of {residual.shape[0]} runs; record batches of {self.batch}"
            raise RecordError(f"{self.modules.name}: {wrong}")
        self.residual = residual

    def _after_gate(self, number: int, gate: nn.Module, args: tuple, output: tuple) -> tuple | None:
        site = self.modules.sites[number]
        logits, weights, ids = (each.detach() for each in output[site.index : site.index + 3])
        order = by_rank(self.modules.geometry.router, logits, self.biases[number], ids)
        last = min(number + self.depth, len(self.modules.sites) - 1)
        ahead = tuple(self._look(target, args[0]) for target in range(number + 1, last + 1))
        reading = Reading(logits, weights.gather(-1, order), ids.gather(-1, order), ahead)
        replaced = self.on_gate(number, reading)
        return None if replaced is None else _with_choice(output, site, *replaced)

    def _look(self, target: int, like: Tensor) -> Tensor:
        assert self.residual is not None  # a gate's norm runs before it: discover saw it
        return look(self.modules.sites[target], self.residual, like.shape)


def look(site: Site, residual: Tensor, shape: torch.Size) -> Tensor:
    """Return logits (T, E) of a site's gate on its own norm of a residual (B, T / B, H), without calling hooks.

    `shape` is that of the gates' input: some models flatten the batch first.
    """
    residual = residual.detach().to(next(site.norm.parameters()).device)
    state = type(site.norm).forward(site.norm, residual)
    return type(site.gate).forward(site.gate, state.reshape(shape), *site.extra)[site.index].detach()


def _with_choice(output: tuple, site: Site, ids: Tensor, weights: Tensor) -> tuple:
    changed = list(output)
    old_weights, old_ids = output[site.index + 1 : site.index + 3]
    if ids.shape != old_ids.shape or weights.shape != old_weights.shape:
        wrong = f"ids {tuple(ids.shape)} and weights {tuple(weights.shape)}"
        raise ValueError(f"{wrong} replace a choice of shape {tuple(old_ids.shape)}")
    changed[site.index + 1 : site.index + 3] = [weights.to(old_weights), ids.to(old_ids)]
    return tuple(changed)


def _rows(parts: list[list[Tensor]], dtype: torch.dtype) -> np.ndarray:
    """Return (T, L, n) from tensors (T', n) per site and pass."""
    sites = [torch.cat(part).to("cpu", dtype) for part in parts]
    return torch.stack(sites, dim=1).numpy()


# -- Check, before writing, that the recording matches the model: one short probe run, every layer.
#
# Bit for bit: the logits are the gate's matrix on its input, and again on the norm of the residual (look-ahead at depth
# 0); the experts are given the gate's own ids and weights. By `tracegen/families.py`, with ties and rounding counted:
# choice and weights follow from the logits by `traces/routers.py`.

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
        if not any(_equal(part, tensor) for part in experts.given):
            yield f"the experts run with other {name} than the gate gave"


def by_hand(site: Site, state: Tensor) -> Iterator[Tensor]:
    """Yield the gate's matrix (E, H), and its bias (E,) if any, applied to its input: in its precision and f32."""
    matrix = next((parameter for parameter in site.gate.parameters() if parameter.ndim == 2), None)
    bias = getattr(site.gate, "bias", None)
    if matrix is None or matrix.shape[-1] != state.shape[-1]:
        return
    flat = state.reshape(-1, state.shape[-1])
    for dtype in (matrix.dtype, torch.float32):
        offset = bias.to(dtype) if isinstance(bias, Tensor) else None
        yield nn.functional.linear(flat.to(dtype), matrix.to(dtype), offset)


def _equal(part: Any, tensor: Tensor) -> bool:
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
