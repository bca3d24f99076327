"""The machine: tiers, links and processors, and whether its memory holds a run.

`simulator/times.py` derives the times of a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from moereplay.simulator.calibration import Band, Calibration, Tried
from moereplay.simulator.capacity import MOST_BYTES, RUNTIME
from moereplay.simulator.rates import OF_CPU, Decisions, Drafting, Loading, Ns, Share
from moereplay.simulator.rates import Measured as Measured  # of a platform, to its readers
from moereplay.simulator.rates import Roofline as Roofline
from moereplay.simulator.wires import MOST_LINKS, MOST_TIERS, REST, Link, LowerTier, Wire
from moereplay.traces.documents import Sparse, Text
from moereplay.traces.schema import canonical
from moereplay.traces.units import GB


class Contention(Sparse):
    """Share of a rate that is left while others work: CPU, link and accelerator read the same memory."""

    later: ClassVar = frozenset({"compute"})

    cpu: Share = 1
    link: Share = 1
    compute: Share = 1  #: of the accelerator's, for what begins while a link works


Watts = Annotated[float, Field(ge=0, le=1e6)]


class Power(Sparse):
    """Watts of a machine: idle, and what each part takes beyond that. They change no replay (`results/result.py`)."""

    idle_w: Watts = 0
    compute_w: Watts = 0
    cpu_w: Watts = 0
    link_w: Watts = 0


#: The figures of a link that its times are made from.
LINK_TIMES = {"bytes_per_s", "latency_ns", "depth", *Link.later}


def _kind(processor: object) -> object:
    """Return `kind` of a table or a model; pydantic allows no validator on a field that it selects itself."""
    return processor.get("kind") if isinstance(processor, dict) else getattr(processor, "kind", None)


Compute = Annotated[Annotated[Roofline, Tag("roofline")] | Annotated[Measured, Tag("measured")], Discriminator(_kind)]


class Platform(Sparse):
    """One machine, with the source of its figures."""

    later: ClassVar = frozenset({"overlap", "memory_bytes", "fault_ns", "tiers", "loading", "calibration", "tried"})
    later |= {"decisions", "reserve_bytes", "draft", "power"}

    name: Text
    summary: Text = ""
    source: Text = ""
    fast_tier: Text = "VRAM"
    slow_tier: Text = "DRAM"
    overlap: Literal["arrival", "none"] = "arrival"  #: `none`: a step computes when all that it awaits has arrived
    #: That hold cache and dense weights; for a warning, and for a tier that has what they leave.
    memory_bytes: float | None = Field(default=None, gt=0, le=MOST_BYTES)
    #: Memory that the system and other programs need: a replay must fit into the rest.
    reserve_bytes: float | None = Field(default=None, ge=0, le=MOST_BYTES)
    fault_ns: Ns = 0  #: of a major page fault, where it is known; for the same warning
    links: tuple[Link, ...] = Field(min_length=1, max_length=MOST_LINKS)
    tiers: tuple[LowerTier, ...] = Field(default=(), max_length=MOST_TIERS)  #: between fast and slow, from the top down
    compute: Compute
    cpu: Compute | None = None
    contention: Contention | None = None
    loading: Loading = Loading()
    decisions: Decisions = Decisions()
    draft: Drafting = Drafting()
    power: Power | None = None  #: for joules; times do not depend on it
    calibration: Calibration | None = None
    tried: Tried | None = None  #: without a calibration: how far off the figures are

    @field_validator("links")
    @classmethod
    def _shares(cls, links: tuple[Link, ...]) -> tuple[Link, ...]:
        if len({link.share is None for link in links}) > 1:
            raise ValueError("expected a share for every link, or for none")
        if len({link.layers == "" for link in links}) > 1:
            raise ValueError("expected layers for every link, or for none")
        if any(link.layers and link.share is not None for link in links):
            raise ValueError("layers cannot be combined with share: name the layers of every link, or give shares")
        if len({link.by_matrix for link in links}) > 1:
            raise ValueError("expected by_matrix for every link, or for none")
        return links

    @field_validator("tiers")
    @classmethod
    def _whole_copies(cls, tiers: tuple[LowerTier, ...], others: ValidationInfo) -> tuple[LowerTier, ...]:
        if tiers and any(link.by_matrix for link in others.data.get("links", ())):
            raise ValueError("[[tiers]] hold whole experts and cannot be combined with by_matrix of a link")
        return tiers

    @field_validator("compute")
    @classmethod
    def _is_no_cpu(cls, compute: Roofline | Measured) -> Roofline | Measured:
        for name in sorted(OF_CPU):
            if getattr(compute, name):
                raise ValueError(f"{name} is valid only in [cpu]")
        return compute

    @field_validator("cpu")
    @classmethod
    def _is_a_cpu(cls, cpu: Roofline | Measured | None, others: ValidationInfo) -> Roofline | Measured | None:
        if isinstance(cpu, Roofline) and cpu.dense_formats:
            raise ValueError("dense_formats: the CPU computes experts only; use formats or expert_bytes_per_s")
        names = [tier.name for tier in others.data.get("tiers", ())]
        if cpu is not None and cpu.tier and names.count(cpu.tier) != 1:
            known = f"of {', '.join(names)}" if names else "of which there are none"
            raise ValueError(f"tier: expected the name of one row of [[tiers]], {known} (got {cpu.tier!r})")
        return cpu

    @model_validator(mode="after")
    def _has_what_it_requires(self) -> Platform:
        if self.decisions.gates and not isinstance(self.compute, Roofline):
            raise ValueError('decisions.gates requires [compute] of kind "roofline"; use ns_per_prediction instead')
        if self.reserve_bytes is not None and self.memory_bytes is None:
            raise ValueError("reserve_bytes requires memory_bytes")
        rest = [tier.name for tier in self.tiers if tier.capacity == REST]
        if len(rest) > 1 or (rest and self.reserve_bytes is None):
            raise ValueError(f"tiers: capacity {REST!r} is for one tier, and requires memory_bytes and reserve_bytes")
        return self

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of each link, in one unit."""
        return tuple(1.0 if link.share is None else link.share for link in self.links)

    @property
    def wires(self) -> tuple[Wire, ...]:
        """Links into the fast tier, then those that fill the lower tiers, from the top down."""
        return (*self.links, *self.tiers)

    @property
    def cpu_tier(self) -> int:
        """The lower tier that the CPU reads, from the top down; -1: the slow tier."""
        if self.cpu is None or not self.cpu.tier or not self.tiers:
            return -1
        return [tier.name for tier in self.tiers].index(self.cpu.tier)

    def without_tiers(self) -> Platform:
        """Return the machine whose first lower tier has every expert: the CPU reads what the links read."""
        cpu = self.cpu and self.cpu.model_copy(update={"tier": ""})
        return self.model_copy(update={"tiers": (), "cpu": cpu})

    @property
    def by_matrix(self) -> bool:
        """True if links read matrix by matrix over the missing experts of a step."""
        return self.links[0].by_matrix

    def queues_together(self, contract: str) -> bool:
        """Return whether all demands of a step are queued when its last one is loaded. Contract `sequential` loads and
        queues one expert at a time.
        """
        return contract == "atomic" and (self.by_matrix or self.overlap == "none")

    @property
    def depends_on_model(self) -> bool:
        """True if a price or the peak depends on the model's KV cache, or a price on the format of its weights."""
        if self.reserve_bytes is not None or self.compute.kv_bytes_per_s is not None:
            return True
        return any(isinstance(of, Roofline) and bool(of.formats) for of in (self.compute, self.cpu))

    @property
    def seal(self) -> str:
        """Digest of the figures and of the calibration."""
        about = self.calibration.model_dump(mode="json", exclude={"digest"}) if self.calibration else None
        return hashlib.sha256(canonical([self.figures(), about])).hexdigest()[:16]

    @property
    def is_edited(self) -> bool:
        """True if figures or calibration differ from those that a calibration wrote."""
        return self.calibration is not None and self.calibration.digest not in ("", self.seal)

    @property
    def calibrated(self) -> Calibration | None:
        """The calibration of its figures; None if there is none or the figures were edited since."""
        return None if self.is_edited else self.calibration

    @property
    def band(self) -> Band | None:
        """Known error of its times: of the held-out runs of its calibration, else of runs that it was tried on."""
        if self.calibration is None:
            return self.tried
        return None if self.is_edited else self.calibration.held_out

    def document(self) -> dict[str, Any]:
        """Return the content of its file: `link` if there is one link, else `links`.

        Defaults are filled in, except for newer figures.
        """
        several = len(self.links) > 1
        rows = [
            link.model_dump(include=LINK_TIMES | ({"share"} if several else set()))
            | ({"layers": link.layers} if link.layers else {})
            | ({"from": link.tier} if link.tier else {})
            for link in self.links
        ]
        about = {"name", "summary", "source", "fast_tier", "slow_tier"}
        about |= {"overlap", "memory_bytes", "fault_ns", "reserve_bytes"}
        links = {"links": rows} if several else {"link": rows[0]}
        return self.model_dump(include=about) | links | self.model_dump(exclude={*about, "links"})

    def figures(self) -> dict[str, object]:
        """Return all figures that a replay's times depend on, without names."""
        parts = {"compute", "cpu", "overlap", "loading", "decisions"} | ({"contention"} if self.contention else set())
        parts |= {"draft"} if self.draft != Drafting() else set()
        rows: list[dict[str, object]] = [link.model_dump(mode="json", include=LINK_TIMES) for link in self.links]
        others: dict[str, object] = self.model_dump(mode="json", include=parts)
        if self.tiers:
            others["tiers"] = [
                tier.model_dump(mode="json", include=LINK_TIMES | {"capacity", "eviction"}) for tier in self.tiers
            ]
        if len(rows) == 1:
            return others | {"link": rows[0]}
        for row, link, share in zip(rows, self.links, self.shares, strict=True):
            row.update({"layers": link.layers} if link.layers else {"share": share / sum(self.shares)})
        return others | {"links": rows}

    def row(self) -> dict[str, object]:
        """Return one line of `moereplay platforms`."""
        return {
            "platform": self.name,
            "what": self.summary,
            "cache": " < ".join((self.fast_tier, *(tier.name for tier in self.tiers))),
            "link GB/s": _each([link.bytes_per_s / GB for link in self.wires]),
            "latency us": _each([link.latency_ns / 1000 for link in self.wires]),
            "CPU": "yes" if self.cpu else "no",
        }


def _each(figures: Sequence[float]) -> float | str:
    """Return one value unchanged, or those of several links joined by +."""
    return figures[0] if len(figures) == 1 else " + ".join(f"{figure:g}" for figure in figures)


class Peak(NamedTuple):
    """Bytes by what needs them, and the memory that is to hold them."""

    parts: Mapping[str, int]
    memory_bytes: float
    stated: bool  #: the platform states the system's memory, so that everything is counted

    @property
    def total(self) -> int:
        """Sum over the parts."""
        return sum(self.parts.values())

    @property
    def will_page(self) -> bool:
        """True if the memory does not hold the parts."""
        return self.total > self.memory_bytes

    @property
    def in_words(self) -> str:
        """The parts, largest units first: `4 GB of the cache, 1.9 GB of dense weights`."""
        return ", ".join(f"{size / GB:.4g} GB of {name}" for name, size in self.parts.items() if size)

    def document(self) -> dict[str, Any]:
        """Return the peak for `about` of a result."""
        known = {"peak_bytes": self.total, "memory_bytes": int(self.memory_bytes), "will_page": self.will_page}
        return known | {"parts": {name.removeprefix("the "): size for name, size in self.parts.items()}}


def peak(machine: Platform, parts: Mapping[str, int], kv_bytes: int) -> Peak | None:
    """Return the peak for a cache, buffers and weights of these `parts`; None if the machine's memory is unknown.

    The KV cache of `kv_bytes`, an assumed runtime and the reserve count where the platform states the reserve.
    """
    if machine.memory_bytes is None:
        return None
    if machine.reserve_bytes is None:
        return Peak(parts, machine.memory_bytes, stated=False)
    others = {"KV cache": kv_bytes, "runtime (assumed)": RUNTIME, "reserve": int(machine.reserve_bytes)}
    return Peak({**parts, **others}, machine.memory_bytes, stated=True)
