"""Qwen3.5-MoE, its language model: softmax over all experts, top k always renormalised, a gated shared expert."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
SIZES = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "head_dim": 16}
#: 2 layers with linear attention and 1 with full attention, of 16 experts, top 4, and a shared one.
TINY = small(**LINEAR, **SIZES, num_experts=16, num_experts_per_tok=4)

FAMILY = Family(
    "qwen3_5_moe",
    ("qwen3_5_moe_text",),
    rules.renormalised_top_k,
    TINY,
    source="transformers 5.23, models/qwen3_5_moe",
    shared=lambda config: 1,
)
