"""Our quantiser and the registry: what is stored comes back, and names lead to quantisers or say what is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear, silu

from moereplay.analysis.forecast_fit import output_error
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.precision import BEST, CHOOSING, CONTRIB, DEFAULT, affine, at_width, check_quantiser
from moereplay.tracegen.precision.contract import Packed, Quantiser, imported, load, quantiser_at, titled
from moereplay.tracegen.precision.integers import packed, unpacked
from tests.kit.every import every
from tests.kit.installed import Installed
from tests.kit.quantiser_clauses import CLAUSES, DTYPES, drawn


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


def test_our_quantiser_keeps_every_clause(subtests: pytest.Subtests) -> None:
    for clause in CLAUSES:
        with subtests.test(clause=clause.__name__):
            clause(load(DEFAULT))


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


# ---------------------------------------------------------------- names


def test_an_unknown_name_gets_the_one_that_is_meant() -> None:
    with pytest.raises(RecordError, match=r"unknown quantiser 'Affin': did you mean affine\?"):
        check_quantiser("Affin")
    with pytest.raises(RecordError, match=r"choose from .*best"):
        check_quantiser("zzzzzz")


@every("name", [*CONTRIB, CHOOSING], apart=True)
def test_a_quantiser_that_is_not_installed_is_named_with_what_installs_it(name: str, installed: Installed) -> None:
    with pytest.raises(RecordError, match=rf"quantiser {name} requires .*: pip install .*contrib/quantisers, or"):
        check_quantiser(name)


def test_a_library_that_cannot_be_loaded_is_an_error_of_one_line() -> None:
    with pytest.raises(RecordError, match=r"^no_such_library cannot be imported \(.*\): install no_such_library again"):
        imported("no_such_library.part")


PLUG_IN = """
from moereplay.tracegen.precision.affine import pack, restore
from moereplay.tracegen.precision.contract import Quantiser

QUANTISER = Quantiser("coarse", "affine at 4 bits alone", pack, restore, widths=(4,))
"""


def test_a_quantiser_of_an_installed_package_is_found_by_name_and_titled_by_its_version(installed: Installed) -> None:
    installed("moereplay.quantisers", {"coarse": "coarse_weights:QUANTISER"}, {"coarse_weights.py": PLUG_IN})
    check_quantiser("coarse")
    coarse = quantiser_at("coarse", 4)
    assert torch.equal(coarse.pack(WEIGHT, 4).tensors["values"], affine.pack(WEIGHT, 4).tensors["values"])
    assert titled(coarse) == "coarse 1.5"
    with pytest.raises(RecordError, match="quantiser coarse has 4 bits, not 3; take affine, or other bits"):
        quantiser_at("coarse", 3)
    with pytest.raises(RecordError, match=r"did you mean coarse\?"):
        check_quantiser("corse")


@every(
    "text, reason",
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("QUANTISER = 3", "expected a Quantiser named 'coarse'"),
        (PLUG_IN.replace('"coarse"', '"other"'), "expected a Quantiser named 'coarse'"),
    ],
    apart=True,
)
def test_a_broken_plug_in_is_one_line_that_names_its_distribution(text: str, reason: str, installed: Installed) -> None:
    installed("moereplay.quantisers", {"coarse": "coarse_weights:QUANTISER"}, {"coarse_weights.py": text})
    with pytest.raises(RecordError, match=rf"^plug-in coarse of strangers-plugin 1.5 cannot be used: .*{reason}$"):
        quantiser_at("coarse", 4)


def test_the_best_is_a_quantiser_by_width_and_ours_where_none_was_measured() -> None:
    assert {bits: at_width(CHOOSING, bits) for bits in BEST} == dict(BEST)
    assert at_width(CHOOSING, 2.5) == "affine"
    assert at_width("torchao", 2) == "torchao"
    assert set(BEST.values()) <= {DEFAULT, *CONTRIB}


def test_its_title_has_the_version_of_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereplay.tracegen.precision.contract.version_of", lambda library: "1.2" if library else "")
    nothing: Any = lambda *given: Packed({}, (1, 1), 4)  # noqa: E731
    assert titled(Quantiser("hqq", "", nothing, nothing, (4,), library="hqq")) == "hqq 1.2"
    assert titled(Quantiser("affine", "", nothing, nothing, None)) == "affine"


WEIGHT = drawn((16, 128))
