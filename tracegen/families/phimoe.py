"""Phi-3.5-MoE: SparseMixer, which picks two experts one after the other, whatever top k the config states.

Its band around each pick (`router_jitter_noise`) is part of the model also when it is not training.
"""

from typing import Any

from moereplay.tracegen.families.contract import Family, small
from moereplay.traces.schema import Router


def router(config: Any) -> Router:
    """The band's half width is the config's jitter."""
    return Router(family="sparsemixer", jitter=config.router_jitter_noise)


#: 3 layers of 8 experts, top 2; a wide band, so that some tokens have rivals within it.
TINY = small(intermediate_size=24, num_local_experts=8, router_jitter_noise=0.1)

FAMILY = Family("phimoe", ("phimoe",), router, TINY, source="arXiv 2404.14219; 2409.12136")
