"""Precision ladders of miss policies: none has more bits than the stored experts.

Ladders of papers are made for models of 8 or 16 bits: SpecMD's 8/4/2, HOBBIT's pairs 16/4 and 8/2. Their steps are
shares of the most precise copy, so a default ladder is scaled to the stored precision, in whole bits of at least 2, the
fewest for which these papers have quantisers: 16/4 at 8 bits is HOBBIT's 8/2, and 8/4/2 at 4 bits is 4/2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moereplay.policies.contract import Miss, Numbers, PolicyError
from moereplay.policies.grammar import Chosen

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
