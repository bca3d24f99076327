"""Qwen1.5-MoE and Qwen2-57B: softmax over all experts, top k, one wide shared expert behind a gate of its own."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

SIZES = {"intermediate_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32}
#: 3 layers of 12 experts, top 4, and a shared one; the first layer is dense.
TINY = small(**SIZES, num_experts=12, num_experts_per_tok=4, mlp_only_layers=[0])

FAMILY = Family(
    "qwen2_moe",
    ("qwen2_moe",),
    rules.softmax_top_k,
    TINY,
    source="arXiv 2407.10671",
    shared=lambda config: 1,
)
