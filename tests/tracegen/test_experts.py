"""Experts run by our function: the model's own numbers to the bit, unless something is dropped or rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.experts import Orders, check_computable, check_obeyed, executing, run_expert, run_experts
from moereplay.tracegen.modules import discover
from moereplay.tracegen.precision.affine import pack, restore
from tests.kit.live_runs import DTYPES, tokens
from tests.kit.tiny_models import FAMILIES, shared_model


def logits(family: str, dtype: torch.dtype, cached: bool) -> Tensor:
    """Return the logits of a prompt in one pass, or of its last token with the key-value cache."""
    model, ids = shared_model(family, dtype), torch.tensor([tokens(12)])
    with torch.inference_mode():
        if not cached:
            return model(ids).logits
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        return model(ids[:, -1:], past_key_values=cache).logits


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_of_a_family_run_as_they_should(family: str, subtests: pytest.Subtests) -> None:
    for dtype in DTYPES:
        with subtests.test(dtype=dtype):
            assert_nothing_dropped_is_bit_for_bit_the_models_own_eager_experts(family, dtype)
    for clause in CLAUSES:
        with subtests.test(clause=clause.__name__):
            clause(family)


def assert_nothing_dropped_is_bit_for_bit_the_models_own_eager_experts(family: str, dtype: torch.dtype) -> None:
    model, orders = shared_model(family, dtype), Orders()
    before = model.get_experts_implementation()
    model.set_experts_implementation("eager")
    own = [logits(family, dtype, cached) for cached in (False, True)]
    with executing(model, orders):
        ours = [logits(family, dtype, cached) for cached in (False, True)]
    assert model.get_experts_implementation()[""] == "eager"
    model.set_experts_implementation(before)
    check_obeyed(orders, [site.experts for site in discover(model).sites])
    assert all(torch.equal(*pair) for pair in zip(own, ours, strict=True))


def what_is_dropped_adds_nothing_and_takes_nothing_from_the_others(family: str) -> None:
    # by hand: the weighted sum of the experts that are left, each over its one token
    site = discover(shared_model(family, torch.float32)).sites[-1]
    hidden = torch.randn(2, _width(site.experts), generator=torch.Generator().manual_seed(5))
    ids, weights = torch.tensor([[3, -1, 1], [-1, -1, -1]]), torch.tensor([[0.5, 0.25, 0.125]] * 2)
    with torch.inference_mode():
        ran = run_experts(site.experts, hidden, ids, weights)
        expected = 0.125 * run_expert(site.experts, 1, hidden[:1]) + 0.5 * run_expert(site.experts, 3, hidden[:1])
    torch.testing.assert_close(ran[:1], expected)
    assert torch.equal(ran[1], torch.zeros_like(ran[1]))


def _width(experts: Any) -> int:
    shape = experts.down_proj.shape
    return int(shape[2] if experts.is_transposed else shape[1])


def an_expert_at_few_bits_runs_with_rounded_weights_and_the_others_as_they_are(family: str) -> None:
    model = shared_model(family, torch.float32)
    experts = discover(model).sites[0].experts
    hidden = torch.randn(3, _width(experts), generator=torch.Generator().manual_seed(6))
    ids, weights = torch.tensor([[0, 1], [1, 2], [0, 2]]), torch.full((3, 2), 0.5)
    with torch.inference_mode():
        plain = run_experts(experts, hidden, ids, weights)
        with executing(model, Orders(bits={experts: {1: 3.0}})):
            mixed = run_experts(experts, hidden, ids, weights)
        by_hand = run_expert(experts, 1, hidden[:1], 3.0) * 0.5 + run_expert(experts, 0, hidden[:1]) * 0.5
    assert torch.equal(mixed[2], plain[2])
    assert not torch.equal(mixed[:2], plain[:2])
    torch.testing.assert_close(mixed[:1], by_hand)


def they_can_be_computed(family: str) -> None:
    check_computable([site.experts for site in discover(shared_model(family, torch.float32)).sites])


CLAUSES = (
    what_is_dropped_adds_nothing_and_takes_nothing_from_the_others,
    an_expert_at_few_bits_runs_with_rounded_weights_and_the_others_as_they_are,
    they_can_be_computed,
)


def rounded(weight: torch.Tensor, bits: float) -> torch.Tensor:
    """A weight (out, in) as it comes back."""
    return restore(pack(weight, bits), weight.dtype)


def test_rounding_goes_along_the_input_in_groups_of_64_and_keeps_their_ends() -> None:
    weight = torch.randn(4, 150, generator=torch.Generator().manual_seed(7))
    coarse = rounded(weight, 2)
    for start in (0, 64, 128):
        group, own = coarse[:, start : start + 64], weight[:, start : start + 64]
        assert all(len(row.unique()) <= 4 for row in group)
        torch.testing.assert_close(torch.stack(group.aminmax(dim=-1)), torch.stack(own.aminmax(dim=-1)))
        step = (own.amax(-1) - own.amin(-1)) / 3
        assert ((group - own).abs() <= step[:, None] / 2 + 1e-6).all()


@given(st.floats(1, 16), st.integers(1, 130), st.integers(0, 1000))
def test_rounding_is_finite_and_rounding_again_changes_nothing_much(bits: float, width: int, seed: int) -> None:
    weight = torch.randn(2, width, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0.25  # a constant group has no step
    once = rounded(weight, bits)
    assert torch.isfinite(once).all() and torch.equal(once[0], weight[0])
    torch.testing.assert_close(rounded(once, bits), once, atol=1e-5, rtol=0)


def test_finer_rounding_is_nearer() -> None:
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(8))
    errors = [((rounded(weight, bits) - weight).norm() / weight.norm()).item() for bits in (2, 3, 4, 8)]
    assert errors == sorted(errors, reverse=True)
    # reference/models.md section 6 measured .451, .192, .090 and (groups of 128) .0059 for the same rule
    assert errors == pytest.approx([0.451, 0.192, 0.090, 0.0053], rel=0.1)


def test_experts_outside_the_interface_are_refused_by_name() -> None:
    with pytest.raises(RecordError, match=r"Linear does not use transformers' experts interface.*--miss fetch"):
        check_obeyed(Orders(), [nn.Linear(1, 1)])


def test_experts_that_cannot_be_computed_are_refused_by_name() -> None:
    with pytest.raises(RecordError, match="ModuleList does not keep its experts together"):
        check_computable([nn.ModuleList([nn.Linear(2, 2)])])
    packed = nn.Module()
    packed.register_buffer("scales", torch.zeros(1))
    for name in ("gate_up_proj", "down_proj"):
        packed.register_parameter(name, nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False))
    with pytest.raises(RecordError, match=r"Module stores experts as torch.uint8"):
        check_computable([packed])
