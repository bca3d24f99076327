"""The command-line grammar of policies: `name:key=value:key=value`; lists of values with `/`, of policies with `,`.

Precision ladders of miss policies are fitted to the stored experts, as none has more bits than those. Ladders of papers
are made for models of 8 or 16 bits: SpecMD's 8/4/2, HOBBIT's pairs 16/4 and 8/2. Their steps are shares of the most
precise copy, so a default ladder is scaled to the stored precision, in whole bits of at least 2, the fewest for which
these papers have quantisers: 16/4 at 8 bits is HOBBIT's 8/2, and 8/4/2 at 4 bits is 4/2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Generic, TypeVar

from moereplay import policies
from moereplay.policies.contract import PAR_SLOTS, Choice, Miss, Number, Numbers, Parameter, Policy, PolicyError
from moereplay.policies.declaration import check_under
from moereplay.traces.texts import hint

PolicyT = TypeVar("PolicyT", bound=Policy)


@dataclass(frozen=True)
class Chosen(Generic[PolicyT]):
    """A policy with its parameters, defaults filled in."""

    policy: PolicyT
    params: dict[str, Any]
    given: frozenset[str] = field(default=frozenset(), compare=False)  #: parameters that were written, not defaults

    @property
    def needs(self) -> frozenset[str]:
        """Capabilities that the trace must have."""
        return self.policy.needs(self.params)

    def text(self, full: bool = False) -> str:
        """Return the spelling that parses back to this choice; `full` names defaults too."""
        given = [p for p in self.policy.params if (full and not is_added(p)) or self.params[p.name] != p.default]
        return ":".join([self.policy.label, *(f"{p.name}={_spell(self.params[p.name])}" for p in given)])

    def par(self) -> list[float]:
        """Return the parameters as floats, in the slots of `own.par`."""
        values = [number for p in self.policy.params for number in p.slots(self.params[p.name])]
        return values + [0.0] * (PAR_SLOTS - len(values))


def is_added(param: Parameter) -> bool:
    """Return whether results of earlier versions lack the parameter."""
    return isinstance(param, Number | Choice) and param.added


def parse(kind: str, text: str) -> Chosen[Any]:
    """Parse a policy. Raises PolicyError naming the policy, the parameter and its allowed values."""
    label, *settings = text.strip().split(":")
    name, _, version = label.partition("@")
    policy = policies.load(kind, name)
    if version not in ("", policy.version):
        raise PolicyError(f"{kind} {label}: the loaded policy is {policy.label}; pass the file of that version")
    given: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise PolicyError(
                f"{kind} {name}: invalid parameter {setting!r}: expected key=value, as in {name}:key=value"
            )
        if key in given:
            raise PolicyError(f"{kind} {name}: {key} is given twice")
        given[key] = _value(policy, _parameter(policy, key), value)
    params = {param.name: param.default for param in policy.params} | given
    if policy.version:
        _check_under(policy, params)
    return Chosen(policy, params, frozenset(given))


def foresight() -> Callable[[Mapping[str, Any]], bool]:
    """Return a function of a configuration's policies, by kind: whether one needs the future."""
    needs = cache(_needs)  # of this caller alone: user policies come and go
    return lambda chosen: any("future" in needs(kind, chosen[kind]) for kind in policies.NAMES)


def deciding() -> Callable[[Mapping[str, Any]], int]:
    """Return a function that counts, for a configuration's policies by kind, how many predict or score."""
    decides = cache(_decides)
    return lambda chosen: sum(decides(kind, chosen[kind]) for kind in policies.NAMES)


def _decides(kind: str, text: str) -> bool:
    try:
        chosen = parse(kind, text)
    except PolicyError:
        return False
    return chosen.policy.decides(chosen.params)


def _needs(kind: str, text: str) -> frozenset[str]:
    try:
        return parse(kind, text).needs
    except PolicyError:  # of a file that is missing or has another version
        return frozenset()


def _check_under(policy: Policy, params: dict[str, Any]) -> None:
    """Check a user policy's declarations, which were checked for its defaults only."""
    try:
        check_under(policy, params)
    except ValueError as error:
        raise PolicyError(f"{policy.kind} {Chosen(policy, params).text()}: {error}") from None


def _parameter(policy: Policy, key: str) -> Parameter:
    by_name = {param.name: param for param in policy.params}
    if key in by_name:
        return by_name[key]
    if not by_name:
        raise PolicyError(f"{policy.kind} {policy.name} has no parameters (got {key!r})")
    raise PolicyError(f"{policy.kind} {policy.name} has no parameter {key!r}: {hint(key, by_name, 'it has')}")


def _value(policy: Policy, param: Parameter, text: str) -> Any:
    try:
        return param.parse(text)
    except ValueError:
        raise PolicyError(
            f"{policy.kind} {policy.name}: invalid {param.name}={text}: expected {param.allowed}"
        ) from None


def _spell(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(map(_spell, value))
    if isinstance(value, str):
        return value
    short = f"{value:.12g}"
    return short if float(short) == value else f"{value:.17g}"  # 17 digits distinguish any two floats


# precision ladders

FEWEST_BITS = 2


def scaled(bits: Sequence[float], stored: float) -> tuple[float, ...]:
    """Return a ladder that begins at the stored bits, with steps of the same shares; equal steps become one."""
    steps = [stored]
    for each in bits[1:]:
        step = max(FEWEST_BITS, int(each * stored / bits[0]))
        steps += [step] if step < steps[-1] else []
    return tuple(steps)


def check_order(chosen: Chosen[Miss]) -> None:
    """Raises PolicyError for a ladder of precisions that does not fall."""
    bits = chosen.policy.bits(chosen.params)
    if list(bits) != sorted(set(bits), reverse=True):
        raise PolicyError(f"miss {chosen.text()}: expected bits in falling order, the most precise first")


def at_most(chosen: Chosen[Miss], stored: float) -> Chosen[Miss]:
    """Return the policy with a ladder of at most the stored bits: a default one is scaled.

    Raises PolicyError if bits that were given, or that no parameter sets, are more than the trace stores.
    """
    check_order(chosen)
    bits = chosen.policy.bits(chosen.params)
    if not bits or bits[0] <= stored:
        return chosen
    ladder = next((param for param in chosen.policy.params if param.name == "bits"), None)
    fits = isinstance(ladder, Numbers) and ladder.low <= stored
    if fits and "bits" not in chosen.given:
        return replace(chosen, params={**chosen.params, "bits": scaled(bits, stored)})
    if fits:
        instead = f"write bits={_spelled(scaled(bits, stored))}"
    else:
        instead = "leave bits out" if "bits" in chosen.given else "choose another miss policy"
    raise PolicyError(
        f"miss {chosen.policy.label}: bits={_spelled(bits)} begins above the {stored:g} bits at which the trace stores "
        f"its experts; {instead}, or import the trace with --expert-bits {bits[0]:g} if the model has that precision"
    )


def _spelled(bits: Sequence[float]) -> str:
    return "/".join(f"{each:g}" for each in bits)


def note(asked: Chosen[Miss], fitted: Chosen[Miss], stored: float) -> str | None:
    """Return the sentence about a default ladder that was scaled; None if it was not."""
    if asked.params == fitted.params:
        return None
    default, used = (_spelled(each.policy.bits(each.params)) for each in (asked, fitted))
    return (
        f"miss {asked.policy.name} uses bits={used} instead of its default {default}: "
        f"the trace stores its experts at {stored:g} bits"
    )
