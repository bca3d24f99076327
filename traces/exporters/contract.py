"""Exporters: their contract, options and target; the one of a format; an export with the sha256 of its files."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from pydantic import Field, field_validator

from moereplay.traces.exporters import MODULES, NAMES
from moereplay.traces.files import sha256_of, whole_file, whole_folder
from moereplay.traces.geometry import by_spelling
from moereplay.traces.schema import LOOKAHEAD, Frozen, Trace, TraceError
from moereplay.traces.summary import uses
from moereplay.traces.texts import hint

LONGEST = 96  #: characters of a licence


class Options(Frozen):
    """Options of a format; None or empty if the user did not pass them."""

    cache_bytes: int | None = Field(default=None, ge=0)  #: of experts that fast memory holds
    ranking: tuple[tuple[int, int], ...] = ()  #: (layer, expert), the most valuable first, instead of counted uses
    dense_layers: int | None = Field(default=None, ge=0)  #: layers of the model before the first one with experts
    layer: int | None = Field(default=None, ge=0)  #: the only MoE layer to write
    passes: str = ""  #: schedule of passes that makes the demand
    licence: str = ""  #: of a data set, as Hugging Face spells it

    @field_validator("licence")
    @classmethod
    def _is_licence(cls, licence: str) -> str:
        plain = licence.replace("-", "").replace(".", "").isalnum() and licence.isascii() and licence == licence.lower()
        if licence and not (plain and len(licence) <= LONGEST):
            raise ValueError(
                f"unknown licence {licence[:LONGEST]!r}: expected a name such as apache-2.0, mit or cc-by-4.0"
            )
        return licence

    def given(self) -> frozenset[str]:
        """Return the names of the options that the user passed."""
        return frozenset(name for name in type(self).model_fields if getattr(self, name) not in (None, "", ()))


#: What each option is called on the command line.
TYPED = {
    "cache_bytes": "--capacity (or --vram)",
    "ranking": "--profile",
    "dense_layers": "--dense-layers",
    "layer": "--layer",
    "passes": "--passes",
    "licence": "--licence",
}


class Target(NamedTuple):
    """The file, or the new folder, that an exporter writes."""

    file: BinaryIO | None = None
    folder: Path | None = None

    @contextmanager
    def open(self, name: str = "") -> Iterator[BinaryIO]:
        """Open the one file, or the file of that name with `/` between folders. Raises OSError."""
        if self.folder is None:
            assert self.file is not None and not name
            yield self.file
            return
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            yield file


@contextmanager
def target_of(path: Path, is_folder: bool) -> Iterator[Target]:
    """Yield a target that appears at the path when the block ends, or never if the block raises. Raises TraceError."""
    if path.exists() or path.is_symlink():
        raise TraceError(f"{path} exists; choose another --out or remove it")
    try:
        if is_folder:
            with whole_folder(path) as folder:
                yield Target(folder=folder)
        else:
            with whole_file(path) as file:
                yield Target(file=file)
    except OSError as refused:
        fix = "nothing was written; choose another --out"
        raise TraceError(f"cannot write {path}: {refused.strerror or refused}; {fix}") from refused


class Answer(NamedTuple):
    """An exporter's report of an export: the command that reads it, and notes."""

    typed: str  #: the command of the other tool; {path} is replaced by the file or folder
    notes: tuple[str, ...] = ()  #: assumptions, and the placement


@dataclass(frozen=True)
class Exporter:
    """One format. `write` raises TraceError for a trace that the format cannot hold, and OSError from the disk."""

    name: str  #: as the user types it
    summary: str
    writes: str  #: what --out names, as NAME.csv
    write: Callable[[Trace, Options, Target], Answer]
    keeps: frozenset[str]  #: of `fields_of` a trace
    loses: tuple[str, ...] = ()  #: facts that the format cannot hold besides the fields that it lacks
    takes: frozenset[str] = frozenset()  #: of Options
    needs: frozenset[str] = frozenset()  #: of those that it takes

    @property
    def is_folder(self) -> bool:
        """True if it writes a folder."""
        return self.writes.endswith("/")

    @property
    def suffix(self) -> str:
        """Suffix that the reader of the file requires; empty for any."""
        return Path(self.writes).suffix


def fields_of(trace: Trace) -> list[str]:
    """Return the names of a trace's fields: token arrays, requests and entries of the header."""
    arrays = dict.fromkeys("lookahead" if name.startswith(LOOKAHEAD) else name for name in trace.arrays)
    bias = ["router_bias"] if trace.router_bias is not None else []
    return [*sorted(arrays), "request_offsets", "prompt_lengths", *bias, "geometry", "provenance"]


# ---------------------------------------------------------------- what placements go by


def scores(trace: Trace, options: Options) -> np.ndarray:
    """Return scores (L, E) int64; experts with higher scores are placed first.

    Raises TraceError for a ranking of experts that the model does not have.
    """
    if not options.ranking:
        return uses(trace)
    layers, experts = trace.geometry.layers, trace.geometry.experts
    found = np.zeros((layers, experts), np.int64)
    for place, (layer, expert) in enumerate(options.ranking):
        if not (0 <= layer < layers and 0 <= expert < experts):
            fix = f"the trace has {layers} layers of {experts} experts"
            raise TraceError(f"invalid --profile entry [{layer}, {expert}]: {fix}")
        found[layer, expert] = max(found[layer, expert], len(options.ranking) - place)
    return found


def dense_layers(trace: Trace, options: Options) -> tuple[int, tuple[str, ...]]:
    """Return the number of layers before the first one with experts, and a note if the user did not pass it."""
    if options.dense_layers is not None:
        return options.dense_layers, ()
    model = by_spelling().get(trace.header.provenance.model.lower())
    if model is None:
        return 0, ("assumed: every layer of the model has experts; --dense-layers N if its first N have none",)
    first = (
        f"its first {model.dense_layers} layers have no experts" if model.dense_layers else "every layer has experts"
    )
    return model.dense_layers, (f"{model.name}: {first}",)


# -- Find the exporter of a format, and run an export: write the files and return their sha256


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
        files = [file._asdict() for file in self.files]
        said = {"typed": self.answer.typed, "notes": list(self.answer.notes)}
        return {"format": self.format, "files": files, "dropped_fields": self.dropped_fields, **said}


def exporters() -> list[Exporter]:
    """Return all exporters, in the order of `NAMES`."""
    found = {name: importlib.import_module(f"moereplay.traces.exporters.{MODULES[name]}") for name in NAMES}
    return [getattr(module, name.upper()) for name, module in found.items()]


def load(name: str) -> Exporter:
    """Return the exporter of that name. Raises TraceError naming the nearest one."""
    known = {exporter.name: exporter for exporter in exporters()}
    if name not in known:
        raise TraceError(f"unknown format {name!r}: {hint(name, tuple(known))}")
    return known[name]


def markdown() -> str:
    """Return the Markdown table of formats in docs/export.md."""
    rows = [
        f"| `{exporter.name}` | {exporter.summary} | {exporter.writes} | {options(exporter)} |"
        for exporter in exporters()
    ]
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
    return Export(exporter.name, [_written(file) for file in files], [*dropped, *exporter.loses], answer)


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
    return Written(str(path), path.stat().st_size, sha256_of(path))
