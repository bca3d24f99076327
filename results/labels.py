"""What results are called wherever they are shown: what their seconds rest on, and whether their routing was made."""

from collections.abc import Iterable, Mapping
from typing import Any

from moereplay.traces.synthetic import named_synthetic

#: Of such as do not rest on measured prices.
ESTIMATE = "an estimate, not calibrated"
SYNTHETIC = "synthetic routing"


def with_routing(label: str, synthetic: str) -> str:
    """Return a label that also says whether the routing is synthetic: SIMULATED, synthetic routing."""
    return f"{label}, {SYNTHETIC}" if synthetic else label


def synthetic_of(about: Mapping[str, Any]) -> str:
    """Return how the routing of a result was made; empty for recorded routing.

    Results of earlier versions say it by the name of the model alone.
    """
    return about.get("synthetic") or named_synthetic(about.get("model") or "")


def assumptions(routings: Iterable[str]) -> list[str]:
    """Return the sentence that stands with figures of synthetic routing; none where all of it was recorded."""
    made = sorted(set(routings) - {""})
    if not made:
        return []
    return [f"routing is synthetic ({' / '.join(made)}): hit rates are an assumption"]


def seconds_in_words(about: Mapping[str, Any], calibrated: str = "calibrated, ") -> str:
    """Return what the seconds of a result rest on, from its `about`; `calibrated` comes before the calibration."""
    if about.get("seconds") == "calibrated":
        return f"{calibrated}{about.get('calibration')}"
    return f"an estimate, {about['uncalibrated']}" if about.get("uncalibrated") else ESTIMATE
