"""GLM-4.7-Flash: DeepSeek-V3's router and latent attention."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

ATTENTION = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
#: A dense layer and 2 of 16 experts in 4 groups, top 4 in 2 groups.
TINY = small(**ATTENTION, **EXPERTS, intermediate_size=48, moe_intermediate_size=16)

FAMILY = Family(
    "glm4_moe_lite",
    ("glm4_moe_lite",),
    rules.sigmoid_in_groups,
    TINY,
    source="transformers 5.23, models/glm4_moe_lite",
    shared=lambda config: config.n_shared_experts or 0,
)
