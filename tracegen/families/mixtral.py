"""Mixtral: softmax over all experts, top 2 renormalised; its gate weights stay in f32 whatever the model's dtype."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

#: 3 layers of 8 experts, top 2.
TINY = small(intermediate_size=24, num_local_experts=8, num_experts_per_tok=2)

FAMILY = Family("mixtral", ("mixtral",), rules.renormalised_top_k, TINY, source="arXiv 2401.04088")
