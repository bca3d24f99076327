"""Read properties of a figure for tests, and make rows of another policy."""

from __future__ import annotations

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def texts(figure: Figure) -> list[str]:
    return [text.get_text().replace("\N{NO-BREAK SPACE}", " ") for text in figure.texts]


def note(figure: Figure) -> str:
    """Return the text below the panels, whose lines are drawn from the last to the first."""
    return " ".join(reversed(texts(figure)))


def drawn(axes: Axes) -> dict[str, list[float]]:
    """Label of each line -> its y values."""
    return {str(line.get_label()): np.asarray(line.get_ydata()).tolist() for line in axes.get_lines()}


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def renamed(frame: pl.DataFrame, eviction: str) -> pl.DataFrame:
    identity = pl.concat_str(pl.col("about").struct.field("identity"), pl.lit(eviction))
    forms = pl.concat_str(pl.col("config").struct.field("capacity"), pl.lit(" = much"))
    return frame.with_columns(
        pl.col("config").struct.with_fields(eviction=pl.lit(eviction)),
        pl.col("about").struct.with_fields(identity=identity, capacity_forms=forms),
    )
