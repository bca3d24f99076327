"""Weight formats by the names that files carry, and what an import makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moereplay.traces.geometry import MODELS, known
from moereplay.traces.importers import registry as importers
from moereplay.traces.importers.contract import Origin, Shape, header_for, size_line
from moereplay.traces.weight_formats import BITS_PER_WEIGHT, BLOCKS, named_in


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
    assert {name for name, model in MODELS.items() if model.geometry.expert_bits != 16} == {
        "deepseek-v3",
        "gpt-oss-20b",
        "gpt-oss-120b",
    }


def test_the_published_format_has_the_stated_whole_bits() -> None:
    for model in MODELS:
        published = known(model).published
        assert int(BITS_PER_WEIGHT[published.format]) == published.bits


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
    assert notes[0].startswith("number of experts not recorded")
    assert notes[1] == "precision of the expert bytes not known: taken as 16 bits; --expert-bits tells it"


def test_the_size_of_an_expert_is_said_in_full() -> None:
    """12.61 MiB = 13,219,200 / 2**20; 9.455 GiB = 24 layers of 32 of them."""
    assert size_line(known("gpt-oss-20b").geometry) == (
        "an expert has 12.61 MiB at 4 bits, all have 9.455 GiB; --expert-bits or --expert-bytes change that"
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
