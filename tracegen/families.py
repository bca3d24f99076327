"""Families of MoE models, a table: the routing rule of each, and a tiny config to prove it on.

To add a family, add a row; the contract suite (`tests/tracegen/test_families.py`) then compares hooks, look-ahead and
routing rule with the model's own gates. Many families need none: a rule inferred from the config is used if it
reproduces the gates (below).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor

from moereplay.tracegen.errors import RecordError
from moereplay.traces.routers import choice_scores, choose, scores, weigh
from moereplay.traces.schema import Router


@dataclass(frozen=True)
class Family:
    """Models with the same routing rule; `router` and `shared` read a transformers config."""

    model_type: str  #: of the configs of the language models that hold the gates
    router: Callable[[Any], Router]
    keys: Mapping[str, Any]  #: of a tiny config, besides those of `small`; random weights take milliseconds to run
    source: str  #: where the routing is described
    shared: Callable[[Any], int] = lambda config: 0  #: shared experts per MoE layer
    name: str = ""  #: the model type if empty

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.model_type)

    def tiny(self) -> transformers.PreTrainedConfig:
        """Return a new tiny config. Only here must the installed transformers have the model."""
        return transformers.AutoConfig.for_model(self.model_type, **small(**self.keys))


def small(**keys: Any) -> dict[str, Any]:
    """Return config keys of a model of a few hundred KB: those that all families share, and the given ones."""
    shared = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        # Wide enough for logits of random weights to differ by more than rounding
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": None,
        # A padding token would embed as zeros, and zeros tie every expert
        "pad_token_id": None,
    }
    return shared | keys


# -- Routing rules, read from the keys by which configs state them


def softmax_top_k(config: Any) -> Router:
    """Return softmax over all experts; the k best probabilities, renormalised if `norm_topk_prob`."""
    return Router(family="softmax_topk", renormalise=bool(config.norm_topk_prob))


def renormalised_top_k(config: Any) -> Router:
    """Return softmax over all experts; the k best probabilities are renormalised, regardless of the config."""
    return Router(family="softmax_topk", renormalise=True)


def plain_top_k(config: Any) -> Router:
    """Return softmax over all experts; the k best probabilities are not renormalised, regardless of the config."""
    return Router(family="softmax_topk")


def softmax_of_the_chosen(config: Any) -> Router:
    """Return the k best logits; softmax over these alone."""
    return Router(family="topk_softmax")


def softmax_in_groups(config: Any) -> Router:
    """Return DeepSeek-V2's rule: softmax over all experts, top k in the best groups; scaled, not renormalised.

    The Lite model is greedy: it has no groups. transformers ignores `norm_topk_prob` here.
    """
    if config.topk_method == "greedy":
        return Router(family="softmax_groups", scale=config.routed_scaling_factor)
    groups, kept = config.n_group or 1, config.topk_group or 1
    return Router(family="softmax_groups", scale=config.routed_scaling_factor, groups=groups, groups_kept=kept)


def sigmoid_in_groups(config: Any) -> Router:
    """Return DeepSeek-V3's rule: sigmoid plus correction bias in the best groups; sigmoids renormalised and scaled."""
    return Router(
        family="sigmoid_groups",
        renormalise=bool(config.norm_topk_prob),
        scale=config.routed_scaling_factor,
        groups=config.n_group or 1,
        groups_kept=config.topk_group or 1,
    )


def renormalised_sigmoid(config: Any) -> Router:
    """Return sigmoid plus a correction bias; renormalised, without groups or scale."""
    return Router(family="sigmoid_groups", renormalise=True)


def sparse_mixer(config: Any) -> Router:
    """Return two experts picked in turn, regardless of the config's top k.

    The band around each pick (`router_jitter_noise`) is part of the model in evaluation mode too.
    """
    return Router(family="sparsemixer", jitter=config.router_jitter_noise)


def one_shared(config: Any) -> int:
    """Return 1: every MoE layer has a shared expert."""
    return 1


def listed_shared(config: Any) -> int:
    """Return the shared experts that `n_shared_experts` states."""
    return config.n_shared_experts or 0


def one_if_wide(config: Any) -> int:
    """Return 1 if the shared expert of a Granite model has a width."""
    return int(config.shared_intermediate_size > 0)


# -- Parts of tiny configs that several families share

LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4}
LOCAL = {"num_local_experts": 16, "num_experts_per_tok": 4}
FOUR_OF_16 = {"n_routed_experts": 16, "num_experts_per_tok": 4}
WIDE = {"intermediate_size": 48, "moe_intermediate_size": 16}
NARROW = {"intermediate_size": 16}
HEADS = {"head_dim": 16}
GROUPS = {"n_group": 4, "topk_group": 2}
DEEPSEEK = FOUR_OF_16 | WIDE | {"first_k_dense_replace": 1}
ROTARY = {"rope_theta": 10000.0, "rope_type": "default"}
TWO_LINEAR = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
QWEN_LINEAR = TWO_LINEAR | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}

FAMILIES: tuple[Family, ...] = (
    # OLMoE; published checkpoints do not renormalise. 3 layers of 16 experts, top 4.
    Family("olmoe", softmax_top_k, NARROW | EXPERTS, "arXiv 2409.02060"),
    # Mixtral; gate weights stay in f32 for any dtype of the model. 3 layers of 8 experts, top 2.
    Family(
        "mixtral",
        renormalised_top_k,
        {"intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2},
        "arXiv 2401.04088",
    ),
    # Qwen1.5-MoE and Qwen2-57B; one wide shared expert with a gate of its own. The first layer is dense.
    Family(
        "qwen2_moe",
        softmax_top_k,
        WIDE
        | {"shared_expert_intermediate_size": 32, "num_experts": 12, "num_experts_per_tok": 4, "mlp_only_layers": [0]},
        "arXiv 2407.10671",
        one_shared,
    ),
    # Phi-3.5-MoE; a wide band, so that some tokens have rivals within it. 3 layers of 8 experts, top 2.
    Family(
        "phimoe",
        sparse_mixer,
        {"intermediate_size": 24, "num_local_experts": 8, "router_jitter_noise": 0.1},
        "arXiv 2404.14219; 2409.12136",
    ),
    # DeepSeek-V2. A dense layer and 2 of 16 experts in 4 groups, top 4 in 2 groups.
    Family(
        "deepseek_v2",
        softmax_in_groups,
        LATENT
        | DEEPSEEK
        | GROUPS
        | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0, "n_shared_experts": 2, "head_dim": 8},
        "arXiv 2405.04434",
        listed_shared,
    ),
    # DeepSeek-V3, R1 and Kimi K2. A dense layer and 2 of 16 experts in 4 groups, top 4 in 2 groups.
    Family(
        "deepseek_v3",
        sigmoid_in_groups,
        LATENT | DEEPSEEK | GROUPS | {"n_shared_experts": 1},
        "arXiv 2412.19437",
        listed_shared,
    ),
    # Qwen3-MoE; published checkpoints renormalise, the default does not. 3 layers of 16 experts, top 4.
    Family("qwen3_moe", softmax_top_k, WIDE | HEADS | EXPERTS | {"norm_topk_prob": True}, "arXiv 2505.09388"),
    # gpt-oss; its gate and its experts have biases. 3 layers of 16 experts, top 4.
    Family(
        "gpt_oss",
        softmax_of_the_chosen,
        NARROW | HEADS | LOCAL | {"sliding_window": 8, "rope_parameters": ROTARY},
        "arXiv 2508.10925",
    ),
    # GLM-4.5; DeepSeek-V3's router with ordinary attention. A dense layer and 2 of 16 experts, top 4 in 2 of 4 groups.
    Family(
        "glm4_moe",
        sigmoid_in_groups,
        DEEPSEEK | HEADS | GROUPS | {"n_shared_experts": 1, "routed_scaling_factor": 2.5},
        "arXiv 2508.06471",
        listed_shared,
    ),
    # Granite 3 MoE. 3 layers of 16 experts, top 4.
    Family("granitemoe", softmax_of_the_chosen, NARROW | LOCAL, "transformers 5.23, models/granitemoe"),
    # ERNIE 4.5; softmax in f32, a correction bias that only chooses. A dense layer and 2 of 16 experts, 2 shared.
    Family(
        "ernie4_5_moe",
        renormalised_top_k,
        WIDE
        | {
            "moe_num_experts": 16,
            "moe_k": 4,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "tie_word_embeddings": False,
        },
        "transformers 5.23, models/ernie4_5_moe",
        lambda config: config.moe_num_shared_experts or 0,
    ),
    # Qwen3-Next; a gated shared expert. 2 layers with linear attention and 1 with full attention.
    Family(
        "qwen3_next",
        softmax_top_k,
        QWEN_LINEAR | HEADS | EXPERTS | {"norm_topk_prob": True},
        "transformers 5.23, models/qwen3_next",
        one_shared,
    ),
    # DeepSeek-V3.2; V3's router with sparse attention, which sees 8 tokens here.
    Family(
        "deepseek_v32",
        sigmoid_in_groups,
        LATENT | DEEPSEEK | GROUPS | {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2, "head_dim": 8},
        "arXiv 2512.02556",
        listed_shared,
    ),
    # dots.llm1; DeepSeek-V3's router with ordinary attention, by default without groups; here 2, of which 1 is kept.
    Family(
        "dots1",
        sigmoid_in_groups,
        DEEPSEEK
        | {
            "n_shared_experts": 2,
            "sliding_window": None,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        "arXiv 2506.05767",
        listed_shared,
    ),
    # GLM-4.7-Flash; DeepSeek-V3's router and latent attention.
    Family(
        "glm4_moe_lite",
        sigmoid_in_groups,
        LATENT | FOUR_OF_16 | WIDE | GROUPS,
        "transformers 5.23, models/glm4_moe_lite",
        listed_shared,
    ),
    # Granite 4; Granite's router and a shared expert. 2 layers with Mamba-2 and 1 with attention.
    Family(
        "granitemoehybrid",
        softmax_of_the_chosen,
        NARROW
        | LOCAL
        | {
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
            "shared_intermediate_size": 16,
            "layer_types": ["mamba", "mamba", "attention"],
        },
        "transformers 5.23, models/granitemoehybrid",
        one_if_wide,
    ),
    # Granite MoE with a shared expert. 3 layers of 16 experts, top 4.
    Family(
        "granitemoeshared",
        softmax_of_the_chosen,
        NARROW | LOCAL | {"shared_intermediate_size": 16},
        "transformers 5.23, models/granitemoeshared",
        one_if_wide,
    ),
    # Hunyuan-A13B; one shared expert. 3 layers of 16 experts, top 4.
    Family(
        "hunyuan_v1_moe",
        renormalised_top_k,
        NARROW | HEADS | {"num_experts": 16, "moe_topk": 4},
        "transformers 5.23, models/hunyuan_v1_moe",
        one_shared,
    ),
    # Jamba; experts in every other layer, most layers are Mamba. 4 layers, attention in the second.
    Family(
        "jamba",
        plain_top_k,
        NARROW
        | {
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        "arXiv 2403.19887",
    ),
    # Kimi Linear; DeepSeek-V3's router, three layers in four have linear attention. (Kimi K2 is a `deepseek_v3`.)
    Family(
        "kimi_linear",
        sigmoid_in_groups,
        TWO_LINEAR
        | WIDE
        | LOCAL
        | GROUPS
        | {
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "linear_head_dim": 16,
            "linear_num_heads": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        "arXiv 2510.26692",
        listed_shared,
    ),
    # MiniMax-Text-01; Mixtral's router. 2 layers with lightning attention and 1 with full attention.
    Family(
        "minimax",
        renormalised_top_k,
        TWO_LINEAR
        | HEADS
        | {"intermediate_size": 24, "block_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
        "arXiv 2501.08313",
    ),
    # MiniMax-M2; the block hands the correction bias to its gate. 3 layers of 16 experts, top 4.
    Family(
        "minimax_m2",
        renormalised_sigmoid,
        NARROW | HEADS | LOCAL | {"rope_parameters": ROTARY | {"partial_rotary_factor": 0.5}},
        "transformers 5.23, models/minimax_m2",
    ),
    # Nemotron 3; DeepSeek-V3's router, experts without a gate projection. A layer is Mamba-2, attention or experts.
    Family(
        "nemotron_h",
        sigmoid_in_groups,
        FOUR_OF_16
        | WIDE
        | HEADS
        | {
            "num_hidden_layers": 4,
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "chunk_size": 8,
            "n_group": 2,
            "topk_group": 1,
            "moe_shared_expert_intermediate_size": 16,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
        },
        "transformers 5.23, models/nemotron_h",
        listed_shared,
    ),
    # Qwen3.5-MoE, its language model; a gated shared expert, linear attention in two layers of three here.
    Family(
        "qwen3_5_moe_text",
        renormalised_top_k,
        QWEN_LINEAR | HEADS | EXPERTS,
        "transformers 5.23, models/qwen3_5_moe",
        one_shared,
        name="qwen3_5_moe",
    ),
)


def family_of(model_type: str) -> Family | None:
    """Return the family of a config's `model_type`, or None if the table has none."""
    return next((family for family in FAMILIES if model_type == family.model_type), None)


# -- The routing rule of a model: stated by its row, or inferred from its config. A rule that was inferred is used only
# -- if it reproduces the choice and the weights of every gate in a probe run.


#: Config keys by which models state the factor on gate weights.
SCALE_KEYS = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
#: Config keys by which models state the number of shared experts.
SHARED_KEYS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


class Routing(NamedTuple):
    """A model's routing rule and its family."""

    family: str
    router: Router
    shared: int  #: shared experts per MoE layer


def routing_of(config: Any, outputs: list[tuple[Tensor, Tensor, Tensor]], bias: np.ndarray | None) -> Routing:
    """The rule of the gates that gave these (logits, weights, ids), one entry per layer; `bias` is (L, E) or None.

    Raises RecordError, naming the family and the nearest rule, if no row of the table and no inferred rule holds.
    """
    family = family_of(config.model_type)
    if family is not None:
        return Routing(family.name, family.router(config), family.shared(config))
    return Routing(f"{config.model_type} (inferred)", _inferred(config, outputs, bias), _shared(config))


def _inferred(config: Any, outputs: list[tuple[Tensor, Tensor, Tensor]], bias: np.ndarray | None) -> Router:
    tried: list[tuple[Router, Agreement]] = []
    for router in candidates(config, bias is not None):
        found = _agreement(router, outputs, bias)
        if found.holds:
            return router
        tried.append((router, found))
    nearest, found = min(tried, key=lambda each: (each[1].wrong, each[1].ulps))
    what = f"weights are {found.ulps} units in the last place off those" if not found.wrong else "choice is not that"
    raise RecordError(
        f"unknown family {config.model_type}: its gates' {what} of the nearest rule ({spelled(nearest)}), "
        f"{found.wrong} of {found.rows} rows choose differently; add its rule to tracegen/families.py"
    )


def candidates(config: Any, biased: bool) -> Iterator[Router]:
    """Yield rules that a config's usual keys allow, likeliest first; keys that it lacks are tried both ways."""
    scale = next((float(value) for key in SCALE_KEYS if (value := getattr(config, key, None))), 1.0)
    groups, kept = (int(getattr(config, key, None) or 1) for key in ("n_group", "topk_group"))
    stated = getattr(config, "norm_topk_prob", None)
    renormalise = (bool(stated), not stated) if stated is not None else (True, False)
    families_ = ("sigmoid_groups", "softmax_topk") if biased else ("softmax_topk", "sigmoid_groups")
    for family, renormalised, factor in product(families_, renormalise, dict.fromkeys((scale, 1.0))):
        limits = {"groups": groups, "groups_kept": kept} if family == "sigmoid_groups" else {}
        yield Router.model_validate({"family": family, "renormalise": renormalised, "scale": factor, **limits})
    if groups > 1:
        yield Router(family="softmax_groups", groups=groups, groups_kept=kept, scale=scale)
    yield Router(family="topk_softmax")


def spelled(router: Router) -> str:
    """Return a rule in one line: its family and what differs from the defaults."""
    constants = router.model_dump(exclude={"family"}, exclude_defaults=True)
    return ", ".join([router.family, *(f"{key} {value}" for key, value in constants.items())])


def _agreement(router: Router, outputs: list[tuple[Tensor, Tensor, Tensor]], bias: np.ndarray | None) -> Agreement:
    """Compare all layers together."""
    found = [agree(router, None if bias is None else bias[at], *output) for at, output in enumerate(outputs)]
    rows, wrong, ties, ulps, bound = zip(*found, strict=True)
    return Agreement(sum(rows), sum(wrong), sum(ties), max(ulps), bound[0])


def _shared(config: Any) -> int:
    if getattr(config, "shared_expert_intermediate_size", None):
        return 1
    return next((int(count) for key in SHARED_KEYS if (count := getattr(config, key, None))), 0)


# -- Do a gate's choice and weights follow from its logits by `traces/routers.py`? Row by row, in numbers.

TIE_ULPS = 4
#: Of the model's dtype: in f32 the rounding of exp, of sums of many, of a division; in half precision the last cast.
MAX_ULPS = {torch.float32: 16, torch.float16: 2, torch.bfloat16: 2}
#: An expert this close (relative) to the edge of SparseMixer's band may fall on either side: models divide in bf16.
BAND_EDGE = 2.0**-7


class Agreement(NamedTuple):
    """Result of a comparison of T rows."""

    rows: int
    wrong: int  #: rows whose choice the rule does not make, ties aside
    ties: int  #: rows whose choice is the rule's but for a tie
    ulps: int  #: the largest difference of a weight, in units in the last place of the model's dtype
    bound: int  #: of `ulps`

    @property
    def holds(self) -> bool:
        """True if the gate routes by the rule."""
        return not self.wrong and self.ulps <= self.bound


def agree(router: Router, bias: np.ndarray | None, logits: Tensor, weights: Tensor, ids: Tensor) -> Agreement:
    """Compare logits (T, E), weights (T, k) and ids (T, k) of a gate with the rule; `bias` is (E,) or None.

    Raises TraceError if the router's groups do not divide the experts.
    """
    rows, chosen = logits.float().cpu().numpy(), ids.cpu().numpy()
    differs = _differs(choice_scores(router, rows, bias), chosen)
    wrong = differs & _differs(_lifted(router, rows, bias, chosen), chosen)
    ulps = _ulps(router, rows, weights.cpu(), chosen)
    return Agreement(len(rows), int(wrong.sum()), int((differs & ~wrong).sum()), ulps, MAX_ULPS[weights.dtype])


def _differs(choice: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return (T,) True where the best by choice score are not the chosen set."""
    best = choose(choice, chosen.shape[-1])
    return (np.sort(best, -1) != np.sort(chosen, -1)).any(-1)


def _lifted(router: Router, logits: np.ndarray, bias: np.ndarray | None, chosen: np.ndarray) -> np.ndarray:
    """Return the choice scores, with those of chosen experts raised by TIE_ULPS units in the last place."""
    bare = router.family in ("topk_softmax", "sparsemixer")
    ranked = logits if bare else scores(router, logits, bias)
    lift = np.zeros_like(ranked)
    np.put_along_axis(lift, chosen, TIE_ULPS * np.spacing(np.abs(np.take_along_axis(ranked, chosen, -1))), -1)
    if bare:
        return choice_scores(router, logits + lift)
    return choice_scores(router, logits, lift if bias is None else bias + lift)


def _ulps(router: Router, logits: np.ndarray, weights: Tensor, chosen: np.ndarray) -> int:
    edges = (1 - BAND_EDGE, 1, 1 + BAND_EDGE) if router.family == "sparsemixer" else (1,)
    rules = [router.model_copy(update={"jitter": router.jitter * edge}) for edge in edges]
    distances = [_distance(torch.from_numpy(weigh(rule, logits, chosen)).to(weights.dtype), weights) for rule in rules]
    return int(torch.stack(distances).amin(0).max())


def _distance(left: Tensor, right: Tensor) -> Tensor:
    """Return steps between two tensors of one float dtype, counted in representable numbers."""
    return (_ordinal(left) - _ordinal(right)).abs()


def _ordinal(values: Tensor) -> Tensor:
    """Return integers in the order of the floats: the bits, mirrored for negative numbers."""
    width = {2: torch.int16, 4: torch.int32}[values.element_size()]
    bits = values.contiguous().view(width).long()
    return torch.where(bits < 0, torch.iinfo(width).min - bits, bits)
