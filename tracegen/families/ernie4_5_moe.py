"""ERNIE 4.5: softmax over all experts in f32, a correction bias that only chooses, the k probabilities renormalised."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

EXPERTS = {"moe_num_experts": 16, "moe_k": 4, "moe_num_shared_experts": 2, "moe_layer_start_index": 1}
#: A dense layer and 2 of 16 experts, top 4, with 2 shared ones; no embedding is tied to the head.
TINY = small(**EXPERTS, intermediate_size=48, moe_intermediate_size=16, tie_word_embeddings=False)

FAMILY = Family(
    "ernie4_5_moe",
    ("ernie4_5_moe",),
    rules.renormalised_top_k,
    TINY,
    source="transformers 5.23, models/ernie4_5_moe",
    shared=lambda config: config.moe_num_shared_experts or 0,
)
