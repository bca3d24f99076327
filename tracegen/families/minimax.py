"""MiniMax-Text-01: Mixtral's router, between lightning and full attention."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

LAYERS = ["linear_attention", "linear_attention", "full_attention"]
SIZES = {"intermediate_size": 24, "head_dim": 16, "block_size": 16}
#: 2 layers with lightning attention and 1 with full attention, of 8 experts, top 2.
TINY = small(**SIZES, layer_types=LAYERS, num_local_experts=8, num_experts_per_tok=2)

FAMILY = Family("minimax", ("minimax",), rules.renormalised_top_k, TINY, source="arXiv 2501.08313")
