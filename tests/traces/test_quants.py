"""Quantisations of known models: bytes by llama.cpp's rules, compared with published files."""

from __future__ import annotations

from pathlib import Path

import pytest

from moereplay.traces.checkpoints.found import model_of
from moereplay.traces.checkpoints.quants import NAMES, quantised
from moereplay.traces.geometry import KnownModel, known_models
from moereplay.traces.schema import TraceError
from moereplay.traces.weight_formats import OF_EXPERTS
from tests.kit.every import every
from tests.traces.test_checkpoints import gemma


def total(model: KnownModel) -> int:
    """Return the bytes of all weights."""
    return sum(model.geometry.expert_bytes) * model.geometry.experts + model.geometry.dense_bytes


# GiB of published files; the last three are dynamic mixes, which a plain mix of the same name stands for
@every(
    "name, quant, gib, within",
    [
        ("qwen3-30b-a3b", "Q4_K_M", 17.3, 0.005),
        ("qwen3-235b-a22b", "Q2_K", 80, 0.01),
        ("gemma-4-26b-a4b", "BF16", 47, 0.005),
        ("deepseek-v3", "UD-Q2_K_XL", 211.03, 0.01),
        ("deepseek-v4-flash", "MXFP4", 151, 0.05),
        ("qwen3.6-35b-a3b", "Q4_K_M", 21.1, 0.07),
        ("qwen3.5-397b-a17b", "UD-Q3_K_XL", 167, 0.06),
        ("deepseek-v4-flash", "UD-IQ3_XXS", 95.9, 0.06),
    ],
)
def test_sizes_are_those_of_published_files(name: str, quant: str, gib: float, within: float) -> None:
    assert total(model_of(name, quant)) / 2**30 == pytest.approx(gib, rel=within)


def test_rows_that_do_not_divide_get_a_wider_type() -> None:
    # gemma 4's experts are 704 wide: down in Q8_0 for Q6_K and Q5_0 for Q4_K, gate and up in Q4_K: as its file has them
    found = model_of("gemma-4-26b-a4b", "Q4_K_M").geometry.expert_bytes
    assert set(found) == set(known_models()["gemma-4-26b-a4b"].geometry.bytes_by_bits[4])
    # GLM-4.5-Air's are 1,408 = 5.5 x 256 wide, of 4,096: 2/3 at 4.5 bits, 1/3 at 8.5 or 5.5
    weights = 3 * 4096 * 1408
    each = {round(weights * (2 * 4.5 + down) / 3 / 8) for down in (8.5, 5.5)}
    assert set(model_of("glm-4.5-air", "Q4_K_M").geometry.expert_bytes) == each


@every(
    "quant, bits",
    [("IQ3_K", 3.4375), ("IQ4_K", 4.5), ("iq4_ks", 4.25), ("IQ2_KL", 2.6875), ("W8A8", 8), ("FP4", 4.5), ("INT8", 8)],
)
def test_names_of_other_engines_have_their_bits(quant: str, bits: float) -> None:
    """Qwen3's experts are 768 = 3 x 256 wide; GLM-4.5-Air's 1,408 do not divide, and ik_llama.cpp takes IQ4_NL."""
    assert model_of("qwen3-30b-a3b", quant).geometry.expert_bits == bits
    if quant == "IQ3_K":
        assert model_of("glm-4.5-air", quant).geometry.expert_bits == pytest.approx((2 * bits + 4.5) / 3, abs=1e-4)


def test_every_quantisation_of_every_model_has_bytes() -> None:
    for model in known_models().values():
        sizes = [total(quantised(model, name)) for name in ("Q2_K", "Q4_K_M", "Q8_0", "BF16")]
        assert sizes == sorted(sizes), model.name
        if model.published.format not in OF_EXPERTS:  # whose blocks stay as they are
            assert sizes[-1] == pytest.approx(2 * (model.params - model.table_params), rel=0.02), model.name
    for name in NAMES:
        assert total(model_of("qwen3-30b-a3b", name.lower())) > 0


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    for spec, quant, said in [
        ("qwen3-30b-a3b", "Q4_K_N", "did you mean Q4_K"),
        ("qwen3-30b-a3b", "", "unknown --quant"),
        (str(gemma(tmp_path)), "Q4_K_M", "omit --quant"),
    ]:
        with pytest.raises(TraceError, match=said):
            quantised(model_of(spec), quant)
