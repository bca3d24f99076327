"""Families of MoE models, a table: the routing rule of each, and a tiny config to prove it on.

To add a family, add a row; the contract suite (`tests/tracegen/test_families.py`) then compares hooks, look-ahead and
routing rule with the model's own gates. Many families need none: a rule inferred from the config is used if it
reproduces the gates (`tracegen/routing.py`).
"""

from __future__ import annotations

from moereplay.tracegen.family import (
    Family,
    listed_shared,
    one_if_wide,
    plain_top_k,
    renormalised_sigmoid,
    renormalised_top_k,
    sigmoid_in_groups,
    small,
    softmax_in_groups,
    softmax_of_the_chosen,
    softmax_top_k,
    sparse_mixer,
)

# -- Parts of tiny configs that several families share

LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
FOUR_OF_16 = {"n_routed_experts": 16, "num_experts_per_tok": 4}
WIDE = {"intermediate_size": 48, "moe_intermediate_size": 16}
ONE_DENSE = {"first_k_dense_replace": 1}
ROTARY = {"rope_theta": 10000.0, "rope_type": "default"}
TWO_LINEAR = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
QWEN_LINEAR = TWO_LINEAR | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

FAMILIES: tuple[Family, ...] = (
    # OLMoE; published checkpoints do not renormalise. 3 layers of 16 experts, top 4.
    Family(
        ("olmoe",),
        softmax_top_k,
        small(intermediate_size=16, num_experts=16, num_experts_per_tok=4),
        source="arXiv 2409.02060",
    ),
    # Mixtral; gate weights stay in f32 for any dtype of the model. 3 layers of 8 experts, top 2.
    Family(
        ("mixtral",),
        renormalised_top_k,
        small(intermediate_size=24, num_local_experts=8, num_experts_per_tok=2),
        source="arXiv 2401.04088",
    ),
    # Qwen1.5-MoE and Qwen2-57B; one wide shared expert with a gate of its own. The first layer is dense.
    Family(
        ("qwen2_moe",),
        softmax_top_k,
        small(**WIDE, shared_expert_intermediate_size=32, num_experts=12, num_experts_per_tok=4, mlp_only_layers=[0]),
        source="arXiv 2407.10671",
        shared=lambda config: 1,
    ),
    # Phi-3.5-MoE; a wide band, so that some tokens have rivals within it. 3 layers of 8 experts, top 2.
    Family(
        ("phimoe",),
        sparse_mixer,
        small(intermediate_size=24, num_local_experts=8, router_jitter_noise=0.1),
        source="arXiv 2404.14219; 2409.12136",
    ),
    # DeepSeek-V2. A dense layer and 2 of 16 experts in 4 groups, top 4 in 2 groups.
    Family(
        ("deepseek_v2",),
        softmax_in_groups,
        small(
            **(LATENT | FOUR_OF_16 | ONE_DENSE | WIDE),
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.0,
            n_shared_experts=2,
            head_dim=8,
        ),
        source="arXiv 2405.04434",
        shared=listed_shared,
    ),
    # DeepSeek-V3, R1 and Kimi K2. A dense layer and 2 of 16 experts in 4 groups, top 4 in 2 groups.
    Family(
        ("deepseek_v3",),
        sigmoid_in_groups,
        small(**(LATENT | FOUR_OF_16 | ONE_DENSE | WIDE), n_shared_experts=1, n_group=4, topk_group=2),
        source="arXiv 2412.19437",
        shared=listed_shared,
    ),
    # Qwen3-MoE; published checkpoints renormalise, the default does not. 3 layers of 16 experts, top 4.
    Family(
        ("qwen3_moe",),
        softmax_top_k,
        small(**WIDE, head_dim=16, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True),
        source="arXiv 2505.09388",
    ),
    # gpt-oss; its gate and its experts have biases. 3 layers of 16 experts, top 4.
    Family(
        ("gpt_oss",),
        softmax_of_the_chosen,
        small(
            intermediate_size=16,
            head_dim=16,
            sliding_window=8,
            num_local_experts=16,
            num_experts_per_tok=4,
            rope_parameters=ROTARY,
        ),
        source="arXiv 2508.10925",
    ),
    # GLM-4.5; DeepSeek-V3's router with ordinary attention. A dense layer and 2 of 16 experts, top 4 in 2 of 4 groups.
    Family(
        ("glm4_moe",),
        sigmoid_in_groups,
        small(
            **(FOUR_OF_16 | ONE_DENSE | WIDE),
            n_shared_experts=1,
            head_dim=16,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
        ),
        source="arXiv 2508.06471",
        shared=listed_shared,
    ),
    # Granite 3 MoE. 3 layers of 16 experts, top 4.
    Family(
        ("granitemoe",),
        softmax_of_the_chosen,
        small(intermediate_size=16, num_local_experts=16, num_experts_per_tok=4),
        source="transformers 5.23, models/granitemoe",
    ),
    # ERNIE 4.5; softmax in f32, a correction bias that only chooses. A dense layer and 2 of 16 experts, 2 shared.
    Family(
        ("ernie4_5_moe",),
        renormalised_top_k,
        small(
            **WIDE,
            moe_num_experts=16,
            moe_k=4,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            tie_word_embeddings=False,
        ),
        source="transformers 5.23, models/ernie4_5_moe",
        shared=lambda config: config.moe_num_shared_experts or 0,
    ),
    # Qwen3-Next; a gated shared expert. 2 layers with linear attention and 1 with full attention.
    Family(
        ("qwen3_next",),
        softmax_top_k,
        small(
            **QWEN_LINEAR,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            head_dim=16,
            num_experts=16,
            num_experts_per_tok=4,
            norm_topk_prob=True,
        ),
        source="transformers 5.23, models/qwen3_next",
        shared=lambda config: 1,
    ),
    # DeepSeek-V3.2; V3's router with sparse attention, which sees 8 tokens here.
    Family(
        ("deepseek_v32",),
        sigmoid_in_groups,
        small(
            **(LATENT | FOUR_OF_16 | ONE_DENSE | WIDE),
            index_topk=8,
            index_head_dim=16,
            index_n_heads=2,
            head_dim=8,
            n_group=4,
            topk_group=2,
        ),
        source="arXiv 2512.02556",
        shared=listed_shared,
    ),
    # dots.llm1; DeepSeek-V3's router with ordinary attention, by default without groups; here 2, of which 1 is kept.
    Family(
        ("dots1",),
        sigmoid_in_groups,
        small(
            **(FOUR_OF_16 | ONE_DENSE | WIDE),
            n_shared_experts=2,
            sliding_window=None,
            n_group=2,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        ),
        source="arXiv 2506.05767",
        shared=listed_shared,
    ),
    # GLM-4.7-Flash; DeepSeek-V3's router and latent attention.
    Family(
        ("glm4_moe_lite",),
        sigmoid_in_groups,
        small(**(LATENT | FOUR_OF_16 | WIDE), n_group=4, topk_group=2),
        source="transformers 5.23, models/glm4_moe_lite",
        shared=listed_shared,
    ),
    # Granite 4; Granite's router and a shared expert. 2 layers with Mamba-2 and 1 with attention.
    Family(
        ("granitemoehybrid",),
        softmax_of_the_chosen,
        small(
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=8,
            mamba_n_groups=1,
            mamba_chunk_size=8,
            num_local_experts=16,
            num_experts_per_tok=4,
            shared_intermediate_size=16,
            intermediate_size=16,
            layer_types=["mamba", "mamba", "attention"],
        ),
        source="transformers 5.23, models/granitemoehybrid",
        shared=one_if_wide,
    ),
    # Granite MoE with a shared expert. 3 layers of 16 experts, top 4.
    Family(
        ("granitemoeshared",),
        softmax_of_the_chosen,
        small(intermediate_size=16, shared_intermediate_size=16, num_local_experts=16, num_experts_per_tok=4),
        source="transformers 5.23, models/granitemoeshared",
        shared=one_if_wide,
    ),
    # Hunyuan-A13B; one shared expert. 3 layers of 16 experts, top 4.
    Family(
        ("hunyuan_v1_moe",),
        renormalised_top_k,
        small(intermediate_size=16, head_dim=16, num_experts=16, moe_topk=4),
        source="transformers 5.23, models/hunyuan_v1_moe",
        shared=lambda config: 1,
    ),
    # Jamba; experts in every other layer, most layers are Mamba. 4 layers, attention in the second.
    Family(
        ("jamba",),
        plain_top_k,
        small(
            num_hidden_layers=4,
            attn_layer_period=4,
            attn_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=4,
            intermediate_size=16,
            num_experts=8,
            num_experts_per_tok=2,
        ),
        source="arXiv 2403.19887",
    ),
    # Kimi Linear; DeepSeek-V3's router, three layers in four have linear attention. (Kimi K2 is a `deepseek_v3`.)
    Family(
        ("kimi_linear",),
        sigmoid_in_groups,
        small(
            **(TWO_LINEAR | WIDE),
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=16,
            linear_head_dim=16,
            linear_num_heads=2,
            mlp_layer_types=["dense", "sparse", "sparse"],
            num_local_experts=16,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
        ),
        source="arXiv 2510.26692",
        shared=listed_shared,
    ),
    # MiniMax-Text-01; Mixtral's router. 2 layers with lightning attention and 1 with full attention.
    Family(
        ("minimax",),
        renormalised_top_k,
        small(
            **TWO_LINEAR, intermediate_size=24, head_dim=16, block_size=16, num_local_experts=8, num_experts_per_tok=2
        ),
        source="arXiv 2501.08313",
    ),
    # MiniMax-M2; the block hands the correction bias to its gate. 3 layers of 16 experts, top 4.
    Family(
        ("minimax_m2",),
        renormalised_sigmoid,
        small(
            intermediate_size=16,
            head_dim=16,
            num_local_experts=16,
            num_experts_per_tok=4,
            rope_parameters=ROTARY | {"partial_rotary_factor": 0.5},
        ),
        source="transformers 5.23, models/minimax_m2",
    ),
    # Nemotron 3; DeepSeek-V3's router, experts without a gate projection. A layer is Mamba-2, attention or experts.
    Family(
        ("nemotron_h",),
        sigmoid_in_groups,
        small(
            **(FOUR_OF_16 | WIDE),
            ssm_state_size=8,
            mamba_num_heads=4,
            mamba_head_dim=16,
            n_groups=1,
            chunk_size=8,
            n_group=2,
            topk_group=1,
            moe_shared_expert_intermediate_size=16,
            layers_block_type=["mamba", "moe", "attention", "moe"],
            head_dim=16,
            num_hidden_layers=4,
        ),
        source="transformers 5.23, models/nemotron_h",
        shared=listed_shared,
    ),
    # Qwen3.5-MoE, its language model; a gated shared expert, linear attention in two layers of three here.
    Family(
        ("qwen3_5_moe_text",),
        renormalised_top_k,
        small(
            **QWEN_LINEAR,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            head_dim=16,
            num_experts=16,
            num_experts_per_tok=4,
        ),
        source="transformers 5.23, models/qwen3_5_moe",
        shared=lambda config: 1,
        name="qwen3_5_moe",
    ),
)


def family_of(model_type: str) -> Family | None:
    """Return the family of a config's `model_type`, or None if the table has none."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)
