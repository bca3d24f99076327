"""MiniMax-M2: sigmoid plus a correction bias that the block hands to its gate; renormalised, no groups, no scale."""

from typing import Any

from moereplay.tracegen.families.contract import Family, small
from moereplay.traces.schema import Router


def router(config: Any) -> Router:
    """No key of the config changes the rule."""
    return Router(family="sigmoid_groups", renormalise=True)


ROTARY = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
#: 3 layers of 16 experts, top 4.
TINY = small(intermediate_size=16, head_dim=16, num_local_experts=16, num_experts_per_tok=4, rope_parameters=ROTARY)

FAMILY = Family("minimax_m2", ("minimax_m2",), router, TINY, source="transformers 5.23, models/minimax_m2")
