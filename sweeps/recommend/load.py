"""What a machine has to run: a model as stored, its context, and how it decodes, under one routing or several."""

from __future__ import annotations

from dataclasses import dataclass

from moereplay.simulator.machine import Machine
from moereplay.sweeps.recommend.hits import PLAIN, Decoding, Hits, Work
from moereplay.sweeps.recommend.token_time import Prices, prices
from moereplay.traces.dense import dense_of
from moereplay.traces.schema import Geometry


@dataclass(frozen=True)
class Load:
    """A model as stored, its context, and the expected hits of one routing or several."""

    geometry: Geometry
    context: int
    runtime_bytes: int
    hits: tuple[Hits, ...]
    model: str = ""  #: its name, "" if engines are not asked whether they run it
    decoding: Decoding = PLAIN  #: which the hits are of

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts."""
        return self.geometry.experts * sum(self.geometry.expert_bytes)

    @property
    def dense_bytes(self) -> int:
        """Bytes of dense weights in memory."""
        return dense_of(self.geometry).resident

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV caches of all streams."""
        return self.decoding.streams * self.geometry.kv_cache(self.context)

    @property
    def head_bytes(self) -> int:
        """Bytes of a layer that drafts, with its experts; 0 without one."""
        if not (self.decoding.head and self.decoding.drafts.many):
            return 0
        return self.geometry.experts * self.geometry.expert_bytes[-1] + dense_of(self.geometry).layers[-1]

    @property
    def fixed_bytes(self) -> int:
        """Bytes of fast memory that are not for experts."""
        return self.dense_bytes + self.kv_bytes + self.runtime_bytes + self.head_bytes

    def prices(self, machine: Machine) -> tuple[Prices, ...]:
        """Return the prices of a pass on a machine, for each routing."""
        known: dict[Work | None, Prices] = {}
        for each in self.hits:
            if each.work not in known:
                known[each.work] = prices(machine, self.geometry, self.context, self.decoding, each.work)
        return tuple(known[each.work] for each in self.hits)
