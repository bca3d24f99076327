"""The validator: each defect is found, and sound traces pass."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moereplay.traces.importers import registry as importers
from moereplay.traces.importers.contract import Options
from moereplay.traces.patterns import overlap, reset_stride, shared
from moereplay.traces.schema import Request, Router, Trace, memory_trace
from moereplay.traces.summary import summarise
from moereplay.traces.validator import examine, take_sample
from tests.kit.recordings import FOLDER, needs_recording
from tests.kit.routed import EXPERTS, LAYERS, K, damaged, drifting, finding, header, trace_of

on_real_data = needs_recording("gpt-oss-20b", "qwen3-30b-a3b", "gemma-4-26b-a4b", claim="inspect")

SOUND = trace_of(drifting(200, 1), drifting(300, 2))


# ---------------------------------------------------------------- overlap


def test_shared_counts_common_experts_and_never_padding() -> None:
    left, right = np.array([[3, 1, -1], [0, 2, 4]]), np.array([[1, 3, -1], [5, 4, 6]])
    assert shared(left, right).tolist() == [2, 1]


def test_overlap_is_the_share_of_the_earlier_rows_experts() -> None:
    # layer 0 keeps 1 of 2; layer 1 routed one expert and keeps it: 2 of 3
    earlier, later = np.array([[[0, 1], [2, -1]]]), np.array([[[1, 5], [2, 3]]])
    assert overlap(earlier, later).tolist() == [pytest.approx(2 / 3)]


def test_overlap_of_a_token_that_was_not_routed_is_zero() -> None:
    nothing = np.full((1, 1, 2), -1)
    assert overlap(nothing, nothing).tolist() == [0.0]


def test_the_stride_of_resets_is_found_and_not_its_multiples() -> None:
    for stride in [10, 64, 99]:
        random = np.random.Generator(np.random.PCG64(stride))
        positions = np.arange(1, 1000)
        overlaps = random.uniform(0.3, 0.6, 999)
        overlaps[positions % stride == 0] = 0.06
        assert reset_stride(overlaps, positions, chance=0.06) == stride


def test_fewer_than_four_resets_prove_nothing() -> None:
    overlaps = np.full(999, 0.4)
    overlaps[[299, 599, 899]] = 0.06
    assert reset_stride(overlaps, np.arange(1, 1000), chance=0.06) is None


# ---------------------------------------------------------------- validator


def test_a_sound_trace_has_only_good_findings() -> None:
    assert {seen.level for seen in examine(SOUND)} == {"ok"}


def test_a_tiny_trace_is_not_judged() -> None:
    tiny = memory_trace(header(), [Request(np.broadcast_to([0, 1], (1, LAYERS, K)), 0)])
    assert {seen.level for seen in examine(tiny)} == {"ok"}


def test_ids_out_of_range_are_an_error() -> None:
    rows = SOUND.read("chosen").copy()
    rows[5, 1, 0] = EXPERTS
    found = finding(damaged(SOUND, chosen=rows), "ids")
    assert (found.level, "largest 16" in found.text) == ("error", True)


def test_an_expert_twice_in_a_row_is_an_error() -> None:
    rows = SOUND.read("chosen").copy()
    rows[5, 1] = 3
    assert finding(damaged(SOUND, chosen=rows), "ids").level == "error"


def test_padding_before_an_expert_is_a_warning() -> None:
    rows = drifting(100, 3)
    rows[4, 2, 0] = -1
    assert "in 1 places" in finding(trace_of(rows), "padding").text


def test_padding_at_the_end_of_rows_is_reported_as_such() -> None:
    rows = drifting(100, 3)
    rows[:50, 2] = -1  # 50 of 100 tokens of one of three layers: a sixth
    found = finding(trace_of(rows), "padding")
    assert (found.level, found.text) == ("ok", "16.67% of the places not routed, in layers [2]")


def test_a_rank_that_is_never_used_is_a_warning() -> None:
    rows = drifting(100, 3)
    rows[..., 1] = -1
    assert finding(trace_of(rows), "padding").text.startswith("rank 1 is -1")


def test_shuffled_rows_are_a_warning() -> None:
    random = np.random.Generator(np.random.PCG64(5))
    assert finding(trace_of(random.permutation(drifting(2000, 4))), "adjacent overlap").level == "warning"


def test_shuffled_rows_are_found_even_where_a_few_experts_do_all_the_work() -> None:
    # four of 16 experts: neighbours share a half by habit alone, far above k / E = 0.125
    random = np.random.Generator(np.random.PCG64(5))
    rows = random.permutation(drifting(2000, 4, experts=4))
    found = finding(trace_of(rows), "adjacent overlap")
    assert (found.level, "share 0.5" in found.text) == ("warning", True)


def test_neighbours_at_chance_are_a_warning_even_if_distant_tokens_share_less() -> None:
    # the second half avoids the experts of its partner half a request before: 0.0 there, 1/8 between neighbours
    random = np.random.Generator(np.random.PCG64(5))
    orders = random.permuted(np.tile(np.arange(EXPERTS), (1000, LAYERS, 1)), axis=-1)
    second = random.permuted(orders[..., K:], axis=-1)[..., :K]
    found = finding(trace_of(np.concatenate([orders[..., :K], second])), "adjacent overlap")
    assert (found.level, "away 0.000" in found.text) == ("warning", True)


def test_neighbours_are_tokens_of_one_request() -> None:
    _, positions = take_sample(trace_of(drifting(3, 1), drifting(4, 2)), tokens=100).adjacent()
    assert positions.tolist() == [1, 2, 1, 2, 3]


def test_interleaved_sequences_are_a_warning() -> None:
    sequences = np.stack([drifting(200, seed) for seed in range(8)], axis=1)
    assert finding(trace_of(sequences.reshape(-1, LAYERS, K)), "adjacent overlap").level == "warning"


def test_a_copied_layer_is_an_error() -> None:
    rows = drifting(100, 6)
    rows[:, 2] = rows[:, 0]
    found = finding(trace_of(rows), "identical layers")
    assert (found.level, "[0, 2]" in found.text) == ("error", True)


def test_context_resets_within_a_request_are_a_warning_that_names_the_stride() -> None:
    rows = np.concatenate([drifting(40, seed) for seed in range(20)])
    assert "every 40 tokens" in finding(trace_of(rows), "context resets").text


def test_duplicate_requests_are_a_warning() -> None:
    rows = drifting(60, 7)
    found = finding(trace_of(rows, drifting(60, 8), rows), "duplicate requests")
    assert found.text == "1 request repeats another one, such as 0 and 2"


def test_ids_that_no_layer_uses_are_a_warning() -> None:
    assert (
        "4 of 16 ids used in no layer (first 12)"
        in finding(trace_of(drifting(500, 9, experts=12)), "expert range").text
    )


def test_values_that_are_not_finite_are_an_error() -> None:
    weights = np.full((500, LAYERS, K), 0.5, np.float32)
    weights[3] = np.nan
    assert finding(damaged(SOUND, weights=weights), "finite").level == "error"


def test_rank_order_follows_the_weights() -> None:
    for weights, level in [((0.7, 0.3), "ok"), ((0.3, 0.7), "warning")]:
        rows = drifting(50, 10)
        assert finding(trace_of(rows, weights=np.broadcast_to(weights, rows.shape)), "rank order").level == level


def test_token_ids_must_belong_to_their_rows() -> None:
    for shift, level in [(0, "ok"), (1, "warning")]:
        # every token id has its own experts, so a shift by one separates them
        ids = np.random.Generator(np.random.PCG64(11)).integers(0, 8, 400)
        rows = np.stack([np.stack([ids, ids + 8], -1)] * LAYERS, 1)
        assert finding(trace_of(rows, token_ids=np.roll(ids, shift)), "same-token overlap").level == level


def test_the_header_must_name_the_router_that_chose() -> None:
    for family, level in [("softmax_topk", "ok"), ("softmax_groups", "warning")]:
        logits = np.random.Generator(np.random.PCG64(12)).normal(size=(100, LAYERS, EXPERTS))
        chosen = np.argsort(-logits, axis=-1)[..., :K]
        router = Router.model_validate({"family": family, "groups": 4, "groups_kept": 1})
        trace = memory_trace(header(router=router), [Request(chosen, 0, logits=logits)])
        assert finding(trace, "router").level == level


def test_a_correction_bias_takes_part_in_the_choice() -> None:
    logits = np.random.Generator(np.random.PCG64(13)).normal(size=(100, LAYERS, EXPERTS))
    bias = np.zeros((LAYERS, EXPERTS), np.float32)
    bias[:, 3] = 1.0  # a sigmoid is below 1, so expert 3 always comes first
    scores = 1 / (1 + np.exp(-logits)) + bias
    request = Request(np.argsort(-scores, axis=-1)[..., :K], 0, logits=logits)
    trace = memory_trace(header(router=Router(family="sigmoid_groups")), [request], bias)
    assert finding(trace, "router").level == "ok"
    assert finding(dataclasses.replace(trace, router_bias=None), "router").level == "warning"


def test_an_unfinished_recording_is_a_warning() -> None:
    assert finding(dataclasses.replace(SOUND, complete=False), "complete").level == "warning"


def test_the_sample_is_bounded_and_takes_the_first_tokens_of_requests() -> None:
    rows = drifting(1000, 14)
    late = rows.copy()
    late[900:, 1] = late[900:, 0]  # differs only after the sample of two requests of 100 tokens
    found = [seen.text for seen in examine(trace_of(rows, late), tokens=200) if seen.check == "duplicate requests"]
    assert found == ["1 request repeats another one, such as 0 and 1"]


# ---------------------------------------------------------------- the real files


def real(name: str, **options: int) -> Trace:
    foreign = importers.read(FOLDER / name, Options.model_validate({"expert_bytes": 1000} | options))
    return memory_trace(foreign.header, list(foreign.requests))


@pytest.mark.long
@on_real_data
def test_the_real_traces_are_sound_and_neighbours_share_far_more_than_chance() -> None:
    gptoss, qwen = real("gpt-oss-20b"), real("qwen3-30b-a3b")
    for trace in (gptoss, qwen, real("gemma-4-26b-a4b/gemma.route.csv")):
        assert {seen.level for seen in examine(trace)} == {"ok"}, trace.header.provenance.source
    first, second = summarise(gptoss), summarise(qwen)
    assert (round(first.reuse, 3), first.chance) == (0.435, 0.125)
    assert 0.40 < second.reuse < 0.475
    assert second.chance == 0.0625


@on_real_data
def test_qwen3_read_as_one_stream_falls_to_chance_every_512_tokens() -> None:
    stream = real("qwen3-30b-a3b/code.npz", chunk=8000)
    rows = stream.read("chosen")
    assert overlap(rows[511:-1:512], rows[512::512]).mean() == pytest.approx(0.0625, abs=0.005)
    assert "every 512 tokens" in finding(stream, "context resets").text
