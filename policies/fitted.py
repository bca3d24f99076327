"""Policies that are fitted to a profile: which one, and what of it fits a share of the pool.

`experts[x]["profile"]` is how many bytes of x's pool the profile gives away before it comes to x, NEVER for an expert
that it does not list.
"""

from moereplay.policies.contract import GIVEN_PROFILE, Choice, Number, expert_of
from moereplay.policies.residents import home

#: The demand of the trace to be replayed, the most often chosen first: of its first `tokens`, 0 for all. Or a file.
PROFILE_PARAMS = (
    Choice("profile", "trace", ("trace", "given")),
    Number("tokens", 0, 0, 1 << 40, integer=True),
)


def profile(params):
    """Where the profile comes from, as the contract has it."""
    return GIVEN_PROFILE if params["profile"] == "given" else params["tokens"]


def needs(params):
    """The trace's own demand is known beforehand only where the future is."""
    return frozenset(() if params["profile"] == "given" else ("future",))


def is_within(now, experts, copies, y, limit):
    """Whether y's expert is among those that fill the first `limit` bytes of its pool."""
    before = experts[expert_of(now, y)]["profile"]
    return before + copies[home(now, y)]["bytes"] <= limit
