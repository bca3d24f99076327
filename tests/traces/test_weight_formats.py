"""Bytes of weights: formats by the names of files, dense weights by what the user, the file and the model say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moereplay.traces.dense import assumption, dense_of, resolved, with_bits, with_bytes, with_stored
from moereplay.traces.geometry import known, known_models, recognised
from moereplay.traces.importers import registry as importers
from moereplay.traces.importers.contract import Options, Origin, Shape, header_for, size_line
from moereplay.traces.schema import Geometry, Header, Request, TraceError, memory_trace
from moereplay.traces.summary import chance_of, experts_per_token
from moereplay.traces.weight_formats import BLOCKS, CHECKPOINT_BITS, dense_bits_of, named_in
from tests.kit.collecting import case


def test_a_format_is_read_from_a_name() -> None:
    for text, named in [
        ("google_gemma-4-26B-A4B-it-Q4_K_M.gguf", "Q4_K_M"),
        ("/models/gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("Qwen3-30B-A3B-IQ4_XS", "IQ4_XS"),
        ("a-BF16-model-q8_0", "Q8_0"),
        ("olmoe-1b-7b", None),
        ("SQ4_K_MS", None),
        ("", None),
    ]:
        assert named_in(text) == named


def test_blocks_have_the_bits_of_their_layout() -> None:
    """ggml: a scale of 16 bits per block of 32 (two with an offset); OCP MX: 8 bits; IQ4_XS: 8 + 128 bytes per 256."""
    for named, bytes_of_block, weights in [
        ("Q8_0", 34, 32),
        ("Q5_0", 22, 32),
        ("Q4_0", 18, 32),
        ("Q4_1", 20, 32),
        ("MXFP4", 17, 32),
        ("IQ4_XS", 136, 256),
    ]:
        assert BLOCKS[named] == 8 * bytes_of_block / weights


def test_a_known_model_has_the_bytes_of_its_own_checkpoint() -> None:
    geometry = known("gpt-oss-20b").geometry
    assert (geometry.expert_bits, geometry.expert_bytes[0]) == (4, 13_219_200)
    assert geometry.bytes_at(16)[0] == 2 * 3 * 2880 * 2880
    assert {name for name, model in known_models().items() if model.geometry.expert_bits != 16} == {
        "deepseek-v3",
        "deepseek-v3.2",
        "deepseek-v4-flash",
        "deepseek-v4-pro",
        "deepseek-v4.1-flash",
        "glm-5.3-flash",
        "gpt-oss-20b",
        "gpt-oss-120b",
        "kimi-k2",
        "kimi-k2.5",
        "kimi-k3",
        "mimo-v2-flash",
        "mimo-v2.6-flash",
        "minimax-m2",
        "mistral-large-3",
    }


def test_the_published_format_has_the_stated_bits() -> None:
    for model in known_models().values():
        assert model.published.bits == CHECKPOINT_BITS[model.published.format]
        assert model.geometry.mean_bits == pytest.approx(model.published.bits, rel=1e-6)


def imported(model: str | None, file: str, bits: float | None = None) -> tuple[float, int, tuple[str, ...]]:
    """Bits, bytes of an expert and notes of an import whose file says no bytes."""
    named = known(model) if model else None
    options = importers.Options(
        geometry=named.geometry if named else None, expert_bits=bits, expert_bytes=None if named else 1000
    )
    shape = Shape(named.geometry.layers if named else 2, named.geometry.k if named else 1, 3)
    header = header_for(shape, options, Origin("test", Path(file), []), [])
    return header.geometry.expert_bits, header.geometry.expert_bytes[0], header.provenance.notes


def test_a_file_named_after_its_format_is_read_so() -> None:
    size = 2 * 3 * 2048 * 768  # Qwen3-30B's expert at 16 bits
    assert imported("qwen3-30b-a3b", "log.csv")[:2] == (16, size)
    assert imported("qwen3-30b-a3b", "Qwen3-30B-Q4_K_M.csv")[:2] == (4.84, -(-size * 4840 // 16000))
    assert imported("qwen3-30b-a3b", "Qwen3-30B-Q4_K_M.csv", bits=8)[:2] == (
        8,
        size // 2,
    )  # the option has the last word


def test_a_model_has_its_own_figure_of_so_many_bits() -> None:
    """llama.cpp leaves gpt-oss's experts in MXFP4 whatever the file's format is called."""
    assert imported("gpt-oss-20b", "gpt-oss-20b-Q4_K_M.npz")[:2] == (4, 13_219_200)
    assert imported("gpt-oss-20b", "log.npz")[:2] == (4, 13_219_200)


def test_bytes_without_a_model_take_the_bits_of_the_name() -> None:
    assert imported(None, "log-Q6_K.csv")[:2] == (6.56, 1000)
    bits, _, notes = imported(None, "log.csv")
    assert bits == 16
    assert notes[0].startswith("number of experts was not recorded")
    assert notes[1] == "unknown precision of the expert bytes: assumed 16 bits; pass --expert-bits"


def test_the_size_of_an_expert_is_said_in_full() -> None:
    """12.61 MiB = 13,219,200 / 2**20; 9.455 GiB = 24 layers of 32 of them."""
    assert size_line(known("gpt-oss-20b").geometry) == (
        "an expert has 12.61 MiB at 4 bits, all have 9.455 GiB; override with --expert-bits or --expert-bytes"
    )


def test_bytes_that_a_file_states_win_over_the_format_in_its_name():
    for size, layers, model, bits in [
        (13_219_200, 36, "gpt-oss-120b-Q4_K_M.gguf", 4.25),  # MXFP4, whatever the file is called
        (13_219_200, 35, "gpt-oss-120b-Q4_K_M.gguf", 4.84),  # another model's layers: the name is all there is
        (13_219_200, 36, "unheard-of-Q4_K_M.gguf", 4.84),
        (4_336_640, 30, "google_gemma-4-26B-A4B-it-Q4_K_M.gguf", 5.833),
    ]:
        shape = Shape(layers, 4, 100, expert_bytes=(size,) * layers)
        with_bytes = header_for(shape, importers.Options(), Origin("t", Path("t"), [], model), [])
        assert with_bytes.geometry.expert_bits == pytest.approx(bits, abs=1e-3)
        told = header_for(shape, importers.Options(expert_bits=8), Origin("t", Path("t"), [], model), [])
        assert told.geometry.expert_bits == 8


PLAIN = Geometry(layers=2, experts=4, k=2, expert_bytes=(1000, 1000))
MODEL = PLAIN.model_copy(update={"dense_params": 300, "head_params": 400})


def test_parameters_at_16_bits_are_an_assumption_that_names_the_options() -> None:
    found = dense_of(MODEL)
    assert (found.layers, found.head, found.read, found.resident) == ((600, 600), 800, 2000, 2000)
    said = assumption(MODEL)
    assert said and all(word in said for word in ("16 bits", "--dense", "--dense-bits"))
    assert assumption(MODEL, recorded=True) is None and assumption(PLAIN) is None


def test_stated_bytes_are_divided_by_weights_and_sum_up() -> None:
    found = dense_of(resolved(with_bytes(MODEL, 1000), ""))
    assert (found.layers, found.head, found.resident) == ((300, 300), 400, 1000)
    assert assumption(resolved(with_bytes(MODEL, 1000), "")) is None
    alone = dense_of(with_bytes(PLAIN, 1001))
    assert (alone.layers, alone.head, alone.read) == ((501, 500), 0, 1001)


def test_bytes_of_the_files_layers_stay_and_the_rest_is_the_heads() -> None:
    layers = MODEL.model_copy(update={"dense_layer_bytes": (150, 450)})
    assert dense_of(layers).layers == (150, 450)
    assert dense_of(layers).head == 400  # as many bits per weight as the layers have
    assert dense_of(with_bytes(layers, 800)) == ((150, 450), 200, 800)
    assert dense_of(with_bytes(layers, 300)) == ((75, 225), 0, 300)  # less than the file's: all in proportion


def test_layers_of_an_unknown_model_say_that_the_head_is_not_counted() -> None:
    said = assumption(resolved(PLAIN.model_copy(update={"dense_layer_bytes": (10, 20)}), "unknown"))
    assert said and "not counted" in said and "--dense" in said


def test_an_embedding_table_is_resident_and_not_read() -> None:
    model = known("deepseek-v3")
    found = dense_of(resolved(with_bytes(model.geometry, 11_400_000_000), model.name))
    weights = (model.geometry.dense_params or 0) * model.geometry.layers + (model.geometry.head_params or 0)
    assert found.resident == 11_400_000_000
    assert found.read == 11_400_000_000 - model.embedding_params * 4.5 / 8  # Q4_K, as quantised files have it
    whole = dense_of(resolved(with_bytes(model.geometry, 2 * (weights + model.embedding_params)), model.name))
    assert whole.read == 2 * weights  # at 16 bits all have the same


def test_bits_are_numbers_or_formats() -> None:
    for text, bits in [("4.85", 4.85), ("8", 8), ("Q8_0", 8.5), ("BF16", 16)]:
        found = with_bits(MODEL, "", text)
        assert found.dense_bits == bits and found.dense_stated and assumption(found) is None


def test_a_mixture_stores_its_head_in_more_bits_than_its_mean() -> None:
    assert dense_bits_of("Q4_K_M", 1000, 0) == 4.84
    assert 4.84 < (dense_bits_of("Q4_K_M", 1000, 1000) or 0) < 6.5625
    assert dense_bits_of("MXFP4", 1000, 1000) is None  # a format of experts alone


def test_other_bits_are_refused() -> None:
    for text in ["0", "65", "Q9", "four", "1e3", "-4", "nan"]:
        with case(text), pytest.raises(TraceError, match="--dense-bits"):
            with_bits(MODEL, "", text)


def test_bits_need_weights_that_are_known() -> None:
    with pytest.raises(TraceError, match="--dense"):
        with_bits(PLAIN, "my own", "4")
    assert with_stored(PLAIN, "my own", None, "", "Q4_K_M") == PLAIN


def test_a_weight_files_name_means_its_model() -> None:
    for name in [
        "google_gemma-4-26B-A4B-it-Q4_K_M.gguf",
        "/data/x/gemma-4-26B-A4B-it-UD-Q4_K_XL-00001-of-00003.gguf",
        "google/gemma-4-26B-A4B-it",
    ]:
        model = recognised(name)
        assert model and model.name == "gemma-4-26b-a4b"
        for other in (PLAIN, model.geometry.model_copy(update={"experts": 64})):
            assert recognised(name, other) is None  # another shape


def route_trace(folder: Path, model: str = "mine.gguf", dense: str = " dense_bytes={}") -> Path:
    lines = ["# route_trace v1", f"# model={model} arch=x n_layer=3 n_expert=4 n_expert_used=2"]
    lines += [
        f"# layer={layer} expert_bytes={0 if layer == 0 else 1000}{dense.format(100 + layer)}" for layer in range(3)
    ]
    lines += ["turn,phase,step,layer,slot,expert"]
    lines += [f"0,1,{step},{layer},{slot},{slot}" for step in range(3) for layer in (1, 2) for slot in (0, 1)]
    path = folder / "t.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_route_traces_dense_bytes_are_kept_those_of_dense_layers_too(tmp_path: Path) -> None:
    geometry = importers.read(route_trace(tmp_path), Options()).header.geometry
    assert geometry.dense_layer_bytes == (101 + 100, 102)
    assert importers.read(route_trace(tmp_path, dense=""), Options()).header.geometry.dense_layer_bytes == ()


def test_what_the_user_says_wins_over_the_file(tmp_path: Path) -> None:
    found = importers.read(route_trace(tmp_path), Options(dense_bytes=5000)).header.geometry
    assert dense_of(found).resident == 5000 and dense_of(found).layers == (201, 102)


def test_experts_per_token_are_means_by_layer_over_tokens_that_have_any() -> None:
    rows = np.full((4, 2, 2), -1, np.int16)
    rows[:, 0] = [0, 1]
    rows[:3, 1, 0] = 2  # one expert; the last token has none there
    trace = memory_trace(Header(geometry=PLAIN), [Request(rows, prompt_length=0)])
    assert experts_per_token(trace) == (2.0, 1.0)
    assert chance_of((2.0, 1.0), 4) == 5 / 3 / 4 and chance_of((2.0, 2.0), 4) == 0.5
