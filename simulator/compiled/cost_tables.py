"""Tables of times, made from a platform before a run: what the kernels look up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from moereplay.simulator.interface import RunSpec
from moereplay.simulator.times import Times

Inputs = Mapping[str, np.ndarray]  #: by the names of `layout.FEED`


def costs_of(inputs: Inputs, spec: RunSpec) -> dict[str, np.ndarray]:
    """Tables of what `simulator.times.Times` gives, a row for each distinct pass, and expert size and format."""
    times, layout = spec.times, spec.layout
    tokens = int(inputs["pass_tokens"].max(initial=1))
    counted = np.bincount(inputs["pass_tokens"], minlength=1)  # a sort would take longer than all the rest
    lengths = np.flatnonzero(counted)
    layers = range(layout.geometry.layers)
    copies = [(layer, p) for layer in layers for p in range(layout.precisions)]
    sizes = [(layout.tiers[p][layer], times.weight_format(p)) for layer, p in copies]
    rows = {size: row for row, size in enumerate(dict.fromkeys(sizes))}
    kinds = [copies[sizes.index(size)] for size in rows]
    slow = times.slows_compute
    experts = _per_tokens(times.expert_ns, kinds, tokens)
    return {
        "dense_ns": _dense(times, lengths, len(layers), contended=False),
        "slow_dense_ns": _dense(times, lengths, len(layers), contended=slow),
        "dense_row": np.cumsum(counted > 0) - 1,
        "load_ns": np.array(times.load_ns, np.int64).ravel(),
        "cost_row": np.array([rows[size] for size in sizes], np.int64),
        "expert_ns": experts,
        "slow_expert_ns": _per_tokens(partial(times.expert_ns, contended=True), kinds, tokens) if slow else experts,
        "cpu_ns": _per_tokens(times.cpu_ns, kinds, tokens if times.has_cpu else -1),
        "slow_cpu_ns": _per_tokens(partial(times.cpu_ns, contended=True), kinds, tokens if times.has_cpu else -1),
        "wire_ns": np.array(times.wire_ns, np.int64).ravel(),
        "slow_wire_ns": np.array(times.contended_wire_ns, np.int64).ravel(),
    } | _kv(inputs, times)


def _dense(times: Times, lengths: np.ndarray, layers: int, contended: bool) -> np.ndarray:
    """(lengths, layers): layer 0 with what a pass costs before it."""
    dense = [[times.dense_ns(layer, int(length), contended) for layer in range(layers)] for length in lengths]
    for row, length in zip(dense, lengths, strict=True):
        row[0] += times.pass_ns(int(length), contended)
    return np.array(dense, np.int64).reshape(-1, layers)


def _kv(inputs: Inputs, times: Times) -> dict[str, np.ndarray]:
    """Of every pass, a layer's part of the KV cache."""
    if not times.reads_kv:
        return dict.fromkeys(("kv_ns", "slow_kv_ns"), np.zeros(0, np.int64))
    contexts, row = np.unique(_contexts(inputs), return_inverse=True)
    read = {
        name: [times.kv_ns(int(each), slow) for each in contexts]
        for name, slow in (("kv_ns", False), ("slow_kv_ns", True))
    }
    return {name: np.array(each, np.int64)[row] for name, each in read.items()}


def _contexts(inputs: Inputs) -> np.ndarray:
    """Of every pass, positions of its requests, each up to its last row in the pass."""
    tokens, number = inputs["pass_tokens"], inputs["row_number"]
    if not len(number):
        return inputs["pass_position"] + tokens
    first = inputs["row_token"][np.unique(number, return_index=True)[1]]
    last = np.zeros((len(tokens), len(first)), np.int64)
    np.maximum.at(last, (np.repeat(np.arange(len(tokens)), tokens), number), inputs["row_token"] - first[number] + 1)
    return last.sum(1)


def _per_tokens(of: Callable[[int, int, int], int], kinds: Sequence[tuple[int, int]], tokens: int) -> np.ndarray:
    table = [[of(layer, precision, count) for count in range(tokens + 1)] for layer, precision in kinds]
    return np.array(table, np.int64).reshape(len(kinds), tokens + 1)
