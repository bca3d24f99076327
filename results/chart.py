"""Description of a paper's figure as data: the package that replays fills it, the package that draws reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

BOUND = "belady"  #: the series of Belady's bound, which is counted for a replay and not replayed itself
RELATIVE = "relative"  #: begins the column of a value divided by that of another series


class Chart(NamedTuple):
    """Bars over names or lines over numbers; a column of panels for each value, or for each panel of the cells."""

    kind: Literal["bars", "lines"]
    values: Mapping[str, str]  #: column -> what its axis is called
    x_name: str = ""
    x: str = "x"  #: the column along the axis: of the cells, or a value, where lines go from cell to cell
    per: Literal["run", "layer", "lifetime"] = "run"  #: what a row is of
    relative_to: str = ""  #: the series that the values of the others are divided by
    bound: bool = False  #: Belady's misses as a series of their own, from the cells that have a bound
    log: bool = False  #: of the vertical axis
    part: str = ""  #: a column that is a part of the value, drawn red within the grey bar
    shade: bool = False  #: the points of a line get darker along it
    live: str = ""  #: a column that is drawn as well where runs of the live model are given

    @property
    def drawn(self) -> dict[str, str]:
        """The columns that are drawn, with the names of their axes."""
        return {f"{RELATIVE}_{name}" if self.relative_to else name: text for name, text in self.values.items()}
