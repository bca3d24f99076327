"""Random: every candidate is equally likely to be evicted; the floor that a policy must beat."""

from moereplay.policies.blocks import counter_hash
from moereplay.policies.contract import Eviction


def key(now, experts, copies, own, y):
    """Draw a number for every step, from (seed, pass, layer, copy)."""
    return counter_hash(now["seed"], now["pass"], now["layer"], y)


POLICY = Eviction(
    name="random",
    summary="evict an expert at random",
    source="Belady 1966",
    key=key,
    key_scope="step",
    reads=frozenset(),
)
