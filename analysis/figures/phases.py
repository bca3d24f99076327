"""Which phases the numbers of a figure cover, in words."""

from __future__ import annotations

import polars as pl

from moereplay.results.counters import PHASES
from moereplay.results.read import layers

ONLY = {"prefill": "every pass is a prompt's", "decode": "no prompt was replayed"}


def phases_in(frame: pl.DataFrame) -> list[str]:
    """The phases that have passes, in their order; none where no row of a layer was kept."""
    found = set(layers(frame)["phase"])
    return [phase for phase in PHASES if phase in found]


def covered(frame: pl.DataFrame) -> str:
    """A sentence for a figure of totals."""
    found = phases_in(frame)
    if len(found) > 1:
        return "Prefill and decode together."
    return f"{found[0].capitalize()} only: {ONLY[found[0]]}." if found else ""
