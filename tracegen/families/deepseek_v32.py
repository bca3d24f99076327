"""DeepSeek-V3.2: V3's router behind sparse attention."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

ATTENTION = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
SPARSE = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2, "head_dim": 8}
EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
SIZES = {"intermediate_size": 48, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
#: A dense layer and 2 of 16 experts in 4 groups, top 4 in 2 groups; attention sees 8 tokens.
TINY = small(**ATTENTION, **SPARSE, **EXPERTS, **SIZES)

FAMILY = Family(
    "deepseek_v32",
    ("deepseek_v32",),
    rules.sigmoid_in_groups,
    TINY,
    source="arXiv 2512.02556",
    shared=lambda config: config.n_shared_experts or 0,
)
