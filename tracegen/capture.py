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
from moereplay.tracegen.modules import MoeModules, Site
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
                [each.lookahead[distance - 1] if site < last else torch.zeros_like(each.logits) for each in readings]
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
        ahead = tuple(self._look(number + distance, args[0]) for distance in self._distances(number))
        reading = Reading(logits, weights.gather(-1, order), ids.gather(-1, order), ahead)
        replaced = self.on_gate(number, reading)
        return None if replaced is None else _with_choice(output, site, *replaced)

    def _distances(self, number: int) -> range:
        return range(1, min(self.depth, len(self.modules.sites) - 1 - number) + 1)

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
    sites = [torch.cat(each).to("cpu", dtype) for each in parts]
    return torch.stack(sites, dim=1).numpy()
