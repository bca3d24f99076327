"""DeepSeek-V3 and R1: sigmoid, a correction bias that only chooses, groups ranked by the sum of their two best."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

ATTENTION = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
#: A dense layer and 2 of 16 experts in 4 groups, top 4 in 2 groups.
TINY = small(**ATTENTION, **EXPERTS, n_group=4, topk_group=2, intermediate_size=48, moe_intermediate_size=16)

FAMILY = Family(
    "deepseek_v3",
    ("deepseek_v3",),
    rules.sigmoid_in_groups,
    TINY,
    source="arXiv 2412.19437",
    shared=lambda config: config.n_shared_experts or 0,
)
