"""Kimi Linear: DeepSeek-V3's router; three layers in four have linear attention. (Kimi K2 is a `deepseek_v3`.)"""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

ATTENTION = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
LINEAR = {"linear_head_dim": 16, "linear_num_heads": 2}
LAYERS = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
EXPERTS = {"num_local_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
SIZES = {"intermediate_size": 48, "moe_intermediate_size": 16}
#: A dense layer and 2 of 16 experts in 4 groups, top 4 in 2 groups; the last layer has full attention.
TINY = small(**ATTENTION, **LINEAR, **LAYERS, **EXPERTS, **SIZES)

FAMILY = Family(
    "kimi_linear",
    ("kimi_linear",),
    rules.sigmoid_in_groups,
    TINY,
    source="arXiv 2510.26692",
    shared=lambda config: config.n_shared_experts or 0,
)
