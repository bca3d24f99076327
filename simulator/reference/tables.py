"""The tables of the policy contract, as rows of dicts: every policy sees them, the engine alone writes them."""

from __future__ import annotations

from collections.abc import Sequence

from moereplay.policies.contract import ABSENT, COPY, EXPERT, NEVER, NOW
from moereplay.simulator.interface import CopyLayout
from moereplay.simulator.oracle import Oracle


class Tables:
    """`now`, and a row per expert and per copy, by the columns of the contract."""

    def __init__(self, layout: CopyLayout, pools: Sequence[int], oracle: Oracle, seed: int) -> None:
        geometry = layout.geometry
        self.now = dict.fromkeys(NOW.names or (), 0) | {
            "layers": geometry.layers,
            "experts": geometry.experts,
            "k": geometry.k,
            "precisions": layout.precisions,
            "seed": seed,
        }
        self.experts = [dict.fromkeys(EXPERT.names or (), 0) for _ in range(layout.experts)]
        self.copies = [dict.fromkeys(COPY.names or (), 0) for _ in range(layout.experts * layout.precisions)]
        self._describe(layout, len(pools))
        for x, position in enumerate(oracle.first_uses):
            self.experts[x]["next_use"] = position
        for x, first_pass in enumerate(oracle.first_passes):
            self.experts[x]["next_pass"] = first_pass
        self._rank(oracle.ranking, len(pools))
        self.clear()

    def _describe(self, layout: CopyLayout, pools: int) -> None:
        for x, row in enumerate(self.experts):
            row["layer"] = x // layout.geometry.experts
            row["next_use"] = row["next_pass"] = row["profile"] = NEVER
        for y, row in enumerate(self.copies):
            layer = self.experts[y // layout.precisions]["layer"]
            row["bytes"] = layout.tiers[y % layout.precisions][layer]
            row["pool"] = layer if pools > 1 else 0

    def _rank(self, ranking: Sequence[int], pools: int) -> None:
        """How many bytes of its pool a profile gives away before it comes to each expert."""
        taken = [0] * pools
        for x in ranking:
            copy = self.copies[x * self.now["precisions"]]
            self.experts[x]["profile"] = taken[copy["pool"]]
            taken[copy["pool"]] += copy["bytes"]

    def clear(self) -> None:
        """As at the start, but for the future and the profile."""
        for row in self.experts:
            row.update(last_use=0, last_pass=-1, prediction_pass=-1, last_prediction=0, uses_ever=0, uses_here=0)
            row.update(mass_ever=0, needed=0)
        for row in self.copies:
            row.update(state=ABSENT, protected=0, entered=0, prefetched=0)
