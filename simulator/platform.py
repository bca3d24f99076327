"""The machine: tiers, links and compute. Rates become integer nanoseconds here, once.

Without calibration compute is a roofline: max(2 * params * tokens / FLOP/s, bytes / memory bandwidth) + launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from math import ceil, inf
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, field_validator

from policies.contract import Costs
from simulator.capacity import check_readable
from simulator.errors import ConfigError
from simulator.homes import homes
from traces.schema import Frozen, Geometry

NS = 1_000_000_000
MOST_LINKS = 16
MOST_TIERS = 4  #: between the fast and the slow one
MOST_NS = 10**15  #: of one thing, eleven days: engines add times up in int64
Ns = Annotated[int, Field(ge=0, le=MOST_NS)]
Time = TypeVar("Time", int, float)


class Wire(Frozen):
    """What experts cross: a fixed latency, then bytes at a rate; `depth` transfers may be issued at once."""

    bytes_per_s: float = Field(ge=1)
    latency_ns: Ns = 0
    depth: int = Field(default=1, ge=1, lt=2**31)

    def wire_ns(self, size: int) -> int:
        """Nanoseconds on the wire, without latency, rounded up."""
        if self.bytes_per_s == inf:
            return 0
        return -(-size * NS // max(1, int(self.bytes_per_s)))

    def slowed(self, share: float) -> Self:
        """The same link at a share of its rate."""
        return self.model_copy(update={"bytes_per_s": self.bytes_per_s * share})


class Link(Wire):
    """A link into the fast tier."""

    model_config = ConfigDict(populate_by_name=True)

    #: How many of each layer's experts lie behind it, in proportion to the shares of the others; equal parts unsaid.
    share: float | None = Field(default=None, ge=1e-6, le=1e6)
    tier: str = Field(default="", alias="from")  #: what it reads, a name only; the platform's slow tier unsaid


class LowerTier(Wire):
    """A cache between the fast and the slow tier, and the link that fills it from the tier below."""

    name: str
    capacity: str

    @field_validator("capacity")
    @classmethod
    def _readable(cls, capacity: str) -> str:
        try:
            check_readable(capacity)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return capacity


class Roofline(Frozen):
    """A processor by its two ceilings, and what it costs to start a kernel."""

    kind: Literal["roofline"] = "roofline"
    flops: float = Field(ge=1)
    memory_bytes_per_s: float = Field(ge=1)
    launch_ns: Ns = 0

    def ns(self, params: int, size: int, tokens: int) -> int:
        """Nanoseconds for `tokens` through `params` weights of `size` bytes."""
        if params == 0 or tokens == 0:
            return 0
        seconds = max(2 * params * tokens / self.flops, size / self.memory_bytes_per_s)
        return round(_bounded(seconds * NS, "flops and memory_bytes_per_s")) + self.launch_ns

    def slowed(self, share: float) -> Roofline:
        """The same processor at a share of its memory's rate."""
        return self.model_copy(update={"memory_bytes_per_s": self.memory_bytes_per_s * share})


class Measured(Frozen):
    """Compute by given times: constants and nanoseconds per token."""

    kind: Literal["measured"] = "measured"
    dense_ns: Ns = 0
    expert_ns: Ns = 0
    expert_ns_per_token: Ns = 0
    pass_ns: Ns = 0

    def slowed(self, share: float) -> Measured:
        """The same processor where an expert takes 1 / share of the time."""
        slower = {name: ceil(getattr(self, name) / share) for name in ("expert_ns", "expert_ns_per_token")}
        return self.model_copy(update=slower)


class Contention(Frozen):
    """What is left of a rate while both work: the CPU reads the memory that the link reads from."""

    cpu: float = Field(default=1, ge=1e-6, le=1)
    link: float = Field(default=1, ge=1e-6, le=1)


#: The figures of a link that its times are made from.
LINK_TIMES = {"bytes_per_s", "latency_ns", "depth"}
Compute = Annotated[Roofline | Measured, Field(discriminator="kind")]


class Platform(Frozen):
    """One machine, with the source of its figures."""

    name: str
    summary: str = ""
    source: str = ""
    fast_tier: str = "VRAM"
    slow_tier: str = "DRAM"
    links: tuple[Link, ...] = Field(min_length=1, max_length=MOST_LINKS)
    tiers: tuple[LowerTier, ...] = Field(default=(), max_length=MOST_TIERS)  #: between fast and slow, from the top down
    compute: Compute
    cpu: Compute | None = None
    contention: Contention | None = None

    @field_validator("links")
    @classmethod
    def _shares(cls, links: tuple[Link, ...]) -> tuple[Link, ...]:
        if len({link.share is None for link in links}) > 1:
            raise ValueError("say the share of every link or of none")
        return links

    @property
    def shares(self) -> tuple[float, ...]:
        """Of each link, in one unit."""
        return tuple(1.0 if link.share is None else link.share for link in self.links)

    @property
    def wires(self) -> tuple[Wire, ...]:
        """The links into the fast tier, then those that fill the tiers below, from the top down."""
        return (*self.links, *self.tiers)

    def document(self) -> dict[str, Any]:
        """What its file says, defaults filled in: `link` where there is one, else `links`."""
        several = len(self.links) > 1
        rows = [
            link.model_dump(include=LINK_TIMES | ({"share"} if several else set()))
            | ({"from": link.tier} if link.tier else {})
            for link in self.links
        ]
        about = {"name", "summary", "source", "fast_tier", "slow_tier"}
        links: dict[str, Any] = {"links": rows} if several else {"link": rows[0]}
        if self.tiers:
            links["tiers"] = [tier.model_dump() for tier in self.tiers]
        return self.model_dump(include=about) | links | self.model_dump(exclude={*about, "links", "tiers"})

    def figures(self) -> dict[str, object]:
        """What a replay's times depend on, whatever the machine is called."""
        parts = {"compute", "cpu"} | ({"contention"} if self.contention else set())
        rows: list[dict[str, object]] = [link.model_dump(mode="json", include=LINK_TIMES) for link in self.links]
        others: dict[str, object] = self.model_dump(mode="json", include=parts)
        if self.tiers:
            others["tiers"] = [tier.model_dump(mode="json", include=LINK_TIMES | {"capacity"}) for tier in self.tiers]
        if len(rows) == 1:
            return others | {"link": rows[0]}
        for row, share in zip(rows, self.shares, strict=True):
            row["share"] = share / sum(self.shares)
        return others | {"links": rows}

    def row(self) -> dict[str, object]:
        """One line of `moereplay platforms`."""
        return {
            "platform": self.name,
            "what": self.summary,
            "cache": " < ".join((self.fast_tier, *(tier.name for tier in self.tiers))),
            "link GB/s": _each([link.bytes_per_s / 1e9 for link in self.wires]),
            "latency us": _each([link.latency_ns / 1000 for link in self.wires]),
            "CPU": "yes" if self.cpu else "no",
        }


def _each(figures: Sequence[float]) -> float | str:
    """One figure as it is, those of several links side by side."""
    return figures[0] if len(figures) == 1 else " + ".join(f"{figure:g}" for figure in figures)


def _bounded(ns: Time, figure: str) -> Time:
    """The time itself. Raises ConfigError if it is too long for any run, naming the figure that is too small."""
    if ns > MOST_NS:
        raise ConfigError(f"the platform takes more than eleven days for one expert or pass; raise its {figure}")
    return ns


class Times:
    """The integer times of one geometry and its precision tiers on one platform, worked out as they are asked for."""

    def __init__(self, platform: Platform, geometry: Geometry, tiers: tuple[tuple[int, ...], ...]) -> None:
        """`tiers[p][layer]` is the bytes of an expert at precision p."""
        self._platform, self._geometry, self._tiers = platform, geometry, tiers
        #: Of each link: those into the fast tier first, then those that fill the tiers below, from the top down.
        self.latency_ns = tuple(link.latency_ns for link in platform.wires)
        self.depth = tuple(link.depth for link in platform.wires)
        self.homes = homes(geometry.experts, platform.shares)  #: the link of each expert of a layer
        self._known: dict[tuple[str, int, int, int], int] = {}
        left = platform.contention or Contention()
        self._slow_links = [link.slowed(left.link) for link in platform.wires]
        self._slow_cpu = platform.cpu.slowed(left.cpu) if platform.cpu else None

    def is_of(self, platform: Platform, geometry: Geometry, tiers: tuple[tuple[int, ...], ...]) -> bool:
        """Whether these are the times of this very model on an equal machine."""
        return self._geometry is geometry and self._tiers == tiers and self._platform == platform

    @cached_property
    def _params(self) -> int:
        stored = self._geometry.expert_bytes[0] * 8 / self._geometry.expert_bits
        return self._geometry.expert_params or round(stored)

    @cached_property
    def wire_ns(self) -> list[list[list[int]]]:
        """[link][layer][precision] nanoseconds on the wire."""
        return [self._wire(link) for link in self._platform.wires]

    @cached_property
    def contended_wire_ns(self) -> list[list[list[int]]]:
        """The same for a transfer that starts while the CPU computes."""
        return [self._wire(link) for link in self._slow_links]

    def _wire(self, link: Wire) -> list[list[int]]:
        each = [[link.wire_ns(sizes[layer]) for sizes in self._tiers] for layer in self._layers]
        _bounded(max(map(max, each)), "bytes_per_s")
        return each

    @cached_property
    def costs(self) -> Costs:
        """What the mean expert takes, rounded down, for policies that weigh its link against the CPU."""
        load = [self.latency_ns[home] + self.wire_ns[home][layer][0] for layer in self._layers for home in self.homes]
        compute = [self.expert_ns(layer, 0, 1) for layer in self._layers]
        cpu = [self.cpu_ns(layer, 0, 1) for layer in self._layers] if self._platform.cpu else [0]
        return Costs(*(sum(times) // len(times) for times in (load, compute, cpu)))

    @property
    def has_cpu(self) -> bool:
        """Whether experts may be computed on the CPU."""
        return self._platform.cpu is not None

    @property
    def _layers(self) -> range:
        return range(self._geometry.layers)

    def dense_ns(self, layer: int, tokens: int) -> int:
        """Attention, norms, gate and shared experts of one layer."""
        compute = self._platform.compute
        if isinstance(compute, Measured):
            return compute.dense_ns
        params = self._geometry.dense_params or 0
        return self._once(("dense", layer, 0, tokens), compute, params, params * 2)

    def pass_ns(self, tokens: int) -> int:
        """Embedding, head and dense layers; charged before layer 0."""
        compute = self._platform.compute
        if isinstance(compute, Measured):
            return compute.pass_ns
        params = self._geometry.head_params or 0
        return self._once(("pass", 0, 0, tokens), compute, params, params * 2)

    def expert_ns(self, layer: int, precision: int, tokens: int) -> int:
        """One expert over the tokens routed to it."""
        return self._expert("expert", self._platform.compute, layer, precision, tokens)

    def cpu_ns(self, layer: int, precision: int, tokens: int, contended: bool = False) -> int:
        """The same on the CPU, from the slow tier; `contended` if the link works beside it.

        Raises ConfigError if the platform has no CPU.
        """
        if self._platform.cpu is None or self._slow_cpu is None:
            raise ConfigError(
                f"platform {self._platform.name} has no [cpu] table, which miss policies that compute there need"
            )
        what, cpu = ("slow cpu", self._slow_cpu) if contended else ("cpu", self._platform.cpu)
        return self._expert(what, cpu, layer, precision, tokens)

    def _expert(self, what: str, compute: Roofline | Measured, layer: int, precision: int, tokens: int) -> int:
        if isinstance(compute, Measured):
            return compute.expert_ns + compute.expert_ns_per_token * tokens
        return self._once((what, layer, precision, tokens), compute, self._params, self._tiers[precision][layer])

    def _once(self, key: tuple[str, int, int, int], compute: Roofline, params: int, size: int) -> int:
        if key not in self._known:
            self._known[key] = compute.ns(params, size, key[3])
        return self._known[key]


#: Of the last replays. Those of a grid are of few machines, and working the times out anew takes as long as the rest.
_recent: deque[Times] = deque(maxlen=8)


def times_of(machine: Platform, geometry: Geometry, tiers: tuple[tuple[int, ...], ...]) -> Times:
    """`Times`, shared by all replays of this process that have the same machine and model."""
    for times in tuple(_recent):
        if times.is_of(machine, geometry, tiers):
            return times
    made = Times(machine, geometry, tiers)
    _recent.append(made)
    return made
