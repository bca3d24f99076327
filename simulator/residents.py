"""Experts that are in the fast tier for good: which they are, and what they leave of the pools."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from moereplay.simulator.errors import ConfigError
from moereplay.traces.schema import Geometry

#: In place of an expert: all of its layer.
ALL = -1
MOST_LAYERS = 1 << 20  #: of a range
Listed = tuple[tuple[int, int], ...]


def layers_in(text: str) -> tuple[int, ...]:
    """Return the layers of `A-B,C`, both ends of a range included, in the order of the text. Raises ValueError."""
    layers = list[int]()
    for part in text.split(","):
        ends = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, -1)
        if last - first not in range(MOST_LAYERS):
            raise ValueError(f"invalid layers {text!r}: expected A-B, as in 0-3,8")
        layers += range(first, last + 1)
    return tuple(layers)


def of_layers(text: str) -> Listed:
    """Return what `layers:A-B,C` names: all experts of these MoE layers, both ends included. Raises ConfigError."""
    try:
        layers = layers_in(text.removeprefix("layers:"))
    except ValueError:
        raise ConfigError(
            f"invalid --resident {text!r}: expected layers:A-B, as in layers:0-3,8, or a JSON file"
        ) from None
    return tuple((layer, ALL) for layer in layers)


def residents(listed: Listed, geometry: Geometry) -> Listed:
    """Return every (layer, expert) that a list names. Raises ConfigError for what the model lacks."""
    every = range(geometry.experts)
    named = [(layer, e) for layer, expert in listed for e in (every if expert == ALL else (expert,))]
    check_experts("resident", tuple(named), geometry)
    return tuple(named)


def check_experts(option: str, listed: Listed, geometry: Geometry) -> None:
    """Raises ConfigError for an expert that is listed twice, or that the model lacks."""
    for (layer, expert), times in Counter(listed).items():
        if times > 1:
            raise ConfigError(f"{option} lists expert {expert} of layer {layer} {times} times")
        if not (0 <= layer < geometry.layers and 0 <= expert < geometry.experts):
            raise ConfigError(
                f"{option} lists expert {expert} of layer {layer}; "
                f"the model has {geometry.layers} layers of {geometry.experts}"
            )


def room(
    pools: Sequence[int], pool_of: Sequence[int], sizes: Sequence[int], listed: Listed, fetches: bool
) -> tuple[int, ...]:
    """Return the bytes that residents leave of each pool.

    `pool_of` has the pool of every expert x, `sizes` the bytes of an expert by layer; `fetches`: a miss may have to be
    fetched. Raises ConfigError if the residents do not fit, or if no other expert of the pool fits beside them.
    """
    if not listed:
        return tuple(pools)
    experts, left, there = len(pool_of) // len(sizes), list(pools), set(listed)
    for layer, expert in listed:
        left[pool_of[layer * experts + expert]] -= sizes[layer]
    largest = [0] * len(left)
    for x, pool in enumerate(pool_of):
        if divmod(x, experts) not in there:
            largest[pool] = max(largest[pool], sizes[x // experts])
    for pool, (whole, free, most) in enumerate(zip(pools, left, largest, strict=True)):
        if free < 0:
            raise ConfigError(
                f"--resident fills pool {pool} with {whole - free:,} bytes, its capacity is {whole:,}; "
                "name fewer experts"
            )
        if fetches and free < most:
            raise ConfigError(
                f"--resident leaves {free:,} of the {whole:,} bytes of pool {pool}, less than an expert of {most:,} "
                "that may have to be fetched; name fewer experts, or choose --miss cpu, which fetches none"
            )
    return tuple(left)
