"""What fewer bits cost: every expert at 8, 4, 3 and 2 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moereplay.sweeps.studies.study import Study
from moereplay.traces.schema import Geometry

BITS = (8, 4, 3, 2)


def sets(geometry: Geometry) -> Mapping[str, Mapping[str, Any]]:
    """One tier each, which every miss fetches."""
    return {"lru": {}, "lowest_bit": {"miss": [f"lowest_bit:bits={bits}" for bits in BITS]}}


STUDY = Study(
    summary="every expert fetched at 8, 4, 3 and 2 bits",
    source="SpecMD, arXiv 2602.03921, Table 1",
    capacity="25%",
    sets=sets,
)
