"""Papers' figures by name."""

from __future__ import annotations

from importlib import import_module

from moereplay.results.result import unknown
from moereplay.sweeps.papers import NAMES
from moereplay.sweeps.papers.figure import PaperFigure


def figures_of(paper: str, names: str = "") -> list[PaperFigure]:
    """The figures of a paper, all or those of a comma list. Raises ResultError, suggesting the nearest name."""
    if paper not in NAMES:
        raise unknown("paper", paper, NAMES)
    wanted = [name.strip() for name in names.split(",")] if names else NAMES[paper]
    for name in wanted:
        if name not in NAMES[paper]:
            raise unknown(f"figure of {paper}", name, NAMES[paper])
    folder = paper.replace("-", "_")
    return [import_module(f"moereplay.sweeps.papers.{folder}.{name}").FIGURE for name in dict.fromkeys(wanted)]
