"""Compare the bytes that `--quant` gives a known model with published files.

Last changed in commit e0f141b0. Are bytes of `--quant` those of published files?
Answer: docs/models.md.

    python -m studies.quant_sizes cells.csv

The file has columns `model`, `quant` and `model_gib`, as collections of measured runs do. Rows of models or
quantisations that are not known are left out. One row is printed for each model, quantisation and size.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from moereplay.analysis.tables import console, table
from moereplay.traces.checkpoints.found import model_of
from moereplay.traces.geometry import by_spelling
from moereplay.traces.schema import TraceError


def main() -> None:
    """Print the table."""
    with Path(sys.argv[1]).open(newline="") as stream:
        found = {(row["model"], row["quant"], row["model_gib"]) for row in csv.DictReader(stream)}
    console().print(table([row for each in sorted(found) if (row := compared(*each))]))


def compared(model: str, quant: str, gib: str) -> dict[str, object] | None:
    """Return the row of one file, None if its model or quantisation is not known."""
    name = model.partition("/")[0].lower()
    if not gib or name not in by_spelling():
        return None
    quant = quant.partition(" ")[0].partition(",")[0]
    try:
        known = model_of(name, quant)
    except TraceError:
        return None
    geometry = known.geometry
    ours = (geometry.total_bytes + geometry.dense_bytes) / 2**30
    return {
        "model": name,
        "quant": quant,
        "published GiB": float(gib),
        "here": ours,
        "error": f"{100 * (ours / float(gib) - 1):+.1f}%",
        "bits of experts": geometry.expert_bits,
        "note": known.note,
    }


if __name__ == "__main__":
    main()
