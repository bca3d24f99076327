"""Patterns that no router produces: repeated rows, copied layers, invalid weights, rows wider than their layer's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moereplay.traces.schema import Geometry, Header, Request, Router, Trace, memory_trace
from moereplay.traces.validator import examine
from tests.kit.command import moereplay_here
from tests.kit.routed import EXPERTS, LAYERS, K, drifting, finding, header, trace_of, wide

WIDE, TOKENS = 3, 60  #: experts of a row at most
SAMPLES = Path(__file__).parents[1] / "samples"
IMPORT = ("--expert-bytes", 1000, "--dense", 1000)


def test_a_row_that_stands_for_many_tokens_is_named() -> None:
    for where in [(0, 20), (150, 217), (290, 299)]:
        rows = np.random.default_rng(7).permuted(np.tile(np.arange(64), (300, LAYERS, 1)), axis=-1)[..., :K]
        rows[where[0] : where[1] + 1] = rows[100]
        found = finding(wide(rows), "repeated rows")
        assert found.level == "warning" and f"tokens {where[0]} to {where[1]} of request 0" in found.text


def test_tokens_that_a_text_repeats_may_route_alike() -> None:
    rows, ids = drifting(300, 7, 64), np.arange(300)
    rows[50:90], ids[50:90] = rows[50], 5
    assert finding(wide(rows, token_ids=ids), "repeated rows").level == "ok"
    assert finding(wide(rows, token_ids=np.arange(300)), "repeated rows").level == "warning"


def test_few_experts_route_alike_now_and_then() -> None:
    assert finding(trace_of(*(drifting(2000, seed, 4) for seed in range(5))), "repeated rows").level == "ok"


def test_rows_are_compared_across_the_blocks_that_they_are_read_in(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = drifting(300, 7, 64)
    rows[90:180] = rows[90]
    rows[200:240] = -1
    whole = examine(wide(rows))
    monkeypatch.setattr("moereplay.traces.validator.BLOCK", 7 * LAYERS * K)
    assert examine(wide(rows)) == whole


def test_tokens_that_are_routed_nowhere_are_counted() -> None:
    rows = drifting(40, 3)
    rows[30:36] = -1
    trace = memory_trace(header(), [Request(drifting(10, 1), 10), Request(rows, 32)])
    found = finding(trace, "routed tokens")
    assert found.level == "warning"
    assert "6 of 50 tokens" in found.text and "tokens 30 to 35 of request 1" in found.text and "4 of them" in found.text
    rows[30:36, 1] = [0, 1]
    assert finding(trace_of(rows), "routed tokens").level == "ok"


def test_ids_that_count_on_through_the_layers_are_found() -> None:
    for skipped in [0, 3]:
        rows = drifting(200, 1) + EXPERTS * (np.arange(LAYERS)[:, None] + skipped)
        sizes = Geometry(layers=LAYERS, experts=EXPERTS * (LAYERS + skipped), k=K, expert_bytes=(10,) * LAYERS)
        found = finding(memory_trace(Header(geometry=sizes), [Request(rows, 0)]), "id ranges")
        assert found.level == "error" and f"{EXPERTS} in each" in found.text and "--ids global" in found.text


def test_few_ids_may_lie_apart_by_chance() -> None:
    assert finding(trace_of(np.array([[[0, 1], [4, 5], [8, 9]]])), "id ranges").level == "ok"


def test_copies_of_an_expert_that_one_rank_chooses_are_found() -> None:
    for tokens in (120, 600):
        rows, copies = drifting(tokens, 1, 12), np.random.default_rng(0).integers(12, 16, (tokens, LAYERS, 1))
        found = finding(wide(np.concatenate([rows, copies], -1)), "experts by rank")
        assert found.level == "warning" and f"rank {K} has experts of its own (12, 13, 14, 15)" in found.text
        assert finding(wide(rows), "experts by rank").level == "ok"
    takes_turns = np.arange(96).reshape(48, 1, 2).repeat(LAYERS, 1) % EXPERTS  # each rank has its own: a made-up cycle
    assert finding(trace_of(takes_turns), "experts by rank").level == "ok"
    assert finding(trace_of(takes_turns), "axes").level == "ok"


def test_exchanged_axes_are_found_in_any_trace() -> None:
    rows = drifting(40, 3)
    sizes = Geometry(layers=40, experts=EXPERTS, k=K, expert_bytes=(10,) * 40)
    turned = memory_trace(Header(geometry=sizes), [Request(rows.transpose(1, 0, 2), 0)])
    assert "--axes layers,tokens,k" in finding(turned, "axes").text and finding(trace_of(rows), "axes").level == "ok"
    iid = np.random.default_rng(1).permuted(np.tile(np.arange(EXPERTS), (4, 300, 1)), axis=-1)[..., :K]
    sizes = sizes.model_copy(update={"layers": 300, "expert_bytes": (10,) * 300})
    text = finding(memory_trace(Header(geometry=sizes), [Request(iid, 0)]), "axes").text
    assert "300 layers, more than any known model has" in text


def test_a_layer_that_never_changes_and_a_shared_expert_are_found() -> None:
    dense = drifting(100, 1)
    dense[:, 1] = [3, 4]
    found = finding(trace_of(dense), "constant experts")
    assert found.level == "error" and "layers [1]" in found.text
    fused = np.where(drifting(100, 1) == 15, 14, drifting(100, 1))
    fused[..., 1] = 15
    assert "rank 1 has one expert for every token in 3 layers" in finding(trace_of(fused), "constant experts").text


def test_ids_that_are_sorted_have_no_ranks() -> None:
    rows = drifting(100, 1)
    assert finding(trace_of(np.sort(rows)), "rank order").level == "warning"
    assert finding(trace_of(np.sort(rows)[..., ::-1]), "rank order").level == "warning"
    assert finding(trace_of(rows), "rank order").level == "ok"


def test_a_copy_of_a_layer_is_found_in_another_order_and_a_token_late() -> None:
    for late in [0, 1]:
        rows = drifting(300, 1, 64)
        rows[late:, 2] = rows[: len(rows) - late, 0, ::-1]
        found = finding(wide(rows), "identical layers")
        assert found.level == "error" and "2" in found.text and "0" in found.text


def test_a_layer_that_is_nearly_a_copy_is_found() -> None:
    rows = drifting(300, 1, 64)
    rows[10:, 2] = rows[10:, 0]
    assert finding(wide(rows), "identical layers").level == "warning"


def test_a_layer_that_is_a_token_late_is_found() -> None:
    random = np.random.default_rng(0)
    fresh = random.permuted(np.tile(np.arange(64), (600, 6, 1)), axis=-1)[..., :K]
    for token in range(1, 600):
        if random.random() < 0.6:
            fresh[token] = fresh[token - 1]
    assert finding(wide(fresh), "aligned layers").level == "ok"
    for late, when in ((1, "after"), (-1, "before")):
        shifted = fresh.copy()
        shifted[:, 4] = np.roll(fresh[:, 4], late, 0)
        found = finding(wide(shifted), "aligned layers")
        assert found.level == "warning" and f"layer 4 changes one token {when}" in found.text


def test_requests_that_begin_alike_are_found() -> None:
    first, second = drifting(200, 1, 64), drifting(200, 2, 64)
    second[:50] = first[:50]
    found = finding(wide(first, second), "duplicate requests")
    assert found.level == "warning" and "request 1 begins with 50 rows" in found.text
    second[5:] = drifting(200, 3, 64)[5:]
    assert finding(wide(first, second), "duplicate requests").level == "ok"


def test_weights_that_are_none_are_found() -> None:
    for weights, router, expected in [
        (np.zeros((100, LAYERS, K), np.float32), None, "all weights are 0"),
        (np.full((100, LAYERS, K), 0.5, np.float32), None, "every weight is 0.5"),
        (np.tile(np.asarray([3, 1], np.float32), (100, LAYERS, 1)), Router(renormalise=True), "weights sum to 4"),
    ]:
        found = finding(memory_trace(header(router), [Request(drifting(100, 1), 0, weights=weights)]), "weights")
        assert found.level == "warning" and expected in found.text


def test_ids_cut_to_eight_bits_are_named() -> None:
    sizes = Geometry(layers=LAYERS, experts=512, k=K, expert_bytes=(10,) * LAYERS)
    rows = drifting(5000, 1, 256)
    found = finding(memory_trace(Header(geometry=sizes), [Request(rows, 0)]), "expert range")
    assert found.level == "warning" and "cut to 8 bits" in found.text


# ---------------------------------------------------------------- uneven rows


def rows_of(width: int, tokens: int = TOKENS) -> np.ndarray:
    """(T, L, 3) rows of so many experts, -1 in the places left."""
    ids = np.random.default_rng(1).permuted(np.tile(np.arange(EXPERTS), (tokens, LAYERS, 1)), axis=-1)[..., :WIDE]
    ids[..., width:] = -1
    return ids


def wide_trace(*requests: np.ndarray, weights: np.ndarray | None = None) -> Trace:
    geometry = header().geometry.model_copy(update={"k": WIDE})
    return memory_trace(Header(geometry=geometry), [Request(rows, 0, weights=weights) for rows in requests])


def test_one_row_that_is_wider_than_the_others_of_its_layer_is_named() -> None:
    rows = rows_of(2)
    rows[7, 1, 2] = next(expert for expert in range(EXPERTS) if expert not in rows[7, 1])
    found = finding(wide_trace(rows), "experts per row")
    assert found.level == "warning"
    assert "1 of 60 rows of layer 1 have more than 2 experts" in found.text and "k = 3" in found.text


def test_layers_may_have_numbers_of_experts_of_their_own() -> None:
    rows = rows_of(2)
    rows[:, 0] = rows_of(3)[:, 0]
    found = finding(wide_trace(rows), "experts per row")
    assert (found.level, found.noted) == ("ok", False)


def test_rows_of_many_widths_are_counted_and_not_warned_of() -> None:
    rows = rows_of(3)
    rows[::4, :, 2] = -1  # 15 of 60 tokens, at 3 layers
    found = finding(wide_trace(rows), "experts per row")
    assert (found.level, found.noted) == ("ok", True)
    assert "45 of 180 rows have fewer experts" in found.text and "k = 3" in found.text


def test_rows_are_counted_through_all_requests() -> None:
    rows = rows_of(2)
    wide = rows_of(3, 1)
    found = finding(wide_trace(rows, wide), "experts per row")
    assert found.level == "warning" and "1 of 61 rows of layer 0" in found.text and "2 other layers" in found.text


def test_a_row_whose_weights_are_far_larger_is_named() -> None:
    weights = np.random.default_rng(0).uniform(0.1, 0.9, (TOKENS, LAYERS, WIDE)).astype(np.float32)
    assert finding(wide_trace(rows_of(3), weights=weights), "sums of weights").level == "ok"
    weights[7, 2, 1] = 65536
    found = finding(wide_trace(rows_of(3), weights=weights), "sums of weights")
    assert found.level == "warning"
    assert all(fact in found.text for fact in ("token 7 of request 0, layer 2", "65,53", "1 rows"))


def test_weights_of_any_scale_are_fine() -> None:
    for scale in (0.001, 2.5, 16.0):
        weights = np.random.default_rng(0).uniform(0.1, 0.9, (TOKENS, LAYERS, WIDE)).astype(np.float32) * scale
        assert finding(wide_trace(rows_of(3), weights=weights.astype(np.float32)), "sums of weights").level == "ok"


def test_an_import_says_how_many_rows_have_fewer_experts(tmp_path: Path) -> None:
    """Lists of two lengths, as top-p routing makes them."""
    cells = [f'{token},0,"[{", ".join(map(str, range(1 + token % 2)))}]"' for token in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["token,layer,topk", *cells, ""]))
    done = moereplay_here(
        "import", tmp_path / "a.csv", "--columns", "experts=topk", "--out", tmp_path / "a.zarr", *IMPORT
    )
    assert done.returncode == 0, done.stderr
    assert "note: experts per row: 20 of 40 rows have fewer experts" in done.stdout + done.stderr


def test_tokens_that_all_route_alike_are_not_called_shuffled() -> None:
    rows = np.broadcast_to(rows_of(3)[:1], (TOKENS, LAYERS, WIDE))
    found = finding(wide_trace(rows), "adjacent overlap")
    assert found.level == "ok" and "shuffled" not in found.text and "1.000" in found.text
