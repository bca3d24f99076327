"""Jamba: softmax over all experts, top k as they are, in every other layer; most layers are Mamba."""

from typing import Any

from moereplay.tracegen.families.contract import Family, small
from moereplay.traces.schema import Router


def router(config: Any) -> Router:
    """No key of the config changes the rule."""
    return Router(family="softmax_topk")


MAMBA = {"mamba_d_state": 8, "mamba_dt_rank": 4}
LAYERS = {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 1}
#: 4 layers, attention in the second; the second and the fourth hold 8 experts, top 2.
TINY = small(**LAYERS, **MAMBA, intermediate_size=16, num_experts=8, num_experts_per_tok=2)

FAMILY = Family("jamba", ("jamba",), router, TINY, source="arXiv 2403.19887")
