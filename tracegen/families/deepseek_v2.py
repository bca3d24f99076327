"""DeepSeek-V2: softmax over all experts, top k in the groups with the best experts; scaled, never renormalised."""

from typing import Any

from moereplay.tracegen.families.contract import Family, small
from moereplay.traces.schema import Router


def router(config: Any) -> Router:
    """The Lite model is greedy: it has no groups. transformers ignores `norm_topk_prob` here."""
    if config.topk_method == "greedy":
        return Router(family="softmax_groups", scale=config.routed_scaling_factor)
    groups, kept = config.n_group or 1, config.topk_group or 1
    return Router(family="softmax_groups", scale=config.routed_scaling_factor, groups=groups, groups_kept=kept)


ATTENTION = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0}
EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}
#: A dense layer and 2 of 16 experts in 4 groups, top 4 in 2 groups.
TINY = small(**ATTENTION, **GROUPS, **EXPERTS, head_dim=8, intermediate_size=48, moe_intermediate_size=16)

FAMILY = Family(
    "deepseek_v2",
    ("deepseek_v2",),
    router,
    TINY,
    source="arXiv 2405.04434",
    shared=lambda config: config.n_shared_experts or 0,
)
