"""Granite 4: Granite's router and a shared expert, in layers of Mamba-2 or attention."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
EXPERTS = {"num_local_experts": 16, "num_experts_per_tok": 4, "shared_intermediate_size": 16}
#: 2 layers with Mamba-2 and 1 with attention, of 16 experts, top 4, and a shared one.
TINY = small(**MAMBA, **EXPERTS, intermediate_size=16, layer_types=["mamba", "mamba", "attention"])

FAMILY = Family(
    "granitemoehybrid",
    ("granitemoehybrid",),
    rules.softmax_of_the_chosen,
    TINY,
    source="transformers 5.23, models/granitemoehybrid",
    shared=lambda config: int(config.shared_intermediate_size > 0),
)
