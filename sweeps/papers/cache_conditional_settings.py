"""What the figures of Mixture of Cache-Conditional Experts share: the authors' protocol, and its routing policies."""

from __future__ import annotations

from moereplay.simulator.preset import preset

ROUTING = "cache_prior:lam={:g}:top_j={}:delta=running_range"
#: Half and a quarter of each layer's experts.
PANELS = {"E/2": {"capacity": "50%"}, "E/4": {"capacity": "25%"}}
ASSUMED = (
    "Open loop: recorded logits do not react to the changed mixture, and gate mass that is not executed as chosen "
    "stands for the paper's perplexity, unless --live gives that of live runs."
)
#: Added to what a figure draws where runs of the live model are given.
CHANGED, PERPLEXITY = "mass_changed", "perplexity_change"


def settings() -> dict[str, str]:
    """The authors': a cache per layer, LRU, one token per pass, an empty cache every 1,024 tokens."""
    return preset("cache-prior-paper").values()
