"""dots.llm1: DeepSeek-V3's router behind ordinary attention; by default without groups."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}
SIZES = {"intermediate_size": 48, "moe_intermediate_size": 16, "sliding_window": None}
#: A dense layer and 2 of 16 experts in 2 groups, top 4 in 1 group.
TINY = small(**EXPERTS, **SIZES, n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5)

FAMILY = Family(
    "dots1",
    ("dots1",),
    rules.sigmoid_in_groups,
    TINY,
    source="arXiv 2506.05767",
    shared=lambda config: config.n_shared_experts or 0,
)
