"""An assumed price of decisions: whether the order of two results would turn if their policies took time to decide.

A replay charges decisions only where its platform states their price (`[decisions]`). Published engines take 6 to 47 us
per layer, by policy.
"""

from __future__ import annotations

from typing import NamedTuple

ASSUMED_NS = 10_000  #: per layer, of each policy that predicts or scores
NS = 1e9


class Ranked(NamedTuple):
    """A result in a ranking by speed."""

    name: str
    tokens_per_s: float
    deciding: int  #: policies that predict or score

    def slowed(self, layers: int) -> float:
        """Return tokens/s if each deciding policy takes the assumed time in every layer."""
        return NS / (NS / self.tokens_per_s + self.deciding * layers * ASSUMED_NS)


def turned(first: Ranked, second: Ranked, layers: int) -> str | None:
    """Return a remark if the faster one would be the slower one under the assumed price, else None."""
    slower, faster = first.slowed(layers), second.slowed(layers)
    if first.tokens_per_s < second.tokens_per_s or slower >= faster:
        return None
    return (
        f"{second.name} would be faster than {first.name} if each policy that predicts or scores took "
        f"{ASSUMED_NS // 1000} us per layer (assumed; published: 6 to 47 us): {faster:,.4g} against "
        f"{slower:,.4g} tokens/s; state it in [decisions] of the platform"
    )
