"""Hunyuan-A13B: softmax over all experts, top k renormalised, one shared expert."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

#: 3 layers of 16 experts, top 4, and a shared one.
TINY = small(intermediate_size=16, head_dim=16, num_experts=16, moe_topk=4)

FAMILY = Family(
    "hunyuan_v1_moe",
    ("hunyuan_v1_moe",),
    rules.renormalised_top_k,
    TINY,
    source="transformers 5.23, models/hunyuan_v1_moe",
    shared=lambda config: 1,
)
