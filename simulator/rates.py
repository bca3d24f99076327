"""From a platform's figures to exact times: the arithmetic, the processors, and compute's work beside the model's.

A figure is the decimal in the file: 0.7 is 7/10, not the nearest double. Figures become ratios of integers once; times
are then integer arithmetic, and each is rounded once, by `half_even` or by `ceiling`.

Without calibration a processor is a roofline: max(2 * params * tokens / FLOP/s, bytes / memory bandwidth) + launch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from itertools import pairwise
from math import inf, lcm
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, Field, field_validator, model_validator

from moereplay.simulator.errors import ConfigError
from moereplay.traces.documents import Sparse, Text
from moereplay.traces.weight_formats import check_format

NS = 1_000_000_000
MILLION = 1_000_000
NOT_YET = -1  #: before the first nanosecond
MOST_NS = 10**15  #: of one thing, eleven days
MOST_RATE = 1e18  #: bytes or operations per second
MIB = 1 << 20
Ns = Annotated[int, Field(ge=0, le=MOST_NS)]
Share = Annotated[float, Field(ge=1e-6, le=1)]
Rate = Annotated[float, Field(ge=1, le=MOST_RATE)]
#: A measured curve: points (x, y) with x rising, linear in between.
Points = tuple[tuple[Annotated[int, Field(ge=1, lt=2**63)], Annotated[float, Field(gt=0, le=MOST_RATE)]], ...]


def _in_order(points: Points, what: str) -> Points:
    """Return the points. Raises ValueError unless x rises."""
    if any(after <= before for (before, _), (after, _) in pairwise(points)):
        raise ValueError(f"expected {what} that rise from point to point")
    return points


def _from_one_token(points: Points) -> Points:
    """Return times relative to one token. Raises ValueError."""
    if points and points[0] != (1, 1.0):
        raise ValueError("expected [1, 1.0] as the first point: one token takes 1.0 times the time of one token")
    if any(after < before for (_, before), (_, after) in pairwise(points)):
        raise ValueError("expected times that do not fall as tokens rise")
    return _in_order(points, "tokens")


BySize = Annotated[Points, AfterValidator(partial(_in_order, what="sizes"))]
ByTokens = Annotated[Points, AfterValidator(_from_one_token)]


@lru_cache(maxsize=4096)
def exact(figure: float) -> Fraction:
    """Return a finite figure as the shortest decimal that reads back as it."""
    return Fraction(str(figure))


def half_even(top: int, bottom: int) -> int:
    """Round top / bottom to the nearest integer, halves to the even one; `bottom` > 0."""
    whole, rest = divmod(top, bottom)
    return whole + (2 * rest > bottom or (2 * rest == bottom and whole % 2 == 1))


def ceiling(top: int, bottom: int) -> int:
    """Round top / bottom up; `bottom` > 0."""
    return -(-top // bottom)


def ns_per_byte(bytes_per_s: float) -> Fraction:
    """Return the nanoseconds of one byte, or of one operation: 0 at an infinite rate."""
    return Fraction(0) if bytes_per_s == inf else NS / exact(bytes_per_s)


def part(ns: int, millionths: int) -> int:
    """Return `millionths` of a time, rounded up."""
    return ceiling(ns * millionths, MILLION)


def share_up(ns: int, top: int, bottom: int) -> int:
    """Return top / bottom of a time, rounded up."""
    return ceiling(ns * top, bottom)


def longer(ns: int, share: float) -> int:
    """Return what takes `ns` at the full rate, at this share of the rate, rounded up."""
    of = exact(share)
    return ceiling(ns * of.denominator, of.numerator)


def bounded(ns: int, figure: str, change: str = "raise") -> int:
    """Return the time. Raises ConfigError if it is too long for any run, naming the value to change."""
    if ns > MOST_NS:
        raise ConfigError(f"the platform takes more than eleven days for one expert or pass; {change} its {figure}")
    return ns


class Ceilings(NamedTuple):
    """The two ceilings of a roofline for one set of weights, in nanoseconds over one denominator."""

    compute: int  #: for each token
    memory: int  #: once, to read the weights
    unit: int  #: what both are divided by

    def ns(self, tokens: int) -> int:
        """Return the higher ceiling for `tokens` tokens, times `unit`."""
        return max(self.compute * tokens, self.memory)


@lru_cache(maxsize=4096)
def ceilings(flops: float, bytes_per_s: float, share: float, params: int, size: int) -> Ceilings:
    """Return the ceilings for `params` weights of `size` bytes, where memory keeps a share of its rate."""
    compute = 2 * params * ns_per_byte(flops)
    memory = size * ns_per_byte(bytes_per_s) / exact(share)
    unit = lcm(compute.denominator, memory.denominator)
    return Ceilings(int(compute * unit), int(memory * unit), unit)


class Curve:
    """A measured curve: points (x, y) with x rising, linear in between, constant beyond both ends."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        figures = [exact(y) for _, y in points]
        self._unit = lcm(*(figure.denominator for figure in figures))
        self._points = [(x, int(y * self._unit)) for (x, _), y in zip(points, figures, strict=True)]

    def at(self, place: int, parts: int = 1) -> tuple[int, int]:
        """Return y at x = place / parts as a numerator and a denominator."""
        for (left, low), (right, high) in pairwise(self._points):
            if left * parts <= place <= right * parts:
                width = (right - left) * parts
                return low * width + (high - low) * (place - left * parts), self._unit * width
        first, *_, last = self._points * 2
        return (first if place <= first[0] * parts else last)[1], self._unit

    def of_tokens(self, tokens: int) -> tuple[int, int]:
        """Return y at `tokens` tokens; beyond the last point it grows in proportion."""
        last, y = self._points[-1]
        return (y * tokens, self._unit * last) if tokens > last else self.at(tokens)


@lru_cache(maxsize=256)
def curve(points: tuple[tuple[int, float], ...]) -> Curve:
    """Return the curve of these points, made once."""
    return Curve(points)


def by_tokens(ns: int, points: tuple[tuple[int, float], ...], tokens: int) -> int:
    """Return the nanoseconds of `tokens` tokens if one takes `ns`, halves to even; `ns` without a curve."""
    if not points:
        return ns
    times, unit = curve(points).of_tokens(tokens)
    return bounded(half_even(ns * times, unit), "times by tokens")


class Loading(Sparse):
    """Compute time spent on loading experts."""

    later: ClassVar = frozenset({"gate_ns", "ns_per_expert", "ns_per_mib", "prefetch"})

    gate_ns: Ns = 0  #: per step, part of its dense time: the gate's decisions, a layer's launches
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
    by_policy: dict[Text, Ns] = Field(default_factory=dict)  #: per step, by name of a policy of any kind

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


_CEILINGS = "flops and memory_bytes_per_s"
OF_CPU = frozenset({"tier", "sync_ns", "rows_apart"})  #: figures that a CPU alone may have


class Roofline(Sparse):
    """A processor with two ceilings and a kernel launch time."""

    later: ClassVar = OF_CPU | {"by_tokens", "expert_bytes_per_s", "formats", "dense_formats", "kv_bytes_per_s"}

    kind: Literal["roofline"] = "roofline"
    flops: Rate
    memory_bytes_per_s: Rate
    launch_ns: Ns = 0
    by_tokens: ByTokens = ()  #: what many tokens take, in times of what one takes; in proportion beyond the last
    expert_bytes_per_s: Rate | None = None  #: of routed experts, in place of `memory_bytes_per_s`
    formats: dict[str, Rate] = Field(default_factory=dict)  #: of routed experts in a format, in place of both
    dense_formats: dict[str, Rate] = Field(default_factory=dict)  #: of dense weights in a format
    kv_bytes_per_s: Rate | None = None  #: at which the KV cache is read; default: no time
    tier: Text = ""  #: of a CPU: the row of [[tiers]] that it reads; default: the slow tier
    sync_ns: Ns = 0  #: of a CPU: once for a step's work that is queued at its gate
    rows_apart: bool = False  #: of a CPU: an expert is computed anew for every row, not once for all of them

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
        return self._ns(params, size, tokens, self.dense_formats.get(weights, self.memory_bytes_per_s), share)

    def expert_rate(self, weights: str) -> float:
        """Return the memory rate, bytes/s, of routed experts in a format."""
        return self.formats.get(weights, self.expert_bytes_per_s or self.memory_bytes_per_s)

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
    dense_by_tokens: ByTokens = ()  #: what many tokens take, in times of what one takes; in proportion beyond the last
    expert_by_tokens: ByTokens = ()  #: the same of an expert, in place of `expert_ns_per_token`
    expert_by_size: BySize = ()  #: by bytes of the copy, in times of `expert_ns`; constant beyond both ends
    kv_bytes_per_s: Rate | None = None  #: at which the KV cache is read; default: no time
    tier: Text = ""  #: of a CPU: the row of [[tiers]] that it reads; default: the slow tier
    sync_ns: Ns = 0  #: of a CPU: once for a step's work that is queued at its gate
    rows_apart: bool = False  #: of a CPU: an expert is computed anew for every row, not once for all of them

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
