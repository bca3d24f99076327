"""Read a foreign trace by the importer that is named, or the first that recognises it.

Ids that are not experts of their layer are renumbered here: those that count on through the layers (`--ids global`),
and those of experts without weights (`--real-experts`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from moereplay.traces.importers import MODULES, NAMES, npz, recognise, table
from moereplay.traces.importers.contract import ASSUMED, Foreign, Importer, Options
from moereplay.traces.importers.sources import refuse_unreadable
from moereplay.traces.importers.text import suffix_of
from moereplay.traces.patterns import experts_per_layer, ranges_by_layer
from moereplay.traces.schema import Geometry, Header, Request, TraceError
from moereplay.traces.texts import hint

COLUMNS, PLAIN = "columns", "generic"  #: importers of named columns, and of the plain formats


def names() -> tuple[str, ...]:
    """The formats that can be imported, in the order in which they are tried."""
    return NAMES


def load(name: str) -> Importer:
    """The importer of that name. Raises TraceError naming the nearest one."""
    if name not in NAMES:
        raise TraceError(f"no importer called {name!r}: {hint(name, NAMES)}")
    module = importlib.import_module(f"moereplay.traces.importers.{MODULES.get(name, name)}")
    return getattr(module, name.upper())


def detect(path: Path) -> Importer:
    """The first importer that recognises the file or folder. Raises TraceError if none does, or nothing can be read."""
    refuse_unreadable(path)
    for name in NAMES:
        importer = load(name)
        if importer.sniff(path):
            return importer
    raise TraceError(recognise.explain(path))


def _of_columns(path: Path, options: Options) -> Importer | None:
    """The importer that takes the columns that a user names, if it reads such files."""
    suffix = suffix_of(path) if (options.columns or options.where) and path.is_file() else None
    name = COLUMNS if suffix in table.SUFFIXES else "arrays" if suffix in npz.SUFFIXES else None
    return load(name) if name else None


def markdown() -> str:
    """The Markdown table of formats in docs/trace-format.md."""
    rows = [f"| `{each.name}` | {each.summary} | {each.formats} |" for each in map(load, NAMES)]
    return "\n".join(["| format | what | read from |", "|---|---|---|", *rows])


def read(path: Path, options: Options, format: str | None = None) -> Foreign:
    """Header and lazily read requests of a foreign trace, by the importer named or detected. Raises TraceError."""
    refuse_unreadable(path)
    importer = load(format) if format else _of_columns(path, options) or detect(path)
    if importer.name == PLAIN and format is None and recognise.lacks_fields(path):
        raise TraceError(recognise.explain(path))
    if options.where and importer.name != COLUMNS:
        raise TraceError(
            f"{path}: --where requires --columns, of a CSV or JSON; importer {importer.name} reads all rows"
        )
    if options.columns and not importer.columns:
        raise TraceError(f"{path}: --columns means nothing to importer {importer.name}; leave it out")
    if options.shape and not importer.flat:
        raise TraceError(f"{path}: --shape requires responses of a server; importer {importer.name} reads the shape")
    if options.renumbers:
        return remapped(path, lambda: importer.read(path, options), options)
    return importer.read(path, options)


# ---------------------------------------------------------------- ids that are not experts of their layer


def remapped(path: Path, read: Callable[[], Foreign], options: Options) -> Foreign:
    """The trace with the ids that `options` ask for. Raises TraceError if its ids are not of that kind."""
    foreign = read()
    if options.ids == "global":
        foreign = _local(path, foreign, read, options)
    if options.real_experts is not None:
        plain = options.model_copy(update={"real_experts": None})
        foreign = _real(path, foreign, lambda: remapped(path, read, plain), options.real_experts, options.geometry)
    return foreign


def _with(header: Header, experts: int, path: Path, *notes: str) -> Header:
    if header.geometry.k > experts:
        raise TraceError(
            f"{path}: {header.geometry.k} experts per token; expected at most {experts}, which a layer has"
        )
    provenance = header.provenance.model_copy(update={"notes": (*header.provenance.notes, *notes)})
    geometry = header.geometry.model_copy(update={"experts": experts})
    return header.model_copy(update={"geometry": geometry, "provenance": provenance})


def _local(path: Path, foreign: Foreign, read: Callable[[], Foreign], options: Options) -> Foreign:
    """Each layer's ids from 0 on; the file is read once more for it."""
    least, most = ranges_by_layer(each.chosen for each in foreign.requests)
    experts = experts_per_layer(least, most, options.geometry.experts if options.geometry else None)
    if experts is None:
        seen = ", ".join(f"{low} to {high}" for low, high in zip(least[:3].tolist(), most[:3].tolist(), strict=True))
        raise TraceError(
            f"{path}: the ids do not count on through the layers (layers 0, 1, ... have {seen}, ...); "
            "leave out --ids global, or give the model that it was recorded with"
        )
    first = least // experts * experts
    note = f"{ASSUMED}ids count on through the layers (--ids global): {experts} in each, layer 0 from {first[0]} on"

    def local() -> Iterator[Request]:
        for each in read().requests:
            ids = np.where(each.chosen < 0, -1, each.chosen.astype(np.int64) - first[:, None])
            yield replace(each, chosen=ids)

    return Foreign(_with(foreign.header, experts, path, note), local())


def _real(path: Path, foreign: Foreign, read: Callable[[], Foreign], experts: int, model: Geometry | None) -> Foreign:
    """Keep the ids below `experts`; set those without weights to -1 behind the others, with weight 0.

    Reads the file once more. Raises TraceError if the model has another number of experts, or if no id is that high.
    """
    if model is not None and model.experts != experts:
        raise TraceError(
            f"{path}: invalid --real-experts {experts}: expected {model.experts}, the number of experts with weights "
            "of the model"
        )
    largest, choices, away = -1, 0, 0
    for each in foreign.requests:
        largest = max(largest, int(each.chosen.max(initial=-1)))
        choices += int((each.chosen >= 0).sum())
        away += int((each.chosen >= experts).sum())
    if not away:
        raise TraceError(
            f"{path}: invalid --real-experts {experts}: expected at most {largest}, the largest id; leave it "
            "out if every expert has weights"
        )
    note = (
        f"ids from {experts} to {largest} are experts without weights (--real-experts), {100 * away / choices:.3g}% of "
        "all choices: kept as not routed (-1); logits and look-ahead, if there are any, are left out"
    )
    header = _with(foreign.header, experts, path, note)
    header = header.model_copy(update={"lookahead_depth": 0})
    return Foreign(header, _below(read().requests, experts))


def _below(requests: Iterable[Request], experts: int) -> Iterator[Request]:
    for each in requests:
        away = (each.chosen >= experts) | (each.chosen < 0)
        order = np.argsort(away, -1, kind="stable")
        away = np.take_along_axis(away, order, -1)
        moved = {
            name: np.where(away, empty, np.take_along_axis(rows, order, -1))
            for name, empty in (("chosen", -1), ("weights", 0), ("residency", -1))
            if (rows := getattr(each, name)) is not None
        }
        yield replace(each, logits=None, lookahead=(), **moved)
