"""Maps by matplotlib: a coloured cell for each pair of words, with its value in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from moereplay.analysis.figures.chart import Tile
from moereplay.analysis.palette import INK
from moereplay.traces.texts import digits

COLOURS = colormaps["viridis"]  #: dark is little; even to those who see few colours
LIGHT = 0.55  #: from this part of the scale on, letters are dark
OUTLINE = "#D55E00"


def draw_tiles(axes: Axes, tiles: Sequence[Tile]) -> None:
    """Draw the map; colours are on a logarithmic scale, from the least to the largest value."""
    columns, rows = (list(dict.fromkeys(getattr(tile, name) for tile in tiles)) for name in ("column", "row"))
    known = [tile.value for tile in tiles if tile.value > 0]
    least, most = min(known, default=1.0), max(known, default=1.0)
    for tile in tiles:
        at = columns.index(tile.column), rows.index(tile.row)
        if tile.value > 0:
            level = math.log(tile.value / least) / math.log(most / least) if most > least else 1.0
            axes.add_patch(Rectangle((at[0] - 0.5, at[1] - 0.5), 1, 1, facecolor=COLOURS(level), edgecolor="white"))
            letters = INK if level >= LIGHT else "white"
            axes.text(*at, digits(tile.value, 3), ha="center", va="center", fontsize=7.5, color=letters)
        else:
            axes.text(*at, "-", ha="center", va="center", fontsize=7.5, color=INK)
    for tile in tiles:
        if tile.outlined:
            corner = columns.index(tile.column) - 0.5, rows.index(tile.row) - 0.5
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=OUTLINE, linewidth=2.2, zorder=3))
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.grid(visible=False)
