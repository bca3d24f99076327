"""One contract for every quantiser: what is stored comes back, the same every time, and nearer with more bits."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear, silu

from moereplay.analysis.forecast_fit import output_error
from moereplay.tracegen import precision
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.precision import BEST, CHOOSING, DEFAULT, NAMES, affine, at_width, check_quantiser
from moereplay.tracegen.precision.contract import Packed, Quantiser, imported, load, quantiser_at, titled
from moereplay.tracegen.precision.integers import packed, unpacked
from moereplay.tracegen.precision.torchao_intx import as_theirs
from tests.kit.every import every

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Whole groups of 64, less than one, a rest behind one, and rows that end within a block of the next.
SHAPES = ((8, 128), (4, 32), (3, 150), (5, 1), (1, 2))
FEW = (8, 4, 3, 2)
#: Of normal weights; about a fifth more than studies/pages/quantisers.md has for the worst.
MOST = {8: 0.012, 4: 0.15, 3: 0.27, 2: 0.62}


def named(name: str) -> Quantiser:
    """The quantiser; without its library the test is skipped."""
    library = NAMES[name]
    if library is not None and not find_spec(library):
        pytest.skip(f"{library} is not installed")
    return load(name)


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not find_spec(library), reason=f"{library} is not installed")


def widths(quantiser: Quantiser) -> list[int]:
    return [bits for bits in FEW if quantiser.widths is None or bits in quantiser.widths]


def drawn(shape: tuple[int, int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def error(quantiser: Quantiser, weight: Tensor, bits: float) -> float:
    """Relative."""
    restored = quantiser.restore(quantiser.pack(weight, bits), torch.float32)
    return ((restored - weight.float()).norm() / weight.float().norm()).item()


@every("bits", (8, 5, 4, 3, 2))
def test_the_output_of_an_expert_errs_as_the_share_of_rounded_gate_weight_says(bits: int) -> None:
    """Gate, up and down of normal weights, stored and restored by the default quantiser; 64 random states."""
    quantiser = load(DEFAULT)
    matrices = [drawn(shape, seed=seed) for seed, shape in enumerate([(256, 512), (256, 512), (512, 256)])]
    states = drawn((64, 512), seed=9) * 50

    def output(gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return linear(silu(linear(states, gate)) * linear(states, up), down)

    right = output(*matrices)
    found = output(*(quantiser.restore(quantiser.pack(each, bits), torch.float32) for each in matrices))
    assert output_error(bits, 16) == pytest.approx(float((found - right).norm() / right.norm()), rel=0.15)


def test_every_quantiser_is_a_file_listed_by_one_word() -> None:
    others = {"__init__", "contract", "groups", "integers", "libraries", "registry", "store"}
    files = {path.stem for path in Path(precision.__file__).parent.glob("*.py")} - others
    assert files == set(NAMES)
    assert set(BEST.values()) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_quantiser_keeps_every_clause(name: str, subtests: pytest.Subtests) -> None:
    quantiser = named(name)
    assert quantiser.name == name
    for clause in CLAUSES:
        with subtests.test(clause=clause.__name__):
            clause(quantiser)


def a_weight_comes_back_in_its_shape_and_dtype(quantiser: Quantiser) -> None:
    for bits, dtype, shape in product(widths(quantiser), DTYPES, SHAPES):
        weight = drawn(shape, dtype)
        kept = quantiser.pack(weight, bits)
        restored = quantiser.restore(kept, dtype)
        assert (restored.shape, restored.dtype) == (weight.shape, dtype)
        assert torch.isfinite(restored).all()
        assert (restored - weight).float().abs().max() <= 2 * weight.float().abs().max()
        assert (kept.shape, kept.bits) == (shape, bits)


def errors_are_small_and_smaller_with_more_bits(quantiser: Quantiser) -> None:
    for dtype in DTYPES:
        errors = {bits: error(quantiser, drawn((64, 256), dtype), bits) for bits in widths(quantiser)}
        assert all(errors[bits] < MOST[bits] for bits in errors), dtype
        assert list(errors.values()) == sorted(errors.values()), dtype


def rows_that_are_no_whole_groups_lose_no_more(quantiser: Quantiser) -> None:
    # bitsandbytes 0.50.2 restores such rows with other blocks' scales on a CPU, at twice the error
    for bits, shape in product(widths(quantiser), ((128, 32), (64, 96))):
        assert error(quantiser, drawn(shape), bits) < MOST[bits]


def the_same_weight_gives_the_same_bytes_and_they_the_same_weight(quantiser: Quantiser) -> None:
    weight = drawn((16, 192), torch.bfloat16)
    for bits in widths(quantiser):
        once, again = (quantiser.pack(weight.clone(), bits) for _ in range(2))
        assert all(torch.equal(once.tensors[each], again.tensors[each]) for each in once.tensors)
        assert torch.equal(quantiser.restore(once, weight.dtype), quantiser.restore(again, weight.dtype))


def what_was_restored_is_stored_as_it_is(quantiser: Quantiser) -> None:
    # hqq searches anew, 8 bits of bitsandbytes have no -1, and symmetric groups have no value for their largest weight
    if quantiser.name not in ("affine", "bitsandbytes_fp4", "torchao"):
        return
    weight = drawn((16, 192))
    for bits in widths(quantiser):
        once = quantiser.restore(quantiser.pack(weight, bits), torch.float32)
        again = quantiser.restore(quantiser.pack(once, bits), torch.float32)
        torch.testing.assert_close(again, once, atol=1e-6, rtol=1e-4)


def bytes_are_those_of_values_and_scales(quantiser: Quantiser) -> None:
    weight = drawn((64, 256), torch.bfloat16)
    for bits in widths(quantiser):
        kept = quantiser.pack(weight, bits)
        assert kept.bytes == sum(len(each.view(torch.uint8).numpy().tobytes()) for each in kept.tensors.values())
        assert bits < kept.bits_per_weight <= bits + 1  # a group of 64 has at most two numbers of 32 bits


def a_group_of_equal_weights_stays_what_it_is(quantiser: Quantiser) -> None:
    if quantiser.name == "torchao_intx":  # which has no offset
        return
    weight = torch.full((2, 64), 0.25)
    for bits in widths(quantiser):
        torch.testing.assert_close(quantiser.restore(quantiser.pack(weight, bits), torch.float32), weight)


CLAUSES = (
    a_weight_comes_back_in_its_shape_and_dtype,
    errors_are_small_and_smaller_with_more_bits,
    rows_that_are_no_whole_groups_lose_no_more,
    the_same_weight_gives_the_same_bytes_and_they_the_same_weight,
    what_was_restored_is_stored_as_it_is,
    bytes_are_those_of_values_and_scales,
    a_group_of_equal_weights_stays_what_it_is,
)


# ---------------------------------------------------------------- ours


@given(st.floats(1, 31), st.integers(1, 200), st.sampled_from(DTYPES), st.integers(0, 1000))
def test_affine_is_plain_rounding_to_the_nearest_value_of_each_groups_grid(
    bits: float, width: int, dtype: torch.dtype, seed: int
) -> None:
    weight = drawn((2, width), dtype, seed)
    weight[0] = 0.25  # a constant group has no step
    assert torch.equal(affine.restore(affine.pack(weight, bits), weight.dtype), plainly(weight, bits))


def plainly(weight: Tensor, bits: float) -> Tensor:
    """Without bytes."""
    return torch.cat([_nearest(part.float(), bits) for part in weight.split(64, -1)], -1).to(weight.dtype)


def _nearest(group: Tensor, bits: float) -> Tensor:
    low, high = group.aminmax(dim=-1, keepdim=True)
    step = (high - low) / (max(round(2**bits), 2) - 1)
    return low + torch.where(step > 0, (group - low) / step, 0).round() * step


@given(st.integers(1, 32), st.integers(0, 100), st.integers(0, 1000))
def test_integers_come_back_from_as_few_bytes_as_hold_eight_of_them(width: int, count: int, seed: int) -> None:
    values = torch.randint(2**width, (count,), generator=torch.Generator().manual_seed(seed))
    content = packed(values, width)
    assert content.dtype == torch.uint8
    assert len(content) == -(-count // 8) * width
    assert torch.equal(unpacked(content, width, count), values)


def test_three_bits_lie_one_behind_the_other_from_the_lowest_on() -> None:
    # 1, 2, 3 are 001, 010, 011: read from the lowest bit on 100 010 110, so 0b11010001 and then 0b0
    assert packed(torch.tensor([1, 2, 3]), 3).tolist() == [0b11010001, 0, 0]


# ---------------------------------------------------------------- other people's, beside their own kernels


@needs("hqq")
@every("bits", FEW)
def test_hqq_restores_what_its_own_quantiser_does(bits: int) -> None:
    library: Any = imported("hqq.core.quantize").Quantizer
    quantiser, weight = load("hqq"), drawn((64, 256))
    values, meta = library.quantize(weight, nbits=bits, group_size=64, axis=1, device="cpu")
    for each in ("scale", "zero"):
        meta[each] = meta[each].half().float()  # as its layers keep them
    theirs = library.dequantize(values, meta | {"compute_dtype": torch.float32})
    assert torch.equal(quantiser.restore(quantiser.pack(weight, bits), torch.float32), theirs)


@needs("bitsandbytes")
@every("name, kind", [("bitsandbytes", "nf4"), ("bitsandbytes_fp4", "fp4")])
def test_bitsandbytes_multiplies_by_what_is_restored(name: str, kind: str) -> None:
    library: Any = imported("bitsandbytes")
    for dtype in DTYPES[:2]:
        quantiser, weight, state = load(name), drawn((64, 256), dtype), drawn((5, 256), dtype, seed=1)
        values, kept = library.functional.quantize_4bit(weight, blocksize=64, quant_type=kind)
        ours = linear(state, quantiser.restore(quantiser.pack(weight, 4), dtype))
        assert torch.equal(ours, library.matmul_4bit(state, values.t(), kept)), dtype


@needs("torchao")
@every("bits", FEW)
def test_torchao_multiplies_by_what_is_restored(bits: int) -> None:
    quantiser, weight, state = load("torchao_intx"), drawn((64, 256)), drawn((5, 256), seed=1)
    kept = quantiser.pack(weight, bits)
    assert torch.equal(linear(state, quantiser.restore(kept, torch.float32)), linear(state, as_theirs(kept)))


# ---------------------------------------------------------------- names


def test_an_unknown_name_gets_the_one_that_is_meant() -> None:
    with pytest.raises(RecordError, match=r"unknown quantiser 'Affin': did you mean affine\?"):
        check_quantiser("Affin")
    with pytest.raises(RecordError, match=r"choose from .*best"):
        check_quantiser("zzzzzz")


@every("name", ["hqq", "torchao_intx", CHOOSING], apart=True)
def test_a_library_that_is_missing_is_named_with_what_installs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "find_spec", lambda library: None)
    with pytest.raises(RecordError, match=rf"quantiser {name} .* \w+: pip install .*\[quant\]'?, or"):
        check_quantiser(name)


def test_a_library_that_cannot_be_loaded_is_an_error_of_one_line() -> None:
    with pytest.raises(RecordError, match=r"^no_such_library cannot be imported \(.*\): pip install .*\[quant"):
        imported("no_such_library.part")


def test_a_width_that_a_quantiser_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "find_spec", lambda library: True)
    with pytest.raises(RecordError, match="quantiser bitsandbytes has 8, 4 bits, not 3; take affine, or other bits"):
        quantiser_at("bitsandbytes", 3)


def test_the_best_is_a_quantiser_by_width_and_ours_where_none_was_measured() -> None:
    assert {bits: at_width(CHOOSING, bits) for bits in BEST} == dict(BEST)
    assert at_width(CHOOSING, 2.5) == "affine"
    assert at_width("torchao", 2) == "torchao"


def test_its_title_has_the_version_of_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereplay.tracegen.precision.contract.version_of", lambda library: "1.2" if library else "")
    nothing: Any = lambda *given: Packed({}, (1, 1), 4)  # noqa: E731
    assert titled(Quantiser("hqq", "", nothing, nothing, (4,))) == "hqq 1.2"
    assert titled(Quantiser("affine", "", nothing, nothing, None)) == "affine"
