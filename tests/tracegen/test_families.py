"""One contract for every family: what is recorded of a tiny random model is what the model does.

"Bit for bit" below is torch.equal. The rule (`traces/routers.py`) is compared by the numbers that
`tracegen/families.py` defines; fp32 has no ties on these tokens, bf16 may.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from moereplay.tracegen import families
from moereplay.tracegen.capture import Capture, Rows, check
from moereplay.tracegen.modules import MoeModules, discover
from moereplay.traces import routers
from tests.kit.tiny_models import FAMILIES, shared_model, some_ids, tiny_model

TOKENS, DEPTH, NEW = 40, 2, 6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Seen(NamedTuple):
    """One watched pass over TOKENS tokens, and what other hooks saw in it and in an unwatched one."""

    rows: Rows
    logits: Tensor  #: of the watched pass
    unwatched: Tensor
    declared: tuple[Tensor, ...] | None  #: the model's own output_router_logits
    norms: list[Any]  #: per site: (residual, state) of its norm
    executed: list[Any]  #: per site: positional arguments of its experts


@cache
def modules_of(name: str, dtype: str) -> MoeModules:
    return discover(shared_model(name, DTYPES[dtype]))


@cache
def seen(name: str, dtype: str) -> Seen:
    modules, ids = modules_of(name, dtype), some_ids(TOKENS)
    norms: list[Any] = []
    executed: list[Any] = []
    with torch.inference_mode():
        plain = modules.model(ids, output_router_logits=True)
        hooks = [
            site.norm.register_forward_hook(lambda norm, args, state: norms.append((args[0], state)))
            for site in modules.sites
        ]
        hooks += [
            site.experts.register_forward_pre_hook(lambda experts, args: executed.append(args))
            for site in modules.sites
        ]
        with Capture(modules, DEPTH) as capture:
            watched = modules.model(ids)
    for hook in hooks:
        hook.remove()
    return Seen(capture.take(), watched.logits, plain.logits, plain.get("router_logits"), norms, executed)


def test_no_two_families_claim_a_model_type() -> None:
    claimed = [family.model_type for family in families.FAMILIES]
    assert len(claimed) == len(set(claimed))
    assert families.family_of("mixtral") is FAMILIES["mixtral"]
    assert families.family_of("llama") is None


def the_self_check_passes(name: str, dtype: str) -> None:
    modules = modules_of(name, dtype)
    found = check(modules)
    assert found.family == name
    assert found.rows == 32 * modules.geometry.layers
    assert found.ties == 0 or dtype == "bf16"


def watching_changes_no_bit_of_the_output(name: str, dtype: str) -> None:
    assert torch.equal(seen(name, dtype).logits, seen(name, dtype).unwatched)


def recorded_logits_are_those_the_model_declares(name: str, dtype: str) -> None:
    declared, rows = seen(name, dtype).declared, seen(name, dtype).rows
    assert declared is not None and len(declared) == rows.logits.shape[1]
    for site, logits in enumerate(declared):
        assert torch.equal(torch.from_numpy(rows.logits[:, site]), logits.reshape(TOKENS, -1).float())


def recorded_logits_are_the_gate_on_the_normed_residual(name: str, dtype: str) -> None:
    """The gate's matrix by hand, in its own precision or (DeepSeek, GLM, Ernie) in f32."""
    modules, seeing = modules_of(name, dtype), seen(name, dtype)
    for number, (site, (_, state)) in enumerate(zip(modules.sites, seeing.norms, strict=True)):
        recorded = torch.from_numpy(seeing.rows.logits[:, number])
        assert any(torch.equal(each, recorded) for each in by_hand(site.gate, state.reshape(TOKENS, -1)))


def by_hand(gate: nn.Module, state: Tensor) -> list[Tensor]:
    matrix, offset = gate.get_parameter("wg.weight" if hasattr(gate, "wg") else "weight"), getattr(gate, "bias", None)
    parts = (state, matrix) if offset is None else (state, matrix, offset)
    with torch.inference_mode():
        return [
            nn.functional.linear(*(part.to(each) for part in parts)).float() for each in (matrix.dtype, torch.float32)
        ]


def the_experts_run_are_the_recorded_ones_with_the_recorded_weights(name: str, dtype: str) -> None:
    seeing = seen(name, dtype)
    for number, (_, ids, weights, *_) in enumerate(seeing.executed):
        order = np.argsort(ids.numpy(), axis=1, kind="stable")
        ours = np.argsort(seeing.rows.chosen[:, number], axis=1, kind="stable")
        for model, recorded in ((ids, seeing.rows.chosen), (weights.float(), seeing.rows.weights)):
            expected = np.take_along_axis(model.numpy(), order, 1)
            assert (np.take_along_axis(recorded[:, number], ours, 1) == expected).all()


def the_rule_makes_every_choice_in_rank_order(name: str, dtype: str) -> None:
    """In fp32 row for row; in bf16 two equal logits may change places or, at rank k, sets."""
    modules, rows = modules_of(name, dtype), seen(name, dtype).rows
    scores = routers.choice_scores(modules.geometry.router, rows.logits, modules.bias)
    differing = (routers.choose(scores, modules.geometry.k) != rows.chosen).any(-1)
    assert differing.sum() == 0 or dtype == "bf16"
    best, recorded = (
        np.take_along_axis(scores, ids.astype(int), -1)
        for ids in (routers.choose(scores, modules.geometry.k), rows.chosen)
    )
    np.testing.assert_allclose(recorded, best, rtol=1e-6)


def lookahead_is_the_target_gate_on_the_target_norm_of_this_residual(name: str, dtype: str) -> None:
    """Called as modules, outside any watching."""
    modules, seeing = modules_of(name, dtype), seen(name, dtype)
    layers = len(modules.sites)
    for number, distance in ((n, d) for n in range(layers) for d in range(1, DEPTH + 1)):
        recorded = torch.from_numpy(seeing.rows.lookahead[distance - 1][:, number])
        if number + distance >= layers:
            assert not recorded.any()
            continue
        target = modules.sites[number + distance]
        with torch.inference_mode():
            state = target.norm(seeing.norms[number][0])
            expected = target.gate(state, *target.extra)[target.index]
        assert torch.equal(recorded, expected.reshape(TOKENS, -1).float())


def generated_rows_are_those_of_the_same_tokens_stepped(name: str, dtype: str) -> None:
    """The prompt in one pass, then token by token with the cache: the path that generate() takes."""
    modules, prompt = modules_of(name, dtype), some_ids(10, seed=3)
    model: Any = modules.model
    with torch.inference_mode(), Capture(modules, 1) as capture:
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False)
        generated = capture.take()
        cache = stepped(model, tokens[:, :10], 0, None)
        for at in range(10, 10 + NEW - 1):
            cache = stepped(model, tokens[:, at : at + 1], at, cache)
        again = capture.take()
    assert len(generated.chosen) == 10 + NEW - 1
    for ours, theirs in zip((*generated[:3], *generated.lookahead), (*again[:3], *again.lookahead), strict=True):
        assert (ours == theirs).all()


def stepped(model: transformers.PreTrainedModel, ids: Tensor, at: int, cache: Any) -> Any:
    """The positions as generate() gives them: MiniMax counts from 0 again without them."""
    positions = torch.arange(at, at + ids.shape[1])[None]
    return model(ids, position_ids=positions, past_key_values=cache, use_cache=True).past_key_values


def sizes_add_up_to_the_model(name: str, dtype: str) -> None:
    """dense_params is an average over MoE layers and rounds down; the embedding is neither expert, dense nor head."""
    modules = modules_of(name, dtype)
    sizes, model = modules.geometry, modules.model
    assert sizes.expert_params and sizes.dense_params and sizes.head_params
    per_layer = sizes.experts * sizes.expert_params + sizes.dense_params
    embedding = sum(each.numel() for each in model.get_input_embeddings().parameters())
    total = sizes.layers * per_layer + sizes.head_params + embedding
    assert 0 <= sum(each.numel() for each in model.parameters()) - total < sizes.layers
    assert sizes.expert_bits == (32 if dtype == "fp32" else 16)
    assert set(sizes.expert_bytes) == {sizes.expert_params * int(sizes.expert_bits) // 8}


def test_a_tied_embedding_is_the_head() -> None:
    """96 tokens of width 32, and the last norm."""
    assert discover(tiny_model("olmoe", tie_word_embeddings=True)).geometry.head_params == 96 * 32 + 32


def layers_without_experts_are_not_sites(name: str, dtype: str) -> None:
    modules = modules_of(name, dtype)
    gates = [path for path, module in modules.model.named_modules() if isinstance(module, type(modules.sites[0].gate))]
    assert [site.layer for site in modules.sites] == [int(path.split(".")[2]) for path in gates]
    assert modules.geometry.layers == len(gates) >= 2


def sigmoid_routers_and_ernie_have_their_bias(name: str, dtype: str) -> None:
    modules = modules_of(name, dtype)
    biased = modules.geometry.router.family == "sigmoid_groups" or name == "ernie4_5_moe"
    assert (modules.bias is not None) == biased
    assert modules.bias is None or modules.bias.any(axis=1).all()


CLAUSES = (
    the_self_check_passes,
    watching_changes_no_bit_of_the_output,
    recorded_logits_are_those_the_model_declares,
    recorded_logits_are_the_gate_on_the_normed_residual,
    the_experts_run_are_the_recorded_ones_with_the_recorded_weights,
    the_rule_makes_every_choice_in_rank_order,
    lookahead_is_the_target_gate_on_the_target_norm_of_this_residual,
    generated_rows_are_those_of_the_same_tokens_stepped,
    sizes_add_up_to_the_model,
    layers_without_experts_are_not_sites,
    sigmoid_routers_and_ernie_have_their_bias,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_family_keeps_every_clause(name: str, subtests: pytest.Subtests) -> None:
    for dtype, clause in product(DTYPES, CLAUSES):
        with subtests.test(clause=clause.__name__, dtype=dtype):
            clause(name, dtype)
