"""Nemotron 3: DeepSeek-V3's router over experts without a gate projection; a layer is Mamba-2, attention or experts."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

MAMBA = {"ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 8}
EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 1}
SIZES = {"intermediate_size": 48, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16}
LAYERS = {"layers_block_type": ["mamba", "moe", "attention", "moe"], "head_dim": 16}
#: Mamba-2, experts, attention, experts: twice 16 experts in 2 groups, top 4 in 1 group, and a shared one.
TINY = small(**MAMBA, **EXPERTS, **SIZES, **LAYERS, num_hidden_layers=4)

FAMILY = Family(
    "nemotron_h",
    ("nemotron_h",),
    rules.sigmoid_in_groups,
    TINY,
    source="transformers 5.23, models/nemotron_h",
    shared=lambda config: config.n_shared_experts or 0,
)
