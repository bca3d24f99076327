"""Known models: sums against published totals, one entry worked by hand, and names."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from pydantic import ValidationError

from moereplay.traces.geometry import (
    Attention,
    LatentAttention,
    Mamba2,
    as_known,
    experts_per_layer,
    held_layers,
    known,
    known_models,
    last_layers,
    layers_by_worth,
    mean_experts,
)
from moereplay.traces.schema import Geometry, Header, Provenance, Router, TraceError
from tests.kit.collecting import case
from tests.kit.recordings import FOLDER, needs_recording

GIB = 2**30

#: 1e9 parameters, embedding included: the models' cards, to the digits they give
PUBLISHED = {
    "olmoe-1b-7b": 6.92,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 140.6,
    "qwen1.5-moe-a2.7b": 14.32,
    "qwen2-57b-a14b": 57.41,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.1,
    "phi-3.5-moe": 41.87,
    "deepseek-moe-16b": 16.38,
    "deepseek-v2-lite": 15.71,
    "deepseek-v2": 235.7,
    "deepseek-v3": 671.0,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "granite-3.1-3b-a800m": 3.30,
    "nemotron-3-nano-30b-a3b": 31.6,
    "gemma-4-26b-a4b": 25.2,
    "xverse-moe-a4.2b": 25.78,
    "qwen3.6-35b-a3b": 34.66,  # as llama.cpp prints of the text model
    "lfm2-8b-a1b": 8.34,
}

#: The same for later models, as their names or cards round it.
CARDS = {
    "glm-4.5": 355,
    "glm-4.6": 355,
    "glm-4.5-air": 106,
    "glm-4.7-flash": 30,
    "glm-5": 744,
    "deepseek-v4-flash": 284,
    "kimi-k2": 1026,
    "kimi-k2.5": 1026,
    "kimi-linear-48b-a3b": 49,
    "minimax-m2": 229,
    "minimax-text-01": 456,
    "qwen3-next-80b-a3b": 80,
    "qwen3-coder-480b-a35b": 480,
    "qwen3.5-122b-a10b": 122,
    "qwen3.5-397b-a17b": 397,
    "llama-4-scout": 108,
    "llama-4-maverick": 400,
    "ernie-4.5-21b-a3b": 21.8,
    "ernie-4.5-300b-a47b": 300,
    "dots.llm1": 142,
    "hunyuan-a13b": 80,
    "granite-4.0-h-tiny": 6.9,
    "granite-4.0-h-small": 32.2,
    "granite-3.1-1b-a400m": 1.33,
    "ling-mini-2.0": 16.3,
    "ling-flash-2.0": 103,
    "ling-1t": 1000,
    "ling-lite": 16.8,
    "moonlight-16b-a3b": 16,
    "dbrx": 132,
    "grok-1": 314,
    "phi-mini-moe": 7.6,
    "smallthinker-21b-a3b": 21.5,
    "smallthinker-4b-a0.6b": 4.27,
    "mistral-small-4": 119,
    "mimo-v2-flash": 309,
    "solar-open-100b": 102,
    "step-3.5-flash": 196,
    "aria": 24.9,
    "skywork-moe": 146,
    "hunyuan-large": 389,
    "jamba-1.5-mini": 52,
    "jamba-1.5-large": 398,
    "flex-olmo-7x7b": 33,
    "lfm2-24b-a2b": 24,
    "deepseek-v3.2": 671,
    "qwen3-coder-30b-a3b": 30.5,
    "nemotron-3-super-120b-a12b": 120,
    "glm-5.2": 744,
    "mistral-large-3": 675,
    "qwen3-30b-a3b-2507": 30.5,
    "qwen3-235b-a22b-2507": 235,
    "qwen3.8-flash-next": 125 + 51,  # and 51 of look-up tables
    "deepseek-v4.1-flash": 552 + 196,
    "kimi-k3": 2780,
    "mimo-v2.6-flash": 309,
    "glm-5.3-flash": 321.3 - 7.5,  # without the layer of multi-token prediction
    "deepseek-v4-pro": 1600 - 26,
}

#: GiB of all experts at 16 bits in SpecMD (arXiv 2602.03921), table 3
SPECMD_EXPERTS = {"olmoe-1b-7b": 12.0, "mixtral-8x7b": 84.0, "qwen1.5-moe-a2.7b": 23.2, "phi-3.5-moe": 75.0}

#: 1e9 parameters a token uses, as in the models' names or cards
ACTIVE = {"olmoe-1b-7b": 1.3, "mixtral-8x7b": 12.9, "deepseek-v3": 37.0, "qwen3-235b-a22b": 22.0, "gpt-oss-120b": 5.1}
ACTIVE |= {"nemotron-3-super-120b-a12b": 12.0, "mistral-large-3": 39.0, "deepseek-v4-flash": 13.0, "kimi-k3": 104.0}
ACTIVE |= {"deepseek-v4.1-flash": 16.0, "mimo-v2.6-flash": 15.0, "glm-5.3-flash": 18.0}


def test_parameters_add_up_to_the_published_totals() -> None:
    for totals, within in ((PUBLISHED, 0.002), (CARDS, 0.012)):
        for name, billions in totals.items():
            assert known_models()[name].params / 1e9 == pytest.approx(billions, rel=within), name
    assert set(known_models()) == set(PUBLISHED) | set(CARDS)


def test_expert_bytes_add_up_to_the_papers_table() -> None:
    for name, gib in SPECMD_EXPERTS.items():
        geometry = known_models()[name].geometry
        assert geometry.experts * sum(geometry.expert_bytes) / GIB == pytest.approx(gib, rel=0.001)


def test_active_parameters_are_near_the_published_ones() -> None:
    for name, billions in ACTIVE.items():
        assert known(name).active_params / 1e9 == pytest.approx(billions, rel=0.1), name


def test_olmoe_by_hand() -> None:
    geometry = known("olmoe-1b-7b").geometry
    # 3 matrices of 2048 x 1024 at 2 bytes are 12 MiB
    assert geometry.expert_bytes == (12 * 2**20,) * 16
    # 4 square projections, 2 norms and a gate to 64 experts
    assert geometry.dense_params == 4 * 2048**2 + 2 * 2048 + 64 * 2048
    assert geometry.head_params == 50304 * 2048


def test_attention_by_hand() -> None:
    # hidden 4; 2 query heads and 1 key-value head of 3: query and output 24 each, key and value 12 each
    assert Attention(heads=2, kv_heads=1, head_dim=3).params(4) == 72
    assert Attention(heads=2, kv_heads=1, head_dim=3, kv_projections=1).params(4) == 60
    # queries through rank 5: (4 + 6) x 5; outputs in 3 groups through rank 2: (6 + 4 x 3) x 2
    assert Attention(heads=2, kv_heads=1, head_dim=3, query_rank=5, output_rank=2, output_groups=3).params(4) == 110


def test_latent_attention_by_hand() -> None:
    # hidden 10; 2 heads of 2 + 1 key and 4 value dims, latent 3:
    # query 10 x 6 = 60, latent and rotary key 10 x 4 = 40, up 3 x 12 = 36, output 8 x 10 = 80
    shape = LatentAttention(heads=2, key_rank=3, plain=2, rotary=1, value=4)
    assert shape.params(10) == 216
    # queries through rank 5 instead: 10 x 5 + 5 x 6 = 80
    assert shape.model_copy(update={"query_rank": 5}).params(10) == 236
    # a gate as wide as the values: 10 x 8 more
    assert shape.model_copy(update={"gated": True}).params(10) == 296
    # 2 bytes of latent, rotary key and an index key of 6 that 4 positions share
    assert shape.model_copy(update={"index": 6, "pooled": 4}).cached == (2 * (3 + 1) + 3, 0)


def test_mamba_by_hand() -> None:
    # inner 2 x 3 = 6, B and C 2 x 1 x 4 = 8: input 10 x (6 + 14 + 2) = 220, convolution 14 x 5 = 70, output 60
    assert Mamba2(heads=2, head_dim=3, groups=1, state=4, kernel=5).params(10) == 350


def test_mxfp4_is_four_and_a_quarter_bits() -> None:
    geometry = known("gpt-oss-20b").geometry
    assert geometry.bytes_at(4) == geometry.bytes_at(4.25) == (13_219_200,) * 24


def test_fp8_adds_one_scale_per_block() -> None:
    # 42 MiB and 3 x 56 x 16 scales of 4 bytes
    assert known("deepseek-v3").geometry.bytes_at(8) == (42 * 2**20 + 10_752,) * 58


def test_other_precisions_scale_from_sixteen_bits() -> None:
    assert known("olmoe").geometry.bytes_at(4) == (3 * 2**20,) * 16


def test_gemma_layers_differ_at_four_bits_only() -> None:
    geometry = known("gemma-4-26b-a4b").geometry
    assert geometry.k == 8
    assert len(set(geometry.expert_bytes)) == 1
    # gate and up at 4.5 bits, down at 8.5 or 5.5: Q4_K with Q8_0 or Q5_0
    matrix = 2816 * 704
    assert set(geometry.bytes_at(4)) == {int(matrix * (2 * 4.5 + 8.5) / 8), int(matrix * (2 * 4.5 + 5.5) / 8)}


@needs_recording("gemma-4-26b-a4b", claim="geometry")
def test_gemma_bytes_are_those_of_the_phones_trace() -> None:
    lines = (FOLDER / "gemma-4-26b-a4b" / "gemma.route.csv").read_text().splitlines()
    recorded = [int(line.split()[2].partition("=")[2]) for line in lines if line.startswith("# layer=")]
    assert known("gemma-4-26b-a4b").geometry.bytes_at(4) == tuple(recorded)


def test_a_memory_holds_whole_experts_and_whole_layers() -> None:
    # layers of two experts of 1, 2 and 3 bytes: an expert of each takes 6, the last layer 6, the last two 10, all 12
    uneven = Geometry(layers=3, experts=2, k=1, expert_bytes=(1, 2, 3))
    assert [experts_per_layer(uneven, size) for size in (5, 6, 11, 12, 99)] == [0, 1, 1, 2, 2]
    assert [mean_experts(uneven, size) for size in (1, 9, 99)] == [0, 4, 6]
    assert [last_layers(uneven, size) for size in (5, 6, 9, 10, 12)] == [0, 1, 1, 2, 3]
    assert held_layers(uneven, 8, (2, 1, 0)) == [0, 2]  # 6 of 8 bytes, then 4 that do not fit, then 2 that do
    # per byte: 2, 3 and 2; of two that are worth the same the later one is first
    assert layers_by_worth(uneven, np.array([[1, 1], [3, 3], [2, 4]])) == [1, 2, 0]


def test_aliases_and_hub_ids_are_names_too() -> None:
    for spelling, name in [
        ("deepseek-r1", "deepseek-v3"),
        ("Mixtral", "mixtral-8x7b"),
        ("allenai/OLMoE-1B-7B-0924", "olmoe-1b-7b"),
        ("Phi-3.5-MoE-instruct", "phi-3.5-moe"),
    ]:
        assert known(spelling).name == name


def test_no_two_models_share_a_spelling() -> None:
    spellings = [alias.lower() for model in known_models().values() for alias in (model.name, *model.aliases)]
    assert len(spellings) == len(set(spellings))


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    for name, others in [
        ("qwen3-30b", "qwen3-30b-a3b, "),
        ("qwen3-coder-120b-a3b", "qwen3-coder-30b-a3b, "),  # of the family, and not offered as what was meant
        ("deepseek-v4.1-pro", "deepseek-v4-pro, "),
    ]:
        said = f"unknown model '{name}'; nearest names, which are other models: {others}"
        with pytest.raises(TraceError, match=re.escape(said)):
            known(name)


def test_a_name_like_nothing_is_still_one_line() -> None:
    with pytest.raises(TraceError, match=r"^unknown model '!'; `moereplay models`[^\n]*$"):
        known("!")


def test_what_a_geometry_does_not_say_of_its_prices_is_not_in_its_document() -> None:
    said = {"dense_bits": 4.5, "weight_format": "MXFP4", "kv_bytes": 98_304}
    plain = known("gpt-oss-20b").geometry
    assert not said.keys() & plain.model_dump().keys()
    priced = Geometry.model_validate(plain.model_dump() | said | {"weight_format": "mxfp4"})
    assert priced.model_dump() == plain.model_dump() | said
    assert Geometry.model_validate(plain.model_dump() | {"dense_bits": 16, "kv_bytes": 0}) == plain


def test_a_wrong_figure_of_a_geometry_is_refused() -> None:
    for wrong, said in [
        ({"dense_bits": 0}, "invalid precision 0.0 bits"),
        ({"weight_format": "MXPF4"}, "did you mean MXFP4?"),
        ({"kv_bytes": -1}, "greater than or equal to 0"),
        ({"kv_bytes": 7, "kv_windows": [[0, 7]]}, "greater than or equal to 1"),
    ]:
        with case(wrong, said), pytest.raises(ValidationError, match=re.escape(said)):
            Geometry.model_validate(known("gpt-oss-20b").geometry.model_dump() | wrong)


def test_a_position_adds_its_keys_and_values_to_the_cache() -> None:
    for name, bytes_ in [
        ("mixtral-8x7b", 32 * 8 * 128 * 2 * 2),
        ("deepseek-v2-lite", 27 * (512 + 64) * 2),  # latent: 26 MoE layers and a dense one
        ("deepseek-v3.2", 61 * (512 + 64 + 128) * 2),  # and a key of an indexer
        ("glm-5.2", (78 * (512 + 64) + 21 * 128) * 2),  # which 21 of 78 layers have
        ("lfm2-8b-a1b", 6 * 2 * 8 * 64 * 2),  # 6 of 24 layers attend
        ("lfm2-24b-a2b", 10 * 2 * 8 * 64 * 2),
        ("kimi-linear-48b-a3b", 7 * (512 + 64) * 2),
        ("step-3.5-flash", 45 * 2 * 8 * 128 * 2),
        ("mimo-v2-flash", (9 * 4 + 39 * 8) * (192 + 128) * 2),
        ("hunyuan-large", 32 * 2 * 8 * 128 * 2),  # two layers share theirs
        ("gemma-4-26b-a4b", 25 * 8 * 256 * 2 * 2 + 5 * 2 * 512 * 2 * 2),  # one projection in 5 layers, both cached
    ]:
        assert known(name).kv_bytes == bytes_


def test_a_window_keeps_its_last_positions_alone() -> None:
    for name, context, bytes_ in [
        # 12 layers of 24 keep 128 positions, each of 8 heads x 64 for key and value at 16 bits
        ("gpt-oss-20b", 100, 24 * 8 * 64 * 4 * 100),
        ("gpt-oss-20b", 4096, 12 * 8 * 64 * 4 * (4096 + 128)),
        # 25 of 30 keep 1,024 of 8 heads x 256; 5 keep all, of 2 heads x 512
        ("gemma-4-26b-a4b", 4096, 25 * 8 * 256 * 4 * 1024 + 5 * 2 * 512 * 4 * 4096),
        # chunks of 8,192 in 36 of 48
        ("llama-4-scout", 10_000, 8 * 128 * 4 * (36 * 8192 + 12 * 10_000)),
        ("mixtral-8x7b", 4096, 32 * 8 * 128 * 4 * 4096),
        # latent: 61 layers of 512 + 64
        ("deepseek-v3", 4096, 61 * 576 * 2 * 4096),
        # 12 layers of 48 attend, with 2 heads x 256; the others keep a state that does not grow
        ("qwen3-next-80b-a3b", 4096, 12 * 2 * 256 * 4 * 4096),
    ]:
        with case(name, context):
            assert known(name).kv_cache(context) == bytes_
            assert as_known(known(name).geometry, name).kv_cache(context) == bytes_


def test_a_cache_in_memory_has_room_for_a_batch_and_compressed_rows_as_engines_state_them() -> None:
    for name, context, bytes_, within in [
        # ollama, Gemma 4 26B: .48 GB at 8k and 3.00 at 128k, with 1,024 + 512 positions in the windows
        ("gemma-4-26b-a4b", 8192, 25 * 8192 * 1536 + 5 * 4096 * 8192, 0),
        ("gemma-4-26b-a4b", 8192, 0.48e9, 0.01),
        ("gemma-4-26b-a4b", 131_072, 3.00e9, 0.01),
        # llama.cpp: 128 + 512 positions in steps of 256, of 8 heads x 64 in 12 of 24 layers
        ("gpt-oss-20b", 4096, 12 * 8 * 64 * 4 * (4096 + 768), 0),
        ("gpt-oss-20b", 300, 24 * 8 * 64 * 4 * 300, 0),
        # ds4, DeepSeek-V4-Flash: 2,011 MiB at 150,000 positions, 152 MiB at 8,000
        ("deepseek-v4-flash", 150_000, 2011 * 2**20, 0.02),
        ("deepseek-v4-flash", 8_000, 152 * 2**20, 0.12),
    ]:
        with case(name, context):
            assert known(name).kv_held(context) == pytest.approx(bytes_, rel=within)


def test_compressed_rows_by_hand() -> None:
    # 21 layers keep a row of 512 numbers and a key of 128 for 4 positions, 20 a row for 128, of 32 bits;
    # all 43 keep the last 128 positions
    model = known("deepseek-v4-flash")
    assert model.kv_windows == ((128, 43 * 512 * 4),)
    assert model.kv_bytes - model.kv_windows[0].kv_bytes == 21 * (512 + 128) + 20 * 512 // 32
    # of 40 layers one keeps a row of 16 bits of every position and three of every second one; the others read these
    model = known("deepseek-v4.1-flash")
    assert model.kv_windows == ((128, 40 * 512 * 2),)
    assert model.kv_bytes - model.kv_windows[0].kv_bytes == 2 * (512 + 128) * 5 // 2


def test_tables_of_n_grams_and_mixers_of_streams_by_hand() -> None:
    model = known("qwen3.8-flash-next")
    # 16 tables of 20 million rows of 160; two mixers in a layer of 4 streams of 2,560: down and up at rank 320, 4 gates
    assert model.table_params == 16 * 20_000_000 * 160
    without = model.params - model.table_params
    assert without == model.geometry.layers * 512 * 3 * 2560 * 640 + model.embedding_params + (
        model.geometry.layers * (model.geometry.dense_params or 0) + (model.geometry.head_params or 0)
    )
    mixers = 2 * (4 * 2560) * (320 + 320 + 4)
    attention = (36 * (2560 * (6144 + 10240 + 48) + 10240 * 4 + 6144 * 2560) + 12 * (2560 * (9216 * 2 + 1024))) // 48
    assert model.geometry.dense_params == attention + 2 * 2560 + mixers + 512 * 2560 + 3 * 2560 * 640
    assert model.weights == "176.9 billion, 51.2 of them in tables of n-grams, of which a token uses 6.61 billion"


def test_a_trace_of_before_learns_its_windows_unless_it_states_another_cache() -> None:
    stored = known("gpt-oss-20b").geometry.model_copy(update={"kv_bytes": 24 * 8 * 64 * 4})
    assert stored.kv_cache(4096) == 24 * 8 * 64 * 4 * 4096
    assert as_known(stored, "gpt-oss-20b").kv_cache(4096) == 12 * 8 * 64 * 4 * (4096 + 128)
    own = stored.model_copy(update={"kv_bytes": 7})
    assert as_known(own, "gpt-oss-20b").kv_cache(4096) == 7 * 4096


def test_a_geometry_is_told_what_its_model_is_known_for() -> None:
    plain = known("gpt-oss-20b").geometry
    learnt = as_known(plain, "openai/gpt-oss-20b")
    assert (learnt.kv_bytes, learnt.weight_format) == (24 * 8 * 64 * 2 * 2, "MXFP4")
    assert as_known(plain.stored_at(16), "gpt-oss-20b").weight_format == ""
    own = plain.model_copy(update={"kv_bytes": 7, "weight_format": "Q8_0"})
    assert as_known(own, "gpt-oss-20b") == own
    assert as_known(plain, "a model of my own") is plain


def test_bits_are_the_decimals_that_they_are_written_as() -> None:
    for size, stored, bits, scaled in [(1_000_000, 16, 4.85, 303_125), (1001, 1.001, 1, 1000)]:
        # 1,000,000 x 4.85 / 16 and 1001 / 1.001 are whole; 1.001 x 1000 in doubles is 1000.9999999999999
        geometry = Geometry(layers=1, experts=1, k=1, expert_bytes=(size,), expert_bits=stored)
        assert geometry.bytes_at(bits) == (scaled,)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Geometry(layers=1, experts=4, k=9, expert_bytes=(1,)), "k = 9 exceeds experts = 4"),
        (lambda: Geometry(layers=0, experts=4, k=1, expert_bytes=()), "layers: expected at least 1 (got 0)"),
        (lambda: Router(family="x"), "family: "),  # pyright: ignore[reportArgumentType]
        (lambda: Provenance(models="a"), "models: "),  # pyright: ignore[reportCallIssue]
        (lambda: Header(geometry=3), "geometry: expected a table (got 3)"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_a_user_constructs_is_refused_in_one_line(make: Callable[[], object], said: str) -> None:
    with pytest.raises(TraceError, match=re.escape(said)) as refused:
        make()
    assert "\n" not in str(refused.value) and "pydantic" not in str(refused.value)
