"""Qwen3-MoE: softmax over all experts, top k, renormalised in the published checkpoints but not by default."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

SIZES = {"intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 16}
#: 3 layers of 16 experts, top 4.
TINY = small(**SIZES, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True)

FAMILY = Family("qwen3_moe", ("qwen3_moe",), rules.softmax_top_k, TINY, source="arXiv 2505.09388")
