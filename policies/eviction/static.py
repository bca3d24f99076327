"""Static placement: the experts ranked highest by a profile stay; the others use the bypass buffer.

The candidate with the lowest rank is evicted, and only for an expert of higher rank: once used, the best experts that
fit stay. `--warm` puts them there from the start. `profile=trace` ranks by how often the trace to be replayed chose
each expert, in its first `tokens` tokens (0: all, the bound of any static placement); `profile=given` is the list of
--profile FILE, fitted elsewhere. Experts without a rank evict nothing; of several such in the cache the least recent is
evicted first.
"""

from moereplay.policies.blocks import PROFILE_PARAMS, needs, profile
from moereplay.policies.contract import Eviction, expert_of


def key(now, experts, copies, own, y):
    """Return minus the bytes that rank before it."""
    return -experts[expert_of(now, y)]["profile"]


def admit(now, experts, copies, own, y_in, prefetched, y_out):
    """Admit a copy that ranks higher than the lowest candidate."""
    return experts[expert_of(now, y_in)]["profile"] < experts[expert_of(now, y_out)]["profile"]


POLICY = Eviction(
    name="static",
    summary="keep the best experts of a profile",
    source="Fiddler 2402.07033; 2608.07911 (static)",
    params=PROFILE_PARAMS,
    needs=needs,
    key=key,
    admit=admit,
    profile=profile,
    reads=frozenset(),
)
