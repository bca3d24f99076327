"""Processors of a platform, the accelerator and the CPU: nanoseconds of tokens through weights.

Without calibration a processor is a roofline: max(2 * params * tokens / FLOP/s, bytes / memory bandwidth) + launch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from moereplay.simulator.rates import bounded, by_tokens, ceilings, curve, half_even, longer
from moereplay.simulator.wires import Ns, Points, Rate, in_order
from moereplay.traces.frozen import Sparse
from moereplay.traces.weight_formats import check_format

_CEILINGS = "flops and memory_bytes_per_s"
OF_CPU = frozenset({"tier", "sync_ns", "rows_apart"})  #: figures that a CPU alone may have


class Roofline(Sparse):
    """A processor with two ceilings and a kernel launch time."""

    later: ClassVar = OF_CPU | {"by_tokens", "expert_bytes_per_s", "formats", "dense_formats", "kv_bytes_per_s"}

    kind: Literal["roofline"] = "roofline"
    flops: Rate
    memory_bytes_per_s: Rate
    launch_ns: Ns = 0
    by_tokens: Points = ()  #: what many tokens take, in times of what one takes; in proportion beyond the last
    expert_bytes_per_s: Rate | None = None  #: of routed experts, in place of `memory_bytes_per_s`
    formats: dict[str, Rate] = Field(default_factory=dict)  #: of routed experts in a format, in place of both
    dense_formats: dict[str, Rate] = Field(default_factory=dict)  #: of dense weights in a format
    kv_bytes_per_s: Rate | None = None  #: at which the KV cache is read; default: no time
    tier: str = ""  #: of a CPU: the row of [[tiers]] that it reads; default: the slow tier
    sync_ns: Ns = 0  #: of a CPU: once for a step's work that is queued at its gate
    rows_apart: bool = False  #: of a CPU: an expert is computed anew for every row, not once for all of them

    @field_validator("by_tokens")
    @classmethod
    def _from_one(cls, points: Points) -> Points:
        return _from_one_token(points)

    @field_validator("formats", "dense_formats")
    @classmethod
    def _known(cls, formats: dict[str, float]) -> dict[str, float]:
        return {check_format(name): rate for name, rate in formats.items()}

    def ns(self, params: int, size: int, tokens: int, weights: str = "", share: float = 1) -> int:
        """Return the nanoseconds for `tokens` through an expert: `params` weights of `size` bytes in that format.

        `share` of its rate is left to the memory.
        """
        return self._ns(params, size, tokens, self.expert_rate(weights), share)

    def dense_ns(self, params: int, size: int, tokens: int, weights: str = "", share: float = 1) -> int:
        """Return the nanoseconds for `tokens` through dense weights, as `ns` does for an expert."""
        return self._ns(params, size, tokens, self.dense_rate(weights), share)

    def expert_rate(self, weights: str) -> float:
        """Return the memory rate, bytes/s, of routed experts in a format."""
        return self.formats.get(weights, self.expert_bytes_per_s or self.memory_bytes_per_s)

    def dense_rate(self, weights: str) -> float:
        """Return the memory rate, bytes/s, of dense weights in a format."""
        return self.dense_formats.get(weights, self.memory_bytes_per_s)

    def _ns(self, params: int, size: int, tokens: int, rate: float, share: float) -> int:
        if params == 0 or tokens == 0:
            return 0
        bounds = ceilings(self.flops, rate, share, params, size)
        if not self.by_tokens:
            return bounded(half_even(bounds.ns(tokens), bounds.unit), _CEILINGS) + self.launch_ns
        times, unit = curve(self.by_tokens).of_tokens(tokens)
        one = bounds.ns(1) + self.launch_ns * bounds.unit
        return bounded(half_even(one * times, bounds.unit * unit), _CEILINGS)


class Measured(Sparse):
    """Compute by measured times: constants and nanoseconds per token, or curves relative to one token."""

    later: ClassVar = frozenset({"kv_bytes_per_s", "dense_by_tokens", "expert_by_tokens", "expert_by_size"}) | OF_CPU

    kind: Literal["measured"] = "measured"
    dense_ns: Ns = 0
    expert_ns: Ns = 0
    expert_ns_per_token: Ns = 0
    pass_ns: Ns = 0
    dense_by_tokens: Points = ()  #: what many tokens take, in times of what one takes; in proportion beyond the last
    expert_by_tokens: Points = ()  #: the same of an expert, in place of `expert_ns_per_token`
    expert_by_size: Points = ()  #: by bytes of the copy, in times of `expert_ns`; constant beyond both ends
    kv_bytes_per_s: Rate | None = None  #: at which the KV cache is read; default: no time
    tier: str = ""  #: of a CPU: the row of [[tiers]] that it reads; default: the slow tier
    sync_ns: Ns = 0  #: of a CPU: once for a step's work that is queued at its gate
    rows_apart: bool = False  #: of a CPU: an expert is computed anew for every row, not once for all of them

    @field_validator("dense_by_tokens", "expert_by_tokens")
    @classmethod
    def _from_one(cls, points: Points) -> Points:
        return _from_one_token(points)

    @field_validator("expert_by_size")
    @classmethod
    def _rising(cls, points: Points) -> Points:
        return in_order(points, "sizes")

    def dense(self, tokens: int, share: float = 1) -> int:
        """Return the nanoseconds of a layer's dense part, at a share of the processor's rate."""
        return by_tokens(longer(self.dense_ns, share), self.dense_by_tokens, tokens)

    def expert(self, tokens: int, size: int, share: float = 1) -> int:
        """Return the nanoseconds of an expert's copy of `size` bytes, at a share of the processor's rate."""
        spent = longer(self.expert_ns, share)
        if self.expert_by_tokens:
            spent = by_tokens(spent, self.expert_by_tokens, tokens)
        else:
            each = longer(self.expert_ns_per_token, share)
            spent = bounded(spent + each * tokens, "expert_ns_per_token", "lower")
        if not self.expert_by_size:
            return spent
        times, unit = curve(self.expert_by_size).at(size)
        return bounded(half_even(spent * times, unit), "expert_by_size")

    def once(self, share: float = 1) -> int:
        """Return the nanoseconds of a pass before layer 0, at a share of the processor's rate."""
        return longer(self.pass_ns, share)


def _from_one_token(points: Points) -> Points:
    """Validate times relative to one token. Raises ValueError."""
    if points and points[0] != (1, 1.0):
        raise ValueError("expected [1, 1.0] as the first point: one token takes 1.0 times the time of one token")
    if any(after < before for (_, before), (_, after) in pairwise(points)):
        raise ValueError("expected times that do not fall as tokens rise")
    return in_order(points, "tokens")
