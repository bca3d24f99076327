"""GLM-4.5: DeepSeek-V3's router, behind ordinary attention."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
SIZES = {"intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 16}
#: A dense layer and 2 of 16 experts in 4 groups, top 4 in 2 groups.
TINY = small(**EXPERTS, **SIZES, n_group=4, topk_group=2, routed_scaling_factor=2.5)

FAMILY = Family(
    "glm4_moe",
    ("glm4_moe",),
    rules.sigmoid_in_groups,
    TINY,
    source="arXiv 2508.06471",
    shared=lambda config: config.n_shared_experts or 0,
)
