"""The paths that experts cross: links into the fast tier, and lower tiers with the links that fill them."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from moereplay.simulator.capacity import check_readable, layers_in
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.rates import (
    MIB,
    MILLION,
    MOST_NS,
    NS,
    BySize,
    Ns,
    Rate,
    Share,
    bounded,
    ceiling,
    curve,
    exact,
    half_even,
)
from moereplay.traces.documents import Sparse, Text

MOST_LINKS, MOST_TIERS = 16, 4  #: tiers between the fast and the slow one


class Wire(Sparse):
    """A path that experts cross: a fixed latency, then bytes at a rate; `depth` transfers may be in flight at once."""

    later: ClassVar = frozenset({"start_ns", "start_ns_per_mib", "reads", "by_size", "lane_bytes_per_s"})

    bytes_per_s: Rate
    latency_ns: Ns = 0  #: of a read
    depth: int = Field(default=1, ge=1, lt=2**31)
    start_ns: Ns = 0  #: more latency for a transfer that starts on an idle wire
    start_ns_per_mib: float = Field(default=0, ge=0, le=MOST_NS)  #: and per MiB of its first read
    reads: int = Field(default=1, ge=1, le=4096)  #: of an expert, equal ones, one after the other
    by_size: BySize = ()  #: bytes/s by the size of a read, in place of `bytes_per_s`; constant beyond both ends
    lane_bytes_per_s: Rate | None = None  #: of one lane: `depth` of them move no more than depth times that

    @property
    def first_millionths(self) -> int:
        """Part of an expert's bytes, in millionths, after which its compute may begin."""
        return MILLION

    @property
    def idle_ns(self) -> int:
        """Latency of a transfer, summed over its reads, without `start_ns`."""
        return bounded(self.latency_ns * self.reads, "latency_ns times reads", "lower")

    def idle_start_ns(self, first: int) -> int:
        """Return the additional latency on an idle wire for a first read of `first` bytes, rounded up once."""
        each = exact(self.start_ns_per_mib)
        return bounded(
            self.start_ns + ceiling(first * each.numerator, MIB * each.denominator), "start_ns_per_mib", "lower"
        )

    def wire_ns(self, size: int, share: float = 1) -> int:
        """Return the nanoseconds on the wire, without latency, rounded up; `share` of its rate is left to the link."""
        rates = [self._rate(size)]
        if self.lane_bytes_per_s is not None:
            top, bottom = _ratio(self.lane_bytes_per_s or inf)
            rates.append((self.depth * top, bottom))
        left = exact(share)
        whole = [top * left.numerator // (bottom * left.denominator) for top, bottom in rates if bottom]
        return ceiling(size * NS, max(1, min(whole))) if whole else 0

    def _rate(self, size: int) -> tuple[int, int]:
        """Return bytes per second as a ratio for an expert of `size` bytes; an infinite rate has denominator 0."""
        return curve(self.by_size).at(size, self.reads) if self.by_size else _ratio(self.bytes_per_s)


class Link(Wire):
    """A link into the fast tier."""

    model_config = ConfigDict(populate_by_name=True)
    later: ClassVar = Wire.later | {"first_piece", "by_matrix"}

    first_piece: Share = 1.0  #: of an expert's bytes: when these are there its compute may begin
    by_matrix: bool = False  #: the first matrix of all missing experts of a step is read first, then the second, ...
    #: Its part of each layer's experts, in proportion to the shares of the others; default: equal parts.
    share: float | None = Field(default=None, ge=1e-6, le=1e6)
    layers: str = ""  #: instead of a share: all experts of these MoE layers, as in 0-23,40
    tier: Text = Field(default="", alias="from")  #: what it reads, a name only; default: the platform's slow tier

    @field_validator("layers")
    @classmethod
    def _merged(cls, text: str) -> str:
        """Return the ranges in ascending order, neighbours joined: one text for one set of layers."""
        ends = list[list[int]]()
        for layer in sorted(layers_in(text)) if text else ():
            if ends and layer == ends[-1][1]:
                raise ValueError(f"invalid layers {text!r}: layer {layer} is named twice")
            if ends and layer == ends[-1][1] + 1:
                ends[-1][1] = layer
            else:
                ends.append([layer, layer])
        return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ends)

    @model_validator(mode="after")
    def _has_one_order(self) -> Link:
        if self.by_matrix and self.first_piece < 1:
            raise ValueError("by_matrix cannot be combined with first_piece")
        if self.by_matrix and self.reads > 1:
            raise ValueError(
                "by_matrix cannot be combined with reads: the model gives the number of matrices per expert"
            )
        return self

    @property
    def first_millionths(self) -> int:
        """Part of an expert's bytes, in millionths, after which its compute may begin."""
        piece = exact(self.first_piece)
        return half_even(piece.numerator * MILLION, piece.denominator)

    def batch_ns(self, size: int, reads: int, share: float = 1) -> int:
        """Return the nanoseconds on the wire of `size` bytes in `reads` equal reads of matrices, rounded up."""
        rates = (_between(self.read_rates(share), size // reads), self.lanes_rate(reads, share))
        known = [rate for rate in rates if rate]
        return ceiling(size * NS, min(known)) if known else 0

    def read_rates(self, share: float = 1) -> list[tuple[int, int]]:
        """Return points (bytes of a read, whole bytes/s), at a share of the link's rate; 0 is an infinite rate."""
        return [(size, _whole(rate, share)) for size, rate in self.by_size or ((1, self.bytes_per_s),)]

    def lanes_rate(self, reads: int, share: float = 1) -> int:
        """Return the bytes/s of the lanes that `reads` reads can use; 0 means infinite."""
        lanes = self.lane_bytes_per_s
        return 0 if lanes is None else _whole(lanes, share, min(self.depth, reads))


REST = "rest"  #: capacity of a tier that has what the machine's memory leaves, as a page cache does


class LowerTier(Wire):
    """A cache between the fast and the slow tier, and the link that fills it from the tier below."""

    later: ClassVar = Wire.later | {"eviction"}

    name: Text
    capacity: str
    eviction: Literal["lru", "fifo"] = "lru"  #: what leaves first: what was read, or what came in, longest ago

    @field_validator("capacity", mode="before")
    @classmethod
    def _readable(cls, capacity: object) -> object:
        if not isinstance(capacity, str):
            raise ValueError('expected a size in quotes, as in capacity = "32GB"')
        try:
            if capacity != REST:
                check_readable(capacity)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return capacity


def _whole(rate: float, share: float, times: int = 1) -> int:
    """Return a share of a multiple of a rate, in whole bytes per second, at least 1; 0 if it is infinite."""
    top, bottom = _ratio(rate)
    left = exact(share)
    return max(1, times * top * left.numerator // (bottom * left.denominator)) if bottom else 0


def _between(points: list[tuple[int, int]], place: int) -> int:
    """Return the whole rate at a place: linear between points, rounded down, constant beyond both ends."""
    for (left, low), (right, high) in pairwise(points):
        if left <= place <= right:
            return (low * (right - place) + high * (place - left)) // (right - left)
    return (points[0] if place <= points[0][0] else points[-1])[1]


def _ratio(rate: float) -> tuple[int, int]:
    """Return a rate as numerator and denominator; (1, 0) if it is infinite."""
    return (1, 0) if rate == inf else exact(rate).as_integer_ratio()
