"""Lines that are a token at a layer each, as columns, and the requests they make up; read some at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.importers.by_request import (
    CHANGED,
    Ends,
    Grid,
    Keys,
    by_request,
    distinct,
    grids,
    prompt_of,
    renumbering,
)
from moereplay.traces.importers.contract import Options, Shape
from moereplay.traces.schema import MOST_LAYERS, TOKEN_ARRAYS, Geometry, Request, TraceError, Values, check_values

KEYS = ("request", "token", "layer")
FLOATS = ("weights", "logits")
LISTS = ("experts", *FLOATS)
PHASE = Values("iu", 0, 1)
KEPT = 1 << 26  #: bytes of rows that are held instead of reading the file again: of some 50 MB of text
#: How checked numbers are held: as they are stored.
NARROW = {name: np.dtype(TOKEN_ARRAYS[name][0]) for name in (*FLOATS, "token_ids")}
NARROW |= {"experts": np.dtype(TOKEN_ARRAYS["chosen"][0]), "phase": np.dtype(np.int8)}


@dataclass(frozen=True)
class Rows:
    """N lines, each one token at one layer; `lines` are their numbers in the file."""

    file: Path
    lines: np.ndarray
    request: np.ndarray
    token: np.ndarray
    layer: np.ndarray
    experts: np.ndarray  #: (N, k)
    weights: np.ndarray | None = None  #: (N, k)
    logits: np.ndarray | None = None  #: (N, E)
    phase: np.ndarray | None = None
    token_ids: np.ndarray | None = None  #: of the row's token, the same at every layer

    def columns(self) -> dict[str, np.ndarray]:
        """Return the recorded arrays by name, in compact types; each number has been checked."""
        given = {name: getattr(self, name) for name in ("lines", *KEYS, *NARROW)}
        there = {name: rows for name, rows in given.items() if rows is not None}
        return {name: rows.astype(NARROW.get(name) or _narrow(rows), copy=False) for name, rows in there.items()}

    def narrowed(self) -> Rows:
        """Return the rows in few bytes, to be held."""
        return Rows(self.file, **self.columns())

    def __post_init__(self) -> None:
        """Raises TraceError naming the line on which an expert is repeated."""
        refuse_twice(self.file, self.lines, self.experts)


def _narrow(keys: np.ndarray) -> np.dtype:
    """Return the smallest type for numbers of lines, requests, tokens or layers."""
    if not len(keys) or keys.dtype.kind != "i":
        return keys.dtype
    return np.promote_types(np.min_scalar_type(-1 - int(keys.max())), np.min_scalar_type(min(int(keys.min()), -1)))


def refuse_twice(file: Path, lines: np.ndarray, experts: np.ndarray) -> None:
    """Raises TraceError naming the line (N,) on which an expert (N, k) is repeated."""
    if experts.shape[-1] < 2:
        return
    ordered = np.sort(experts, axis=-1)
    twice = np.argwhere((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0))
    if len(twice):
        row, rank = twice[0]
        raise TraceError(
            f"{file} line {lines[row]}: expert {ordered[row, rank]} is repeated: expected each expert once"
        )


class Seen:
    """The facts found by a first reading of a file, and its rows if they are few enough to keep."""

    def __init__(self, pieces: Iterable[Rows], keep: bool = True) -> None:
        """Raises TraceError naming a line that cannot be read."""
        self._kept: list[Rows] | None = [] if keep else None
        self._room = KEPT
        self.ends = Ends()
        self.k, self.highest = 0, -1
        self.logits: int | None = None  #: experts (E) that they are of
        self.phased = False  #: whether prompts can be recognised
        self.layers = np.zeros(0, np.int64)  #: (L,) numbers in the file, rising
        for rows in pieces:
            self._add(rows)
            self._keep(rows)

    def again(self, pieces: Iterable[Rows]) -> Iterable[Rows]:
        """Return the rows again: the kept ones, else a second reading."""
        return pieces if self._kept is None else self._kept

    def renumber(self, numbers: np.ndarray) -> None:
        """Rename request i to `numbers[i]`."""
        self.ends.renumbered(numbers)
        self._kept = self._kept and [replace(rows, request=numbers[rows.request]) for rows in self._kept]

    def _keep(self, rows: Rows) -> None:
        if self._kept is None:
            return
        narrow = rows.narrowed()
        self._room -= sum(values.nbytes for values in narrow.columns().values())
        self._kept.append(narrow)
        if self._room < 0:
            self._kept = None

    def _add(self, rows: Rows) -> None:
        self.ends.add(rows.request)
        self.layers = np.union1d(self.layers, distinct(rows.layer))
        if len(self.layers) > MOST_LAYERS:
            renumbering(self.layers)
        self.k, self.highest = max(self.k, rows.experts.shape[1]), max(self.highest, int(rows.experts.max()))
        self.logits = None if rows.logits is None else rows.logits.shape[1]
        self.phased = rows.phase is not None

    def shape(self, options: Options) -> Shape:
        """Return the shape of a file that does not state its number of experts."""
        return options.shape_of(len(self.layers), self.k, self.highest)


class Survey:
    """Find which layers route and how many ranks are used, from ids (T, L, k) added in parts.

    Engines dump ids for every hidden layer. One without experts keeps what its buffer was filled with, the same number
    in every place, and so does a rank beyond the model's k.
    """

    def __init__(self) -> None:
        self._least = self._most = np.zeros((0, 0), np.int64)  #: (L, k) each

    def add(self, ids: np.ndarray, place: str) -> None:
        """Add tokens. Raises TraceError for different layers or k, or for invalid ids."""
        if ids.ndim != 3 or ids.dtype.kind not in "iu" or not ids.size:
            raise TraceError(f"{place} is {ids.dtype}{ids.shape}: expected ids with axes token, layer, rank")
        check_values(ids, "chosen", place)
        least, most = ids.min(0).astype(np.int64), ids.max(0).astype(np.int64)
        if not self._least.size:
            self._least, self._most = least, most
        if least.shape != self._least.shape:
            raise TraceError(f"{place} has (layers, k) = {least.shape}: expected {self._least.shape}, as the first")
        self._least, self._most = np.minimum(self._least, least), np.maximum(self._most, most)

    @property
    def seen(self) -> bool:
        """True if there were any ids."""
        return bool(self._least.size)

    @property
    def routes(self) -> np.ndarray:
        """(L,) bool: True if a layer routes, that is, if its ids differ."""
        least, most = self._least[:, : self.k].min(1), self._most[:, : self.k].max(1)
        return (least < most) | ((self.k == 1) & (most >= 0))

    @property
    def k(self) -> int:
        """Ranks that are used, at least 1: the others are -1 throughout."""
        used = np.flatnonzero(self._most.max(0) >= 0)
        return int(used[-1]) + 1 if len(used) else 1

    @property
    def highest(self) -> int:
        """The largest id of a layer that routes, -1 if none does."""
        return int(self._most[self.routes].max(initial=-1))

    def kept(self, ids: np.ndarray) -> np.ndarray:
        """Return ids (T, L, k) of the layers that route and the ranks that are used."""
        return ids[:, self.routes, : self.k]

    def notes(self) -> list[str]:
        """Return notes about layers and ranks that are left out."""
        dense, width = np.flatnonzero(~self.routes).tolist(), self._least.shape[1]
        ranks = f"ids are padded from {self.k} to {width} per token; the padding is left out"
        layers = f"layers {', '.join(map(str, dense))} have one constant id (dense): left out"
        return [layers] * bool(dense) + [ranks] * (self.k < width)


def streamed(file: Path, pieces: Iterable[Rows], seen: Seen) -> Iterator[Rows]:
    """Yield the rows of one request after the other, by number, their layers from 0 on, k ids in each.

    `pieces` are a second reading of the file, which begins only if the first one kept no rows.
    """
    numbers, found = seen.layers, (rows.columns() for rows in seen.again(pieces))
    for columns in by_request((_widened(each, seen.k) for each in found), seen.ends, str(file)):
        layer = np.searchsorted(numbers, columns["layer"])
        if layer.max() >= len(numbers):
            raise TraceError(f"{file}: {CHANGED}")
        yield Rows(file, **columns | {"layer": layer})


def emptied(held: list[Rows]) -> Iterator[Rows]:
    """Yield the rows of a list and empty it."""
    held.reverse()
    while held:
        yield held.pop()


def _widened(columns: dict[str, np.ndarray], k: int) -> dict[str, np.ndarray]:
    """Widen rows to k ids, with -1 and no weight where the file has fewer."""
    for name, fill in (("experts", -1), ("weights", 0)):
        if name in columns and (width := columns[name].shape[1]) < k:
            columns = columns | {name: np.pad(columns[name], ((0, 0), (0, k - width)), constant_values=fill)}
    return columns


def fits(cell: Any, allowed: Values) -> bool:
    """Return whether a value of a JSON document is a number in the range; true and false are not."""
    return (
        type(cell) is int or (type(cell) is float and "f" in allowed.kinds)
    ) and allowed.least <= cell <= allowed.most


def requests_in(found: Iterable[Rows], geometry: Geometry, options: Options, pruned: bool = False) -> Iterator[Request]:
    """Yield the requests of rows that come some requests at a time."""
    for rows in found:
        yield from requests_of(rows, geometry, options, pruned)


def requests_of(rows: Rows, geometry: Geometry, options: Options, pruned: bool = False) -> Iterator[Request]:
    """Yield the requests of rows by number. Raises TraceError naming request and layer if a layer lacks tokens.

    `pruned`: the last layer may lack prompt tokens whose output is not read, and then has -1 there.
    """
    place = str(rows.file)
    for grid in grids(Keys(rows.request, rows.token, rows.layer, geometry.layers, rows.lines, place)):
        first = None if rows.phase is None else _by_token(grid, rows.phase)
        prompt = 0 if first is None else prompt_of(first, grid.request, place)
        _refuse_holes(grid, place, prompt - 1 if pruned else 0)
        yield Request(
            grid.dense(rows.experts, -1),
            options.prompt_of(grid.tokens, prompt),
            weights=None if rows.weights is None else grid.dense(rows.weights, 0),
            logits=None if rows.logits is None else grid.dense(rows.logits, 0),
            token_ids=None if rows.token_ids is None else _by_token(grid, rows.token_ids),
        )


def _by_token(grid: Grid, values: np.ndarray) -> np.ndarray:
    """Return the value (T,) of the last row of each token."""
    found = np.zeros(grid.tokens, values.dtype)
    found[grid.cells // grid.width] = values[grid.rows]
    return found


def _refuse_holes(grid: Grid, place: str, pruned: int) -> None:
    """Refuse missing rows before a dense array is made: a few rows may name many cells.

    The first `pruned` tokens may be missing at the last layer.
    """
    token, layer = np.divmod(grid.cells, grid.width)
    needed = (token >= pruned) | (layer < grid.width - 1)
    per_layer = np.bincount(layer[needed], minlength=grid.width)
    expected = np.full(grid.width, grid.tokens)
    expected[-1] -= max(pruned, 0)
    short = np.flatnonzero(per_layer < expected)
    if len(short):
        lacking = int(short[0])
        present = token[layer == lacking]
        first = max(pruned, 0) if lacking == grid.width - 1 else 0
        missing = np.setdiff1d(np.arange(first, grid.tokens), present)[0]
        raise TraceError(
            f"{place}: request {grid.request}: layer {lacking} has {len(present)} tokens of {grid.tokens} "
            f"(token {grid.first_token + missing} is missing): expected every token at every layer"
        )
