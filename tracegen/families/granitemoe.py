"""Granite 3 MoE: the k best logits, softmax over these alone."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

#: 3 layers of 16 experts, top 4.
TINY = small(intermediate_size=16, num_local_experts=16, num_experts_per_tok=4)

FAMILY = Family(
    "granitemoe",
    ("granitemoe",),
    rules.softmax_of_the_chosen,
    TINY,
    source="transformers 5.23, models/granitemoe",
)
