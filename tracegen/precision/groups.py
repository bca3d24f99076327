"""Groups of 64 weights along the input axis, which share a scale. A shorter last one is filled with its own weights."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 64


def grouped(weight: Tensor) -> Tensor:
    """(out, groups, 64) of a weight (out, in). Its own weights change neither the ends of a group nor its spread."""
    rest = weight.shape[1] % GROUP
    if rest:
        again = torch.arange(GROUP - rest, device=weight.device) % rest
        weight = torch.cat([weight, weight[:, -rest:][:, again]], -1)
    return weight.unflatten(-1, (-1, GROUP))


def ungrouped(groups: Tensor, shape: tuple[int, int]) -> Tensor:
    """The weight (out, in), without what was filled in."""
    return groups.flatten(-2)[:, : shape[1]]
