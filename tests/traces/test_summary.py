"""Summary: the figures agree with worked examples and with a plain count."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from moereplay.traces.schema import Geometry, Header, Request, Router, Trace, memory_trace
from moereplay.traces.summary import summarise


def header(layers: int, experts: int, k: int, depth: int = 0) -> Header:
    geometry = Geometry(layers=layers, experts=experts, k=k, expert_bytes=(10,) * layers)
    return Header(geometry=geometry, lookahead_depth=depth)


def random_rows(tokens: int, seed: int) -> np.ndarray:
    """(T, 3 layers, 2) distinct ids of 16 experts."""
    random = np.random.Generator(np.random.PCG64(seed))
    return random.permuted(np.tile(np.arange(16), (tokens, 3, 1)), axis=-1)[..., :2]


def small(*requests: list[list[int]], k: int = 2) -> Trace:
    """A trace of one layer of four experts."""
    rows = [Request(np.array(tokens)[:, None, :], 1) for tokens in requests]
    return memory_trace(header(layers=1, experts=4, k=k), rows)


def test_sizes_and_counts() -> None:
    seen = summarise(small([[0, 1], [1, 2]], [[3, 0]]))
    assert (seen.requests, seen.tokens, seen.prompt_tokens, seen.decode_tokens) == (2, 3, 2, 1)
    assert seen.bytes_of_experts == 4 * 10
    assert (seen.chance, seen.capabilities) == (0.5, ("ids",))


def test_reuse_never_crosses_a_request() -> None:
    # within requests: {0,1} -> {1,2} reuses 1 of 2, {2,3} -> {2,3} both; {1,2} -> {2,3} is a border
    seen = summarise(small([[0, 1], [1, 2]], [[2, 3], [2, 3]]))
    assert seen.layers[0].reuse == pytest.approx(3 / 4)


def test_entropy_and_imbalance_of_expert_use() -> None:
    # uses 2, 1, 1, 0: entropy 1.5 bits of 2; the busiest has 2 where the mean is 1
    (layer,) = summarise(small([[0], [1], [2], [0]], k=1)).layers
    assert layer.entropy == pytest.approx(0.75)
    assert layer.imbalance == 2.0


def test_distinct_experts_are_counted_in_whole_windows_only() -> None:
    # two windows of 8: {0} and {0, 1, 2}; the last three tokens fill none, and 64 is longer than the request
    tokens = [[0]] * 8 + [[0], [1], [2]] * 2 + [[0]] * 2 + [[3]] * 3
    (layer,) = summarise(small(tokens, k=1)).layers
    assert layer.distinct == {8: 2.0}


def test_padding_counts_as_no_use() -> None:
    (layer,) = summarise(small([[0, -1], [0, 1]])).layers
    assert layer.reuse == 1.0
    assert layer.imbalance == 2 / (3 / 4)


def test_recall_compares_the_lookahead_of_a_layer_with_the_choice_of_a_later_one() -> None:
    # from layer 0, depth 1 names {0, 1} of layer 1's {0, 2}: a half; depth 2 names layer 2's {3, 1}: all
    chosen = np.array([[[0, 1], [0, 2], [3, 1]]])
    first, second = np.zeros((1, 3, 4)), np.zeros((1, 3, 4))
    first[0, 0, [0, 1]], first[0, 1, [3, 1]], second[0, 0, [1, 3]] = 1, 1, 1
    trace = memory_trace(header(layers=3, experts=4, k=2, depth=2), [Request(chosen, 0, lookahead=(first, second))])
    assert [layer.recall for layer in summarise(trace).layers] == [{1: 0.5, 2: 1.0}, {1: 1.0}, {}]


def test_recall_ranks_with_the_correction_bias_of_the_later_layer() -> None:
    # equal logits: only the bias of layer 1 lifts expert 3, which layer 1 chose
    bias = np.array([[0, 0.5, 0, 0], [0, 0, 0, 0.5]], np.float32)
    sigmoid = Geometry(layers=2, experts=4, k=1, expert_bytes=(1, 1), router=Router(family="sigmoid_groups"))
    request = Request(np.array([[[0], [3]]]), 0, lookahead=(np.zeros((1, 2, 4)),))
    trace = memory_trace(Header(geometry=sigmoid, lookahead_depth=1), [request], bias)
    assert summarise(trace).layers[0].recall == {1: 1.0}


def test_blocks_do_not_change_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = memory_trace(header(3, 16, 2), [Request(random_rows(size, size), 0) for size in (1300, 520)])
    whole = summarise(trace)
    monkeypatch.setattr("moereplay.traces.summary.BLOCK_BYTES", 1)  # blocks of 512 tokens, the longest window
    assert summarise(trace) == whole


def test_figures_agree_with_a_plain_count() -> None:
    rows = random_rows(100, seed=17)
    seen = summarise(memory_trace(header(3, 16, 2), [Request(rows, 0)]))
    sets = [set(row) for row in rows[:, 1].tolist()]
    assert seen.layers[1].reuse == pytest.approx(sum(len(a & b) for a, b in pairwise(sets)) / (99 * 2))
    uses = np.bincount(rows[:, 1].ravel(), minlength=16) / rows[:, 1].size
    entropy = -sum(share * math.log(share) for share in uses if share)
    assert seen.layers[1].entropy == pytest.approx(entropy / math.log(16))
