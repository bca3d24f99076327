"""Integers of few bits without gaps: eight of w bits lie in w bytes, the first in the lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor

BYTE = 8


def packed(values: Tensor, width: int) -> Tensor:
    """Pack integers (n,) from 0 to 2**width - 1 as (bytes,) uint8, `width` at most 32, padded with zeros."""
    eights = torch.zeros(-(-len(values) // BYTE) * BYTE, dtype=values.dtype, device=values.device)
    eights[: len(values)] = values
    return torch.cat([_packed(eights >> low if low else eights, wide) for low, wide in _parts(width)])


def unpacked(content: Tensor, width: int, count: int) -> Tensor:
    """Unpack the first `count` integers, (count,): uint8 if they fit, else int64."""
    eights, found = -(-count // BYTE), []
    for _, wide in _parts(width):
        part, content = content[: eights * wide], content[eights * wide :]
        found.append(_unpacked(part, wide)[:count])
    if len(found) == 1:
        return found[0]
    return torch.stack([part.long() << low for (low, _), part in zip(_parts(width), found, strict=True)]).sum(0)


def _parts(width: int) -> list[tuple[int, int]]:
    """Return the lowest bit and the width of each byte of a value."""
    return [(low, min(BYTE, width - low)) for low in range(0, width, BYTE)]


def _packed(values: Tensor, width: int) -> Tensor:
    """Pack the lowest `width` bits of each value, at most 8. No bits overlap, so sums join them."""
    dtype, many = _word(width)
    words = (values & (2**width - 1)).to(dtype).view(-1, many) << _shifts(width, many, values.device).to(dtype)
    joined = words.sum(-1, dtype=dtype)
    return joined if dtype == torch.uint8 else joined.view(torch.uint8).view(-1, BYTE)[:, :width].flatten()


def _unpacked(content: Tensor, width: int) -> Tensor:
    """Return (n,) uint8."""
    dtype, many = _word(width)
    words = content
    if dtype != torch.uint8:
        words = torch.zeros(len(content) // width, BYTE, dtype=torch.uint8, device=content.device)
        words[:, :width] = content.view(-1, width)
        words = words.view(dtype)
    shifted = words.view(-1, 1) >> _shifts(width, many, content.device).to(dtype)
    return (shifted & (2**width - 1)).to(torch.uint8).flatten()


def _word(width: int) -> tuple[torch.dtype, int]:
    """Return the word that is shifted at once and its number of values; a full byte is faster than 64 bits."""
    return (torch.uint8, BYTE // width) if BYTE % width == 0 else (torch.int64, BYTE)


def _shifts(width: int, many: int, device: torch.device) -> Tensor:
    return torch.arange(0, many * width, width, device=device)


# -- Groups of 64 weights along the input axis, which share a scale. A shorter last one is filled with its own weights.

GROUP = 64


def grouped(weight: Tensor) -> Tensor:
    """Return (out, groups, 64) of a weight (out, in).

    Its own weights change neither the ends of a group nor its spread.
    """
    rest = weight.shape[1] % GROUP
    if rest:
        again = torch.arange(GROUP - rest, device=weight.device) % rest
        weight = torch.cat([weight, weight[:, -rest:][:, again]], -1)
    return weight.unflatten(-1, (-1, GROUP))


def ungrouped(groups: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the weight (out, in), without padding."""
    return groups.flatten(-2)[:, : shape[1]]
