"""How far a replay's mixtures are from the router's own, in six figures per configuration: what a forecast goes by.

All are zero where policies leave the output alone, and grow with what policies do to it. The counters know no bits, so
rounding is worked out from the precisions of the miss policy and those that the model is stored at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moereplay.analysis.ratios import RATIOS
from moereplay.results.result import ResultError


class Change(NamedTuple):
    """What policies did to the mixtures of a run."""

    lost: float  #: gate weight that did not run as chosen, as a share, times that of an assignment of it, 1 on average
    variation: float  #: half |w - w'| between original and used mixture, of the gate weight; 0 to 1 and more
    substitution: float  #: gate weight in whose place another expert ran, as a share
    dropping: float  #: gate weight that nobody ran, as a share
    displacement: float  #: ranks between an assignment's expert and the slot that it fills, mean
    rounding: float  #: mean square of the error of rounding, that of one bit being 1


#: The counter behind each, as messages name it.
COUNTED = {
    "lost": "(mass - mass_kept)**2 per lost assignment",
    "variation": "variation / mass",
    "substitution": "mass_substituted / mass",
    "dropping": "mass_dropped / mass",
    "displacement": "rank_displacement / assignments",
    "rounding": "mass_low_precision and the bits of the miss policy",
}
#: Ratios that the figures are made of.
READ = (
    *("mass_share_kept", "choice_kept", "mean_variation", "mass_share_substituted", "mass_share_dropped"),
    *("mass_share_low_precision", "mean_displacement"),
)
NOTHING = Change(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def change_of(counters: Mapping[str, int | None], miss: str, stored: float) -> Change:
    """Of a run's totals under a miss policy in its full spelling, of a model stored at so many bits.

    Raises ResultError where a counter is missing or the trace has no gate weights.
    """
    found = {name: RATIOS[name].of(counters) for name in READ}
    if None in found.values():
        raise ResultError("no gate weights were counted; replay a trace that has them with this version")
    kept, chosen, variation, substituted, dropped, low, ranks = (value or 0.0 for value in found.values())
    rounding = _rounding(low, 1 - dropped, tiers_of(miss), stored)
    return Change(_lost(1 - kept, 1 - chosen), variation, substituted, dropped, ranks, rounding)


def tiers_of(miss: str) -> Sequence[float]:
    """The precisions of a miss policy, best first, from its full spelling; 0 is as stored."""
    found = re.search(r":bits=([\d./]+)", miss)
    return [float(bits) for bits in found[1].split("/")] if found else [0.0]


def stored_bits(dtype: str) -> float:
    """Of the weights of a model in that type: 32 of `float32`, 4 of `bfloat16+bnb-4bit`."""
    found = re.search(r"\d+", dtype.rpartition("+")[2])
    return float(found[0]) if found else 16.0


def policy_of(config: Mapping[str, Any]) -> str:
    """The policies of a configuration that change what the model answers: `cache_prior`, `prune+drop`."""
    names = [config[kind].partition(":")[0] for kind in ("routing", "miss")]
    return "+".join(name for name in names if name not in ("standard", "fetch")) or "fetch"


def _lost(mass: float, assignments: float) -> float:
    """From the shares that did not run as chosen. Of one heavy expert it is more than of several light ones."""
    return mass * mass / assignments if assignments > 0 else 0.0


def _rounding(low: float, ran: float, tiers: Sequence[float], stored: float) -> float:
    """What ran below the first tier is taken to have run at the last: the counters do not say which it was."""
    return max(ran - low, 0.0) * _noise(tiers[0], stored) + low * _noise(tiers[-1], stored)


def _noise(bits: float, stored: float) -> float:
    """Mean square of the error of rounding to 2**bits values, that of two values being 1."""
    return 0.0 if bits == 0 or bits >= stored else 1 / (2**bits - 1) ** 2
