"""Dense weights: bytes as stored by what the user, the file and the model say, and what is assumed without them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moereplay.traces.dense import assumption, dense_of, resolved, with_bits, with_bytes, with_stored
from moereplay.traces.geometry import known, recognised
from moereplay.traces.importers import registry as importers
from moereplay.traces.importers.contract import Options
from moereplay.traces.schema import Geometry, Header, Request, TraceError, memory_trace
from moereplay.traces.summary import chance_of, experts_per_token
from moereplay.traces.weight_formats import dense_bits_of
from tests.kit.collecting import case

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
        assert recognised(name, PLAIN) is None  # another shape


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
