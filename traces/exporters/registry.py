"""Find the exporter of a format, and run an export: write the files and return their sha256."""

from __future__ import annotations

import hashlib
import importlib
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from moereplay.traces.exporters import MODULES, NAMES
from moereplay.traces.exporters.contract import TYPED, Answer, Exporter, Options, fields_of, target_of
from moereplay.traces.schema import Trace, TraceError
from moereplay.traces.texts import hint

PIECE = 1 << 20  #: bytes hashed at a time


class Written(NamedTuple):
    """A file of an export."""

    path: str
    bytes: int
    sha256: str


class Export(NamedTuple):
    """A complete export."""

    format: str
    files: list[Written]
    dropped_fields: list[str]  #: of the trace, that the format cannot hold
    answer: Answer

    def document(self) -> dict[str, Any]:
        """Return the document that `--json` prints."""
        files = [each._asdict() for each in self.files]
        said = {"typed": self.answer.typed, "notes": list(self.answer.notes)}
        return {"format": self.format, "files": files, "dropped_fields": self.dropped_fields, **said}


def exporters() -> list[Exporter]:
    """Return all exporters, in the order of `NAMES`."""
    found = {name: importlib.import_module(f"moereplay.traces.exporters.{MODULES.get(name, name)}") for name in NAMES}
    return [getattr(module, name.upper()) for name, module in found.items()]


def load(name: str) -> Exporter:
    """Return the exporter of that name. Raises TraceError naming the nearest one."""
    known = {each.name: each for each in exporters()}
    if name not in known:
        raise TraceError(f"unknown format {name!r}: {hint(name, tuple(known))}")
    return known[name]


def markdown() -> str:
    """Return the Markdown table of formats in docs/export.md."""
    rows = [f"| `{each.name}` | {each.summary} | {each.writes} | {options(each)} |" for each in exporters()]
    return "\n".join(["| format | what | writes | options |", "|---|---|---|---|", *rows])


def options(exporter: Exporter) -> str:
    """Return the exporter's options as typed on the command line, the optional ones in brackets."""
    taken = [name for name in TYPED if name in exporter.takes]
    return ", ".join(TYPED[name] if name in exporter.needs else f"[{TYPED[name]}]" for name in taken)


def export(trace: Trace, exporter: Exporter, options: Options, out: Path) -> Export:
    """Write the trace. Raises TraceError, leaving nothing, if the format, an option or the disk refuses."""
    _check(exporter, options, out)
    with target_of(out, exporter.is_folder) as target:
        answer = exporter.write(trace, options, target)
    files = sorted(each for each in out.rglob("*") if each.is_file()) if exporter.is_folder else [out]
    dropped = [name for name in fields_of(trace) if name not in exporter.keeps]
    answer = answer._replace(typed=answer.typed.replace("{path}", shlex.quote(str(out))))
    return Export(exporter.name, [_written(each) for each in files], [*dropped, *exporter.loses], answer)


def _check(exporter: Exporter, options: Options, out: Path) -> None:
    given = options.given()
    for name in TYPED:
        if name in given and name not in exporter.takes:
            raise TraceError(f"{TYPED[name]} cannot be combined with format {exporter.name}")
        if name in exporter.needs and name not in given:
            raise TraceError(f"format {exporter.name} requires {TYPED[name]}")
    if exporter.suffix and out.suffix != exporter.suffix:
        raise TraceError(f"--out {out}: readers of {exporter.name} go by the name; end it with {exporter.suffix}")


def _written(path: Path) -> Written:
    hasher, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            hasher.update(piece)
            size += len(piece)
    return Written(str(path), size, hasher.hexdigest())
