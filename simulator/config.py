"""One replay's configuration: typed, frozen, with every default filled in and a hash that identifies it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from moereplay.policies.contract import NO_PROFILE, Eviction, Miss, PolicyError, Prefetch, Routing
from moereplay.policies.grammar import Chosen, at_most, parse
from moereplay.results.settings import KINDS, older
from moereplay.simulator.arrivals import ALL, check_together, numbers_in, parse_arrivals
from moereplay.simulator.capacity import by_layer, check_readable, dense_size
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platforms import platform
from moereplay.simulator.times import Times
from moereplay.traces.dense import check_dense_bits, recorded
from moereplay.traces.documents import first_fault
from moereplay.traces.drafts import OFF, parse_drafts
from moereplay.traces.passes import named_schedule, parse_passes
from moereplay.traces.schema import Frozen, Geometry, Trace, TraceError, canonical
from moereplay.traces.summary import experts_per_token, synthetic
from moereplay.traces.texts import whole

NEXT = frozenset({"next_use", "next_pass"})  #: columns that routing makes untrue
FUTURE = "future"  #: the capability of demand that is known in advance


@dataclass(frozen=True)
class Origin:
    """The demand that a configuration is checked against, and its identity in a result."""

    geometry: Geometry
    capabilities: frozenset[str]
    lookahead_depth: int
    digest: str  #: sha256 of everything that the demand depends on
    model: str
    live: bool = False
    synthetic: str = ""  #: how a generator made the routing; empty for recorded routing
    per_token: tuple[float, ...] = ()  #: experts of a token in each layer on average; k everywhere if empty
    recorded: bool = False  #: whether the model itself ran, so that its dense weights were measured


def origin_of(trace: Trace) -> Origin:
    """Return the origin of a recorded trace, which has the capability FUTURE."""
    return Origin(
        geometry=trace.geometry,
        capabilities=trace.capabilities | {FUTURE},
        lookahead_depth=trace.header.lookahead_depth,
        digest=trace.digest,
        model=trace.header.provenance.model,
        synthetic=synthetic(trace.header.provenance),
        per_token=experts_per_token(trace),
        recorded=recorded(trace.header.provenance),
    )


# configuration

#: Raised when the meaning of any counter or time changes: results of other versions are not comparable.
SEMANTICS_VERSION = 1


def parse_reset(text: str) -> int:
    """Return the tokens between resets: 0 for `never`, -1 for `request`, N for a number. Raises ValueError."""
    if text in ("never", "request"):
        return {"never": 0, "request": -1}[text]
    if tokens := whole(text):
        return tokens
    raise ValueError("expected never, request or a number of tokens")


def _capacity(text: str) -> str:
    if text.endswith(".json"):  # its content is the setting, so that results do not depend on a path
        text = by_layer(numbers_in(text, "capacity", "experts, one number per layer", (int,), least=2))
    check_readable(text)
    return text


#: What reads a setting with a grammar of its own, and raises for an invalid one. A text that it returns is the setting.
READ: dict[str, Callable[[str], object]] = {
    "capacity": _capacity,
    "passes": parse_passes,
    "arrivals": parse_arrivals,
    "draft": lambda text: parse_drafts(text).text,
    "reset": parse_reset,
    "dense": dense_size,
    "dense_bits": check_dense_bits,
}


class ReplayConfig(Frozen):
    """Settings of one replay. Field names are the command line's options."""

    capacity: str = "5%"
    eviction: str = "lru"
    prefetch: str = "none"
    miss: str = "fetch"
    routing: str = "standard"
    platform: str = "a100-5gbps"
    contract: Literal["atomic", "sequential"] = "atomic"
    scope: Literal["global", "per_layer", "per_link"] = "global"
    slots: Literal["exact", "padded"] = "exact"
    passes: str = "recorded"
    arrivals: str = "all"
    draft: str = OFF
    reset: str = "never"
    prefetch_at: Literal["gate", "after_demand"] = "gate"
    prefetch_admission: Literal["evict", "free_only"] = "evict"
    lookahead: Literal["recorded", "shuffled_tokens", "shuffled_experts"] = "recorded"
    warm: tuple[tuple[int, int], ...] = ()
    profile: tuple[tuple[int, int], ...] = ()
    resident: tuple[tuple[int, int], ...] = ()
    dense: str = ""
    dense_bits: str = ""
    seed: int = Field(default=0, ge=0, lt=2**63)

    @field_validator(*READ)
    @classmethod
    def _readable(cls, text: str, about: ValidationInfo) -> str:
        name = str(about.field_name)
        if text == cls.model_fields[name].default:
            return text
        read = READ[name](text)
        return read if isinstance(read, str) else text

    @model_validator(mode="after")
    def _go_together(self) -> ReplayConfig:
        if self.dense and self.dense_bits:
            raise ValueError("--dense cannot be combined with --dense-bits")
        check_together(self.arrivals, self.passes)
        return self

    @property
    def arrive(self) -> bool:
        """True if requests arrive over time, so that the order of passes depends on times."""
        return self.arrivals != ALL

    @property
    def schedule(self) -> str:
        """The name of the schedule of passes, its drafts included, for `traces.passes.schedule`."""
        return named_schedule(self.passes, self.draft, self.seed)

    def policy_set(self) -> PolicySet:
        """Parse the four policies. Raises PolicyError."""
        return PolicySet(*(parse(kind, getattr(self, kind)) for kind in KINDS))

    def spelled_out(self) -> dict[str, object]:
        """Return the configuration with every policy parameter written out."""
        chosen = self.policy_set()
        return self.model_dump(mode="json") | {kind: getattr(chosen, kind).text(full=True) for kind in KINDS}

    def stored_at(self, bits: float) -> ReplayConfig:
        """Return the configuration for a model whose experts are stored at `bits`: no copy has more.

        Raises PolicyError if the miss policy requires more.
        """
        miss = parse("miss", self.miss)
        fitted = at_most(miss, bits)
        return self if fitted is miss else self.model_copy(update={"miss": fitted.text()})

    def identity(self, demand: Trace | Origin) -> str:
        """Return a hash of everything that a result depends on: configuration, platform figures, demand, semantics.

        Settings that are newer than the first result format count only if they differ from their default. Raises
        ConfigError if the platform cannot be read.
        """
        fitted = self
        with suppress(PolicyError):  # a configuration that is rejected has no results: keep it as it was written
            fitted = self.stored_at(demand.geometry.expert_bits)
        settings = fitted.spelled_out() | {"platform": platform(self.platform).figures()}
        newer = {name for name, default in older().items() if getattr(self, name) == default}
        counted = {name: value for name, value in settings.items() if name not in newer}
        document = [SEMANTICS_VERSION, demand.digest, counted]
        return hashlib.sha256(canonical(document)).hexdigest()[:16]


@dataclass(frozen=True)
class PolicySet:
    """One policy of each kind."""

    routing: Chosen[Routing]
    prefetch: Chosen[Prefetch]
    eviction: Chosen[Eviction]
    miss: Chosen[Miss]

    def priced(self, times: Times) -> PolicySet:
        """Fill in the parameters that policies leave to the platform."""
        return PolicySet(*(Chosen(one.policy, dict(one.policy.priced(one.params, times.costs))) for one in self.all))

    @property
    def all(self) -> list[Chosen]:
        """The four, in the order of KINDS."""
        return [getattr(self, kind) for kind in KINDS]

    @property
    def needs(self) -> frozenset[str]:
        """Capabilities of a trace that the four use."""
        return frozenset().union(*(each.needs for each in self.all))

    @property
    def reads(self) -> frozenset[str]:
        """Optional columns and arrays that any hook of the four may read."""
        return frozenset().union(*(each.policy.may_read for each in self.all))

    @property
    def own(self) -> list[str]:
        """Policies from user files, as `kind label`."""
        return [f"{each.policy.kind} {each.policy.label}" for each in self.all if each.policy.version]

    @property
    def open_loop(self) -> bool:
        """True if these policies change inputs of the recorded logits."""
        miss = self.miss.policy
        return self.changes_routing or miss.changes_output or bool(miss.bits(self.miss.params))

    @property
    def changes_routing(self) -> bool:
        """True if the demand may differ from the recorded one."""
        return self.routing.policy.choose is not None

    @property
    def profile(self) -> int:
        """Which profile the policies are fitted to, as in the contract."""
        return max((of.policy.profile(of.params) for of in self._fitted), default=NO_PROFILE)

    @property
    def fitted(self) -> str:
        """Name the policies that are fitted to a profile."""
        return " and ".join(f"{of.policy.kind} {of.text()}" for of in self._fitted)

    @property
    def _fitted(self) -> list[Chosen]:
        return [of for of in self.all if of.policy.profile(of.params) != NO_PROFILE]

    def check(self, capabilities: frozenset[str], lookahead_depth: int) -> None:
        """Raises PolicyError naming the policy and the capability that the trace or live model lacks."""
        if len({of.policy.profile(of.params) for of in self._fitted}) > 1:
            raise PolicyError(f"{self.fitted} are fitted to different profiles; choose the same for both")
        for each in self.all:
            for need in sorted(each.needs - capabilities):
                raise PolicyError(f"{each.policy.kind} {each.policy.name} needs {_lacking(need)}")
        depth = self.prefetch.policy.depth(self.prefetch.params)
        if "lookahead" in self.prefetch.needs and depth > lookahead_depth:
            raise PolicyError(
                f"{self.prefetch.text()} looks {depth} layers ahead; the trace recorded {lookahead_depth}"
            )
        for reader in self.all:
            # a profile of the recorded choice is known whatever routing makes of it
            is_profile = reader is self.routing and reader in self._fitted and not reader.policy.may_read & NEXT
            if self.changes_routing and FUTURE in reader.needs and not is_profile:
                raise PolicyError(
                    f"{reader.policy.name} reads the future, which routing {self.routing.policy.name} changes; "
                    "replay it with --routing standard"
                )

    def check_no_future(self) -> None:
        """Raises PolicyError naming a policy that needs the future, where that depends on times."""
        for each in self.all:
            if FUTURE in each.needs:
                raise PolicyError(
                    f"{each.policy.kind} {each.text()} needs the future, which under --arrivals depends on times; "
                    "choose another policy, or --arrivals all"
                )


def _lacking(need: str) -> str:
    record = {"weights": "weights", "logits": "router logits", "lookahead": "look-ahead logits"}
    if need == FUTURE:
        return "the future, which a live run does not know; record the run and replay its trace"
    return f"{need}, which this trace lacks; replay a trace recorded with {record[need]}"


def configure(**settings: object) -> ReplayConfig:
    """Return a validated configuration. Raises ConfigError or PolicyError naming the setting and its allowed values."""
    try:
        config = ReplayConfig.model_validate(settings)
        config.policy_set()
    except ValidationError as error:
        raise ConfigError(first_fault(error)) from None
    except TraceError as error:
        raise ConfigError(str(error)) from None
    return config
