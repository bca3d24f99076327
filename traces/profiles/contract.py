"""Interface of formats of expert counts, and the ranking (profile) that follows from counts.

Counts have no order of tokens, so no hit of any cache follows from them. What does is a *profile*: experts, the most
often chosen first, which `static` and `pinned` keep and `--warm` loads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moereplay.traces.geometry import KnownModel
from moereplay.traces.importers.by_request import moe_layers
from moereplay.traces.importers.sources import refuse_unreadable
from moereplay.traces.profiles import MODULES, NAMES
from moereplay.traces.schema import MOST_EXPERTS, MOST_LAYERS, TraceError, shown

NO_ORDER = "counts have no token order: they give no hit rate without a trace"
EVEN = 0.95  #: a layer with a smaller share of the choices of the busiest one is named
MOST_CELLS = 1 << 22  #: layers x experts: the largest models known have 1 << 16
MOST_COUNT = 2**53  #: of one expert: whole up to here as a float


@dataclass(frozen=True)
class Counts:
    """Choices of each expert, (L, E) float64, with notes on assumptions."""

    chosen: np.ndarray
    notes: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None  #: MoE layers (L,) of the rows where not all were counted, ascending

    def __str__(self) -> str:
        return f"{self.chosen.shape[0]} layers of {self.chosen.shape[1]} experts"


@dataclass(frozen=True)
class Form:
    """A format of counts. `sniff` never raises for a readable path; `read` raises TraceError."""

    name: str
    summary: str
    formats: str
    sniff: Callable[[Path], bool]
    read: Callable[..., Counts]  #: takes the path and, where `named`, whose counts are read
    named: bool = False  #: whether a file may hold counts of several models, of which --columns counts=NAME says one


def tabulated(path: Path, cells: dict[tuple[int, int], float], experts: int | None, notes: tuple[str, ...]) -> Counts:
    """Return counts from cells by (the model's layer, expert); layers without counts are treated as dense.

    `experts` is the number per layer if the file states it, else the highest id + 1.
    """
    if not cells or not any(cells.values()):
        raise TraceError(f"{path}: no expert was counted: expected at least one")
    places = np.array(list(cells), np.int64)
    most = np.array([MOST_LAYERS, experts or MOST_EXPERTS])
    beyond = places[(places >= most).any(1)]
    if len(beyond):
        expected = f"layers below {most[0]:,} and experts below {most[1]:,}"
        raise TraceError(f"{path}: layer {beyond[0, 0]}, expert {beyond[0, 1]}: expected {expected}")
    layer, said = moe_layers(places[:, 0])
    size = int(layer.max()) + 1, experts or int(places[:, 1].max()) + 1
    check_size(path, *size)
    chosen = np.zeros(size)
    chosen[layer, places[:, 1]] = list(cells.values())
    return checked(path, chosen, (*notes, *said))


def checked(path: Path, chosen: np.ndarray, notes: tuple[str, ...]) -> Counts:
    """Return checked counts (L, E) without dense layers. Raises TraceError naming the first invalid count."""
    check_size(path, *chosen.shape)
    values = chosen.astype(np.float64)
    wrong = np.argwhere(~((values >= 0) & (values < MOST_COUNT)))
    if len(wrong):
        layer, expert = wrong[0]
        raise TraceError(f"{path}: layer {layer}, expert {expert}: invalid count {chosen[layer, expert]}")
    if not values.any():
        raise TraceError(f"{path}: every count is 0: expected how often experts were chosen")
    kept = values[values.any(1)]
    left = [f"{len(values) - len(kept)} layers without choices left out: dense"] if len(kept) < len(values) else []
    sums = kept.sum(1)
    few = np.flatnonzero(sums < EVEN * sums.max())
    listed = ", ".join(map(str, few[:4].tolist())) + (", ..." if len(few) > 4 else "")
    uneven = f"MoE layers {listed} have fewer choices than others: their experts rank lower than they might"
    return Counts(kept, (*notes, *left, *[uneven] * bool(len(few))))


def check_size(path: Path, layers: int, experts: int) -> None:
    """Raise TraceError for sizes that no model has, before memory is allocated."""
    if not 0 < layers <= MOST_LAYERS or not 0 < experts <= MOST_EXPERTS or layers * experts > MOST_CELLS:
        raise TraceError(f"{path}: invalid sizes of {layers:,} layers of {experts:,} experts: expected a model's sizes")


def same_shape(path: Path, names: list[str], arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Return the arrays. Raises TraceError naming the first whose shape differs from that of the first array."""
    for name, array in zip(names, arrays, strict=True):
        if array.shape != arrays[0].shape:
            theirs = f"{shown(names[0])} has {arrays[0].shape}"
            raise TraceError(f"{path}: {shown(name)} has shape {array.shape}, {theirs}; pass one of them")
    return arrays


def check_model(path: Path, counts: Counts, model: KnownModel) -> None:
    """Raise TraceError if the counts have more layers or experts than the model."""
    geometry = model.geometry
    layers, experts = counts.chosen.shape
    known = counts.layers[-1] < geometry.layers if counts.layers else layers == geometry.layers
    if not known or experts > geometry.experts:
        theirs = f"{model.name} has {geometry.layers} of {geometry.experts}"
        raise TraceError(f"{path} has {counts}, {theirs}; pass the model that was counted")


def ranked(chosen: np.ndarray, layers: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Return (layer, expert) of all chosen experts (L, E), the most frequent first, ties by layer and expert.

    `layers` (L,) are the MoE layers of the rows, ascending; without them 0 and on.
    """
    numbers = range(len(chosen)) if layers is None else layers
    flat = chosen.ravel()
    order = np.argsort(-flat, kind="stable")
    places = [divmod(int(x), chosen.shape[1]) for x in order if flat[x]]
    return [(numbers[row], expert) for row, expert in places]


# -- Which form a file of counts has: the one that is named, or the first that recognises it.


def load(name: str) -> Form:
    """Import a format by its name in `NAMES`."""
    return getattr(importlib.import_module(f"moereplay.traces.profiles.{MODULES[name]}"), name.upper())


def detect(path: Path, named: str | None = None) -> Form | None:
    """Return the named format, or the first that recognises the file; None if there is none.

    Raises TraceError if nothing can be read.
    """
    refuse_unreadable(path)
    if named:
        return load(named) if named in NAMES else None
    return next((form for form in map(load, NAMES) if form.sniff(path)), None)


def markdown() -> str:
    """Return the Markdown table of formats in docs/trace-format.md."""
    rows = [f"| `{form.name}` | {form.summary} | {form.formats} |" for form in map(load, NAMES)]
    return "\n".join(["| format | what | read from |", "|---|---|---|", *rows])
