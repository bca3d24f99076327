"""Labels and remarks that accompany results everywhere: calibration, synthetic routing, idle caches, decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from moereplay.traces.summary import named_synthetic
from moereplay.traces.texts import percent, points

#: The word for seconds that do not rest on measured prices, and why.
ESTIMATED, UNCALIBRATED = "estimated, ", "not calibrated"
ESTIMATE = f"{ESTIMATED}{UNCALIBRATED}"
SYNTHETIC = "synthetic routing"


def one_label(labels: Iterable[str]) -> str:
    """Return a label for rows of several: each kind of run once, with every caution of its labels."""
    cautions: dict[str, dict[str, None]] = {}
    for label in sorted(set(labels)):
        kind, *added = label.split(", ")
        cautions.setdefault(kind, {}).update(dict.fromkeys(added))
    return " / ".join(", ".join((kind, *added)) for kind, added in cautions.items())


def with_routing(label: str, synthetic: str) -> str:
    """Return a label that marks synthetic routing: SIMULATED, synthetic routing."""
    return f"{label}, {SYNTHETIC}" if synthetic and SYNTHETIC not in label else label


def synthetic_of(about: Mapping[str, Any]) -> str:
    """Return how the synthetic routing of a result was made; empty for recorded routing.

    Results of earlier versions state it only in the model's name.
    """
    return about.get("synthetic") or named_synthetic(about.get("model") or "")


def assumptions(routings: Iterable[str]) -> list[str]:
    """Return the note on synthetic routing for a figure or table; empty if all routing was recorded."""
    made = sorted(set(routings) - {""})
    if not made:
        return []
    return [f"routing is synthetic ({' / '.join(made)}): hit rates are an assumption"]


def seconds_in_words(about: Mapping[str, Any], calibrated: str = "calibrated, ") -> str:
    """Return the basis of a result's times, from its `about`; `calibrated` is a prefix of the calibration."""
    if about.get("seconds") == "calibrated":
        text = f"{calibrated}{about.get('calibration')}"
    else:
        text = f"{ESTIMATED}{about.get('uncalibrated') or UNCALIBRATED}"
    return f"{text}; {about['band']}" if about.get("band") else text


# -- Remarks on caches that stay empty and on lower tiers that are nearly useless, from the counters of a replay.

LEAST = 0.05  #: of the bytes that lower tiers must catch to be worth a replay without a remark

Rows = Mapping[str, Any]  #: a result as `Result.to_json` gives it, or a row of a frame of results


def idle(rows: Iterable[Rows]) -> list[str]:
    """Return one line for each cache that stays empty and each platform whose lower tiers are nearly useless."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        config, totals = row["config"], row["totals"]
        if _is_never_filled(config, totals):
            found.setdefault(EMPTY, {})[f"miss {config['miss']}"] = None
        caught = _caught(totals)
        if caught is not None and caught < LEAST:
            text = USELESS.format(percent(max(caught, 0.0)))
            found.setdefault(text, {})[f"{config['platform']} at {config['capacity']}"] = None
    return [f"{', '.join(names)}: {text}" for text, names in found.items()]


def bracketed(rows: Iterable[Rows]) -> list[str]:
    """Return the note on Belady's bound for pools whose experts differ in bytes, if there are any."""
    gaps = [gap for row in rows if (gap := _bracket(row["bounds"] or {})) is not None]
    return [f"{BRACKETED}; {within(max(gaps))}"] if gaps else []


def within(gap: float) -> str:
    """Return how far a way to evict stays below its bound: `feasible within 0.05 points`."""
    return f"feasible within {points(gap)}" if gap else "feasible"


def _bracket(bounds: Mapping[str, int | None]) -> float | None:
    """Return the uncertainty of the most hits as a share of accesses; None if it is known exactly or has no bound."""
    most, feasible, accesses = (bounds.get(name) for name in ("belady_hits", "feasible_hits", "accesses"))
    return None if most is None or feasible is None or not accesses else (most - feasible) / accesses


BRACKETED = "belady: upper bound where experts of a pool differ in bytes"
EMPTY = "nothing is ever loaded, so that a cache that starts empty stays empty; --warm FILE fills it at the start"
USELESS = (
    "lower tiers catch {} of the bytes that the cache loads: a lower tier includes the experts of the cache above it, "
    "so it helps only if it is larger"
)


def _is_never_filled(config: Mapping[str, Any], totals: Mapping[str, Any]) -> bool:
    loaded = (totals["bytes_demand"] or 0) + (totals["bytes_prefetch"] or 0)
    return not config.get("warm") and not loaded and bool(totals["misses"])


def _caught(totals: Mapping[str, Any]) -> float | None:
    """Return the share of the cache's loads that a lower tier already held; None without lower tiers or loads."""
    loaded, lower = totals["bytes_demand"] + totals["bytes_prefetch"], totals.get("bytes_lower")
    return 1 - lower / loaded if lower and loaded else None


# An assumed price of decisions: whether the order of two results would turn if their policies took time to decide. A
# replay charges decisions only where its platform states their price (`[decisions]`). Published engines take 6 to 47 us
# per layer, by policy.

ASSUMED_NS = 10_000  #: per layer, of each policy that predicts or scores
NS = 1e9


class Ranked(NamedTuple):
    """A result in a ranking by speed."""

    name: str
    tokens_per_s: float
    deciding: int  #: policies that predict or score

    def slowed(self, layers: int) -> float:
        """Return tokens/s if each deciding policy takes the assumed time in every layer."""
        return NS / (NS / self.tokens_per_s + self.deciding * layers * ASSUMED_NS)


def turned(first: Ranked, second: Ranked, layers: int) -> str | None:
    """Return a remark if the faster one would be the slower one under the assumed price, else None."""
    slower, faster = first.slowed(layers), second.slowed(layers)
    if first.tokens_per_s < second.tokens_per_s or slower >= faster:
        return None
    return (
        f"{second.name} would be faster than {first.name} if each policy that predicts or scores took "
        f"{ASSUMED_NS // 1000} us per layer (assumed; published: 6 to 47 us): {faster:,.4g} against "
        f"{slower:,.4g} tokens/s; set the real cost in [decisions] of the platform"
    )
