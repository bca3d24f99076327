"""Compute's own work in addition to the model's: starting loads of experts, and the policies' decisions."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from moereplay.simulator.rates import bounded
from moereplay.simulator.wires import MIB, Ns
from moereplay.traces.frozen import Sparse


class Loading(Sparse):
    """Compute time spent on loading experts."""

    later: ClassVar = frozenset({"gate_ns", "ns_per_expert", "ns_per_mib", "prefetch"})

    gate_ns: Ns = 0  #: per step, part of its dense time: the gate's decisions
    ns_per_expert: Ns = 0  #: per expert that a demand fetches
    ns_per_mib: Ns = 0  #: and per MiB of it
    prefetch: bool = False  #: compute loads prefetched experts as well; otherwise another thread does

    @model_validator(mode="after")
    def _has_a_price(self) -> Loading:
        if self.prefetch and not self.ns_per_expert and not self.ns_per_mib:
            raise ValueError("prefetch requires ns_per_expert or ns_per_mib")
        return self

    def ns(self, size: int) -> int:
        """Return the time of one expert of `size` bytes, rounded up."""
        return bounded(self.ns_per_expert - (-size * self.ns_per_mib // MIB), "loading", "lower")


class Drafting(Sparse):
    """Time that draft tokens take before a pass verifies them."""

    later: ClassVar = frozenset({"ns_per_token"})

    ns_per_token: Ns = 0  #: per draft, before layer 0, part of the dense time

    def ns(self, drafts: int) -> int:
        """Return the time of the drafts of one pass."""
        return bounded(self.ns_per_token * drafts, "draft.ns_per_token", "lower")


class Decisions(Sparse):
    """Time that policies take to decide. All but `ns_per_victim` is part of a step's dense time, as `gate_ns` is."""

    later: ClassVar = frozenset({"ns_per_prediction", "gates", "ns_per_victim", "by_policy"})

    ns_per_prediction: Ns = 0  #: per gate of a later layer that the prefetch policy evaluates in a step
    gates: bool = False  #: charge the router's weights and launch for each of them, in place of `ns_per_prediction`
    ns_per_victim: Ns = 0  #: more latency of a transfer into the fast tier for each copy that it evicts
    by_policy: dict[str, Ns] = Field(default_factory=dict)  #: per step, by name of a policy of any kind

    @field_validator("by_policy")
    @classmethod
    def _charged(cls, by_policy: dict[str, int]) -> dict[str, int]:
        return {name: each for name, each in by_policy.items() if each}

    @model_validator(mode="after")
    def _one_price(self) -> Decisions:
        if self.gates and self.ns_per_prediction:
            raise ValueError("gates cannot be combined with ns_per_prediction")
        return self

    @property
    def of_steps(self) -> bool:
        """True if a step takes longer because of what its policies decide."""
        return bool(self.ns_per_prediction or self.gates or self.by_policy)

    def ns_by_name(self, names: Collection[str]) -> int:
        """Return the time of a step under policies of these names; a name that two kinds share counts once."""
        return sum(each for name, each in self.by_policy.items() if name in names)
