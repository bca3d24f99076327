"""The section of rows that people filed of their own runs: those that were predicted blind, and the others.

A prediction is blind if no author of the code that made it can have known the measurement: the code was committed to
this repository on an earlier day than the one since which the measurement is public.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from datetime import date
from statistics import median

from evidence.comparison import markdown_table
from moereplay.calibration.rows import HITS, ROOT, Filed
from moereplay.traces.texts import counted, in_markdown

Dated = tuple[Filed, date | None]  #: with the day of the code, if the prediction is blind
HEAD = """## Runs that people filed

[Rows](../../docs/logs.md#file-a-measured-run) of people's own runs, none of which was fitted. A prediction is *blind*
if its code was committed on an earlier day than the one since which the measurement is public. Of the others that is
not known: their code is newer, was changed, or is not in this repository's history."""
COLUMNS = ("run", "machine", "model", "engine", "quantity", "predicted from", "predicted", "measured", "error", "code")


def blind_since(row: Filed) -> date | None:
    """Return the day on which the row's code was committed if the prediction is blind, else None."""
    day = committed(row.code.commit or f"v{row.code.version}")
    return day if day and row.public and day < row.public else None


def committed(revision: str) -> date | None:
    """Return the day of a commit or a tag of this repository, None if it has no such one."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%cs", "--end-of-options", revision, "--"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return date.fromisoformat(found.stdout.strip()) if found.returncode == 0 else None


def in_words(day: date | None) -> str:
    """Return the remark of the table."""
    return f"blind: by code of {day}" if day else ""


def filed_markdown(rows: Sequence[Dated]) -> str:
    """Return the section: blind predictions, then the others."""
    parts = [HEAD]
    for title, own in (
        ("Predicted blind", [row for row, day in rows if day]),
        ("Not known to be blind", [row for row, day in rows if not day]),
    ):
        parts += [f"### {title}", *_table(own)] if own else [f"### {title}", "No rows."]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Filed]) -> list[str]:
    said = []
    for what, unit, of_hits in (("hit rate", "points", True), ("time", "%", False)):
        off = [abs(_error(row)) for row in rows if (row.quantity == HITS) == of_hits]
        if off:
            worst = f"median |error| {median(off):.2f} {unit}, worst {max(off):.2f} {unit}"
            said.append(f"{counted(len(off), what)}: {worst}.")
    return [" ".join(said), markdown_table(COLUMNS, map(_line, rows))]


def _error(row: Filed) -> float:
    """Return the error: points of hit rates, percent of times."""
    return row.predicted - row.measured if row.quantity == HITS else 100 * (row.predicted / row.measured - 1)


def _line(row: Filed) -> list[str]:
    texts = (row.id, row.machine, row.model, row.engine, row.quantity, row.predicted_from)
    numbers = (f"{row.predicted:.4g}", f"{row.measured:.4g}", f"{_error(row):+.2f}")
    return [*map(in_markdown, texts), *numbers, row.code.commit[:12] or row.code.version]
