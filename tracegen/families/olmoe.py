"""OLMoE: softmax over all experts, top k; the published checkpoints do not renormalise."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

#: 3 layers of 16 experts, top 4.
TINY = small(intermediate_size=16, num_experts=16, num_experts_per_tok=4)

FAMILY = Family("olmoe", ("olmoe",), rules.softmax_top_k, TINY, source="arXiv 2409.02060")
