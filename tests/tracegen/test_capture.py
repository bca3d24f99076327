"""Capture beyond the families' contract: what is kept, what may be replaced, and what is refused, each naming why."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor, nn

from moereplay.tracegen import families
from moereplay.tracegen.capture import Capture, Reading, by_rank, check, watching
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.families import small
from moereplay.tracegen.modules import MoeModules, discover
from moereplay.traces import routers
from moereplay.traces.schema import Router
from tests.kit.every import every
from tests.kit.tiny_models import FAMILIES, random_model, shared_model, some_ids, tiny_model


@pytest.fixture
def modules() -> MoeModules:
    return discover(tiny_model("olmoe"))


def run(modules: MoeModules, count: int, seed: int = 1) -> Tensor:
    with torch.inference_mode():
        return modules.model(some_ids(count, seed)).logits


def hooks_of(modules: MoeModules) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in modules.model.modules())


# What is kept


@pytest.mark.slow
def test_take_joins_the_passes_since_the_last_take(modules: MoeModules) -> None:
    with Capture(modules, 1) as capture:
        run(modules, 5, seed=1)
        run(modules, 3, seed=2)
        both = capture.take()
        run(modules, 3, seed=2)
        again = capture.take()
    assert both.chosen.shape == (8, 3, 4) and both.chosen.dtype == np.int16
    assert both.logits.shape == both.lookahead[0].shape == (8, 3, 16) and both.logits.dtype == np.float32
    for joined, alone in zip((*both[:3], *both.lookahead), (*again[:3], *again.lookahead), strict=True):
        assert (joined[5:] == alone).all()


def test_take_without_a_whole_pass_is_refused(modules: MoeModules) -> None:
    with Capture(modules) as capture:
        with pytest.raises(RecordError, match=r"OlmoeForCausalLM: gates ran on \[0\] tokens"):
            capture.take()
        modules.sites[0].gate(torch.zeros(2, 32))
        with pytest.raises(RecordError, match=r"gates ran on \[0, 2\] tokens"):
            capture.take()


def test_nothing_stays_hooked_even_after_a_failure(modules: MoeModules) -> None:
    before = hooks_of(modules)
    with pytest.raises(RecordError), Capture(modules, 2), torch.inference_mode():
        assert hooks_of(modules) == before + 2 * 3
        modules.model(some_ids(4).repeat(2, 1))
    assert hooks_of(modules) == before


def test_a_look_ahead_deeper_than_the_model_is_zeros(modules: MoeModules) -> None:
    with Capture(modules, 5) as capture:
        run(modules, 4)
    rows = capture.take()
    assert [bool(ahead.any()) for ahead in rows.lookahead] == [True, True, False, False, False]


def test_what_is_kept_is_not_what_the_model_goes_on_with(modules: MoeModules) -> None:
    """A model may go on with its gate's tensors in place."""

    def spoil(gate: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        for part in output:
            part.zero_()

    with Capture(modules) as capture:
        late = modules.sites[0].gate.register_forward_hook(spoil)
        run(modules, 4)
    late.remove()
    rows = capture.take()
    assert rows.logits[:, 0].any() and rows.weights[:, 0].any() and rows.chosen[:, 0].any()


# Replacing


def test_a_replaced_choice_is_what_the_experts_run(modules: MoeModules) -> None:
    given: list[tuple[Tensor, ...]] = []
    modules.sites[1].experts.register_forward_pre_hook(lambda experts, args: given.append(args))
    ids, weights = torch.tensor([[3, 2, 1, 0]] * 4), torch.full((4, 4), 0.25, dtype=torch.float64)

    def on_gate(site: int, reading: Reading) -> tuple[Tensor, Tensor] | None:
        return (ids.int(), weights) if site == 1 else None

    plain = run(modules, 4)
    with watching(modules, 0, on_gate):
        replaced = run(modules, 4)
    assert torch.equal(given[1][1], ids) and given[1][1].dtype == torch.int64
    assert torch.equal(given[1][2], weights.float()) and given[1][2].dtype == torch.float32
    assert not torch.equal(plain, replaced)


def test_handing_the_reading_back_changes_no_bit(modules: MoeModules) -> None:
    plain = run(modules, 6)
    with watching(modules, 0, lambda site, reading: (reading.ids, reading.weights)):
        assert torch.equal(run(modules, 6), plain)


def test_a_replacement_of_another_shape_is_an_error(modules: MoeModules) -> None:
    with (
        watching(modules, 0, lambda site, reading: (reading.ids[:, :2], reading.weights[:, :2])),
        pytest.raises(ValueError, match=r"ids \(3, 2\) and weights \(3, 2\) replace a choice of shape \(3, 4\)"),
    ):
        run(modules, 3)


GRID = st.integers(-24, 24).map(lambda eighths: eighths / 8)
RANKED = {
    "softmax": (Router(), None),
    "softmax with bias": (Router(), np.linspace(0, 0.4, 8, dtype=np.float32)),
    "sigmoid with bias": (Router(family="sigmoid_groups"), np.linspace(0.4, 0, 8, dtype=np.float32)),
    "logits": (Router(family="topk_softmax"), None),
}


@given(
    logits=arrays.arrays(np.float32, (3, 8), elements=GRID),
    name=st.sampled_from(sorted(RANKED)),
    order=st.permutations(range(8)),
)
def test_ranks_follow_the_choice_score_and_ties_stay(logits: np.ndarray, name: str, order: list[int]) -> None:
    router, bias = RANKED[name]
    ids = torch.tensor([order] * 3)
    ranks = by_rank(router, torch.from_numpy(logits), None if bias is None else torch.from_numpy(bias), ids)
    scores = np.take_along_axis(routers.choice_scores(router, logits, bias), ids.gather(-1, ranks).numpy(), -1)
    assert (np.diff(scores, axis=-1) <= np.spacing(np.float32(1))).all()
    for row, places in zip(logits, ranks.tolist(), strict=True):
        same = [(a, b) for a, b in pairwise(places) if row[order[a]] == row[order[b]]]
        assert bias is not None or all(a < b for a, b in same)


# Refusals


def test_a_batch_of_two_is_refused(modules: MoeModules) -> None:
    with pytest.raises(RecordError, match="OlmoeForCausalLM: a batch of 2 runs; record batches of 1"), Capture(modules):
        modules.model(some_ids(4).repeat(2, 1))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "dense": (
        lambda: transformers.LlamaConfig(**small(intermediate_size=48)),
        "LlamaForCausalLM: no MoE layers: LlamaForCausalLM declares no router logits to record",
    ),
    "llama4": (
        lambda: transformers.Llama4TextConfig(**small(intermediate_size=16, intermediate_size_mlp=48, head_dim=16)),
        "layer 0: Llama4Router does not give router logits, weights and ids in that order, one row per token",
    ),
    "jetmoe": (
        lambda: transformers.JetMoeConfig(**small(intermediate_size=16, kv_channels=16, num_local_experts=4)),
        "layer 0 has several gates: expected one",
    ),
    "dbrx": (
        lambda: transformers.DbrxConfig(
            vocab_size=96,
            d_model=32,
            n_heads=2,
            n_layers=2,
            max_seq_len=64,
            attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
            ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        ),
        "DbrxForCausalLM: layer 0",
    ),
    "flex_olmo": (
        lambda: transformers.FlexOlmoConfig(**small(intermediate_size=16, num_experts=8, num_experts_per_tok=2)),
        "layer 0: the input of FlexOlmoSparseMoeBlock is not the output of one norm",
    ),
}


@every("kind", sorted(REFUSED))
def test_models_of_another_shape_are_refused(kind: str) -> None:
    config, why = REFUSED[kind]
    with pytest.raises(RecordError) as refusal:
        discover(random_model(config()))
    assert why in str(refusal.value) and "\n" not in str(refusal.value)


def test_an_encoder_decoder_is_refused() -> None:
    sizes: dict[str, Any] = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 2,
        "num_heads": 2,
        "num_experts": 4,
        "vocab_size": 96,
    }
    model = transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(**sizes)
    ).eval()
    with pytest.raises(RecordError, match="an encoder-decoder"):
        discover(model)


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(RecordError, match=r"is in training mode; call .eval\(\)"):
        discover(tiny_model("mixtral").train())


def test_layers_of_unequal_k_are_refused(modules: MoeModules) -> None:
    setattr(modules.sites[1].gate, "top_k", 3)  # noqa: B010
    with pytest.raises(RecordError, match=r"layers differ in \(experts, k\): \[\(16, 3\), \(16, 4\)\]"):
        discover(modules.model)


def test_offloaded_gates_are_refused(modules: MoeModules) -> None:
    modules.sites[2].gate.to("meta")
    with pytest.raises(RecordError, match=r"layer 2: OlmoeTopKRouter is offloaded"):
        discover(modules.model)


def test_packed_experts_are_refused_and_unpacked_ones_measured() -> None:
    model = tiny_model("olmoe")
    for layer in model.model.layers:
        layer.mlp.experts.register_buffer("scales", torch.ones(16, 3, dtype=torch.bfloat16))
    sizes = discover(model).geometry
    assert set(sizes.expert_bytes) == {3 * 16 * 32 * 4 + 3 * 2}
    model.model.layers[1].mlp.experts.register_buffer("packed", torch.ones(16, 3, dtype=torch.uint8))
    with pytest.raises(RecordError, match=r"MoE layer 1: experts are packed as torch\.uint8; load the checkpoint"):
        discover(model)


def tampered(
    change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], name: str = "olmoe"
) -> MoeModules:
    """A model whose second gate gives something else."""
    found = discover(tiny_model(name))
    gate = found.sites[1].gate
    own = type(gate).forward

    class Tampered(type(gate)):
        def forward(self, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return change(*own(self, *args))

    gate.__class__ = Tampered
    return found


TAMPERED: dict[str, tuple[Any, str]] = {
    "chooses the worst": (
        lambda logits, weights, ids: (logits, weights, logits.topk(4, largest=False).indices),
        "layer 1: 32 of 32 choices are not those of softmax_topk",
    ),
    "weighs otherwise": (
        lambda logits, weights, ids: (logits, weights * 1.001, ids),
        "layer 1: gate weights are up to",
    ),
    "tells probabilities": (
        lambda logits, weights, ids: (logits.softmax(-1), weights, ids),
        "layer 1: the router logits are not the gate's matrix on its input",
    ),
    "tells no numbers": (
        lambda logits, weights, ids: (logits * torch.nan, weights, ids),
        "layer 1: the router logits are not all numbers",
    ),
}


@every("how", sorted(TAMPERED))
def test_a_gate_that_does_something_else_fails_the_self_check(how: str) -> None:
    change, why = TAMPERED[how]
    with pytest.raises(RecordError, match=r"^OlmoeForCausalLM, layer 1: ") as refusal:
        check(tampered(change))
    assert why in str(refusal.value)


def test_experts_that_run_others_than_the_gate_chose_fail_the_self_check(modules: MoeModules) -> None:
    turn = lambda experts, args: (args[0], args[1].flip(0), args[2])  # noqa: E731
    hook = modules.sites[0].experts.register_forward_pre_hook(turn)
    with pytest.raises(RecordError, match="layer 0: the experts run with other ids than the gate gave"):
        check(modules)
    hook.remove()
    check(modules)


def test_a_gate_that_reads_more_than_its_norm_fails_the_self_check(modules: MoeModules) -> None:
    site = modules.sites[2]
    site.norm.forward = MethodType(lambda norm, state: type(norm).forward(norm, state) + 0.5, site.norm)
    with pytest.raises(RecordError, match="layer 2: OlmoeRMSNorm and gate on the residual do not give"):
        check(modules)


# Models of no known family


def test_an_unknown_family_is_inferred_from_its_config_and_proven() -> None:
    """AFMoE (sigmoid, its bias held by the block) has no row in the table."""
    sizes = {"intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 16, "num_dense_layers": 1}
    config = transformers.AfmoeConfig(**small(**sizes, num_experts=8, num_experts_per_tok=2, route_scale=2.5))
    assert families.family_of(config.model_type) is None
    found = discover(random_model(config))
    assert found.geometry.router == Router(family="sigmoid_groups", renormalise=True, scale=2.5)
    assert found.geometry.shared_experts == config.num_shared_experts == 2
    assert check(found).family == "afmoe (inferred)"


@pytest.mark.slow
@every("name", sorted(FAMILIES), apart=True)
def test_inference_finds_the_rule_of_a_known_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its row out of sight. SparseMixer's constant is no usual key, so Phi alone must be refused."""
    known = discover(shared_model(name, torch.float32))
    monkeypatch.setattr(families, "family_of", lambda model_type: None)
    if name == "phimoe":
        with pytest.raises(RecordError, match="unknown family phimoe: its gates' weights are"):
            discover(known.model)
        return
    found = discover(known.model)
    check(found)
    same = weighs_alike(known.geometry.router, found.geometry.router, known.bias)
    assert found.geometry.router == known.geometry.router or same


def weighs_alike(left: Router, right: Router, bias: np.ndarray | None) -> bool:
    """gpt-oss's softmax of the chosen is the same function as a renormalised softmax."""
    logits = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    one = None if bias is None else bias[0]
    choices = [routers.choose(routers.choice_scores(each, logits, one), 4) for each in (left, right)]
    weights = [routers.weigh(each, logits, choices[0]) for each in (left, right)]
    return (choices[0] == choices[1]).all() and np.allclose(*weights, rtol=1e-5)


def test_a_rule_that_cannot_be_inferred_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tampered(TAMPERED["chooses the worst"][0]).model
    monkeypatch.setattr(families, "family_of", lambda model_type: None)
    with pytest.raises(RecordError, match="unknown family olmoe: its gates' choice is not that of the") as refusal:
        discover(model)
    assert "32 of 96 rows choose differently; add its rule to tracegen/families.py" in str(refusal.value)


# The yardstick


def test_agreement_counts_wrong_rows_ties_and_ulps() -> None:
    """Row 0 is right; row 1 takes expert 3 for its equal 2; row 2 takes the worst expert."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 0.0, 2.0, 2.0], [3.0, 2.0, 1.0, 0.0]])
    ids = torch.tensor([[0, 1], [0, 3], [0, 3]])
    router = Router(renormalise=True)
    weights = torch.from_numpy(routers.weigh(router, logits.numpy(), ids.numpy()))
    found = families.agree(router, None, logits, weights, ids)
    assert found[:4] == (3, 1, 1, 0) and not found.holds
    off = torch.nextafter(torch.nextafter(weights, torch.tensor(9.0)), torch.tensor(9.0))
    assert families.agree(router, None, logits[:2], off[:2], ids[:2])[:4] == (2, 0, 1, 2)
    half = weights.bfloat16()
    assert families.agree(router, None, logits[:2], half[:2], ids[:2]).ulps == 0


def test_a_tie_between_groups_is_a_tie() -> None:
    """Groups (0 1), (2 3), (4 5) have equal best pairs; the rule keeps the first two, the model the last two."""
    router = Router(family="sigmoid_groups", groups=3, groups_kept=2)
    logits, ids = torch.tensor([[1.0, 0.0, 0.0, 1.0, 1.0, 0.0]]), torch.tensor([[3, 4]])
    weights = logits.sigmoid().gather(1, ids)
    assert families.agree(router, None, logits, weights, ids)[:3] == (1, 0, 1)
    assert families.agree(router, np.array([0.1, 0, 0, 0, 0, 0], np.float32), logits, weights, ids)[:3] == (1, 1, 0)


def test_a_rule_is_spelled_with_what_differs_from_the_defaults() -> None:
    assert families.spelled(Router(family="sigmoid_groups", scale=2.5)) == "sigmoid_groups, scale 2.5"
