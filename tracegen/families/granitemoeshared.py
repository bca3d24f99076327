"""Granite MoE with a shared expert beside the routed ones: Granite's router."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

#: 3 layers of 16 experts, top 4, and a shared one.
TINY = small(intermediate_size=16, shared_intermediate_size=16, num_local_experts=16, num_experts_per_tok=4)

FAMILY = Family(
    "granitemoeshared",
    ("granitemoeshared",),
    rules.softmax_of_the_chosen,
    TINY,
    source="transformers 5.23, models/granitemoeshared",
    shared=lambda config: int(config.shared_intermediate_size > 0),
)
