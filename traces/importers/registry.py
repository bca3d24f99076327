"""Which importer reads a foreign trace: the one that is named, or the first that recognises it."""

from __future__ import annotations

import importlib
from pathlib import Path

from moereplay.traces.importers import NAMES, arrays, recognise, table
from moereplay.traces.importers.contract import Foreign, Importer, Options
from moereplay.traces.importers.remapped import remapped
from moereplay.traces.importers.sources import refuse_unreadable
from moereplay.traces.importers.text import suffix_of
from moereplay.traces.schema import TraceError
from moereplay.traces.texts import hint

COLUMNS, PLAIN = "columns", "generic"  #: importers of named columns, and of the plain formats


def names() -> tuple[str, ...]:
    """The formats that can be imported, in the order in which they are tried."""
    return NAMES


def load(name: str) -> Importer:
    """The importer of that name. Raises TraceError naming the nearest one."""
    if name not in NAMES:
        raise TraceError(f"no importer called {name!r}: {hint(name, NAMES)}")
    return importlib.import_module(f"moereplay.traces.importers.{name}").IMPORTER


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
    name = COLUMNS if suffix in table.SUFFIXES else "arrays" if suffix in arrays.SUFFIXES else None
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
