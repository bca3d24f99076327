"""Prompt sets: files or a dataset become an ordered list of texts, or lists of token ids, with a name and a hash.

Nothing is dropped or deduplicated: the list that is hashed is the list that is recorded. No torch is needed.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moereplay.tracegen.errors import RecordError, require
from moereplay.traces.documents import DocumentError, canonical_digest, content, from_json

MOST_BYTES = 1 << 28  #: of a file of prompts, unpacked: all of them are held at once


Prompt = str | tuple[int, ...]  #: a text, or token ids


class Prompts(NamedTuple):
    """Prompts in the order in which they are recorded; a trace names them by `name` and `sha256`."""

    name: str
    texts: tuple[Prompt, ...]
    places: tuple[str, ...] = ()  #: where each was read, as errors name it

    @property
    def sha256(self) -> str:
        """sha256 of the texts, as canonical JSON of the list."""
        return canonical_digest(list(self.texts))

    def chosen(self, seed: int | None = None, limit: int | None = None) -> Prompts:
        """Return the prompts, shuffled if `seed` is given, then the first `limit`."""
        order = range(len(self.texts))
        if seed is not None:
            order = np.random.Generator(np.random.PCG64(seed)).permutation(len(self.texts)).tolist()
        texts, places = (tuple(each[at] for at in order[:limit] if each) for each in (self.texts, self.places))
        return self._replace(texts=texts, places=places)


def read_prompts(paths: Sequence[str | Path], field: str | None = None) -> Prompts:
    """Read a prompt per record of each file: .jsonl, .csv, .parquet (the named field of it) or .txt (a line); .gz too.

    A field may name a nested value with dots, as in turns.0. A list of numbers is token ids. Blank lines of .txt and
    .jsonl are skipped. Raises RecordError naming file and record if a file or field is missing, broken or empty, or
    neither text nor token ids.
    """
    read = [each for path in paths for each in _read_file(Path(path), field)]
    places, texts = zip(*read, strict=True)
    return Prompts("+".join(Path(path).name for path in paths), texts, places)


def read_texts(paths: Sequence[str | Path]) -> Prompts:
    """Return each file as one text, for teacher-forced windows; .gz too.

    Raises RecordError if one is empty or not UTF-8.
    """
    texts = [_text(Path(path)) for path in paths]
    for path, text in zip(paths, texts, strict=True):
        if not text.strip():
            raise RecordError(f"{path} is empty: expected a text to cut into windows")
    return Prompts("+".join(Path(path).name for path in paths), tuple(texts))


def read_dataset(name: str, field: str | None) -> Prompts:
    """Return the named field of every row of a Hugging Face dataset, ID[:SPLIT], split `test` unless named.

    Raises RecordError if `datasets` is not installed or the dataset cannot be loaded.
    """
    require("datasets", f"--dataset {name}", "pass a file of it with --prompts")
    if int(version("datasets").split(".")[0]) < 4:
        raise RecordError(f"--dataset {name}: datasets below 4 can run a dataset's own code: pip install -U datasets")
    source, _, split = name.partition(":")
    try:
        rows: Any = import_module("datasets").load_dataset(source, split=split or "test")
    except Exception as refused:  # the hub, the network, a file format: it can be anything
        why = " ".join(str(refused).split())[:200]
        offline = "without a network, copy its .jsonl or .parquet file here and pass --prompts FILE"
        raise RecordError(f"--dataset {name}: {why}; {offline}") from None
    wanted = _named(field, list(rows.column_names), f"--dataset {name}")
    places = tuple(f"--dataset {name}, row {number}" for number in range(1, len(rows) + 1))
    texts = tuple(_value(row, wanted, place) for place, row in zip(places, rows, strict=True))
    known_as = Path(source).name if Path(source).exists() else source  # a trace holds no path of this machine
    return Prompts(f"{known_as}:{split or 'test'}", texts, places)


def _read_file(path: Path, field: str | None) -> Iterator[tuple[str, Prompt]]:
    """Yield place and prompt of each record."""
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    reader = READERS.get(kind.lower())
    if reader is None:
        raise RecordError(f"{path}: {kind or 'no suffix'} is not one of {', '.join(READERS)} (or those with .gz)")
    number = 0
    for number, (where, text) in enumerate(reader(path, field), 1):
        if is_empty(text):
            raise RecordError(f"{path}, {where}: prompt {number} is empty: expected at least one token")
        yield f"{path}, {where}", text
    if not number:
        raise RecordError(f"{path} holds no prompts: expected one per {'line' if kind == '.txt' else 'record'}")


def _lines(path: Path, field: str | None) -> Iterator[tuple[str, Prompt]]:
    if field is not None:
        raise RecordError(f"--field cannot be combined with plain text ({path} has one prompt per line)")
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            yield f"line {number}", line


def _json_lines(path: Path, field: str | None) -> Iterator[tuple[str, Prompt]]:
    # Not splitlines(): JSON may hold U+2028 unescaped
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            record = from_json(line)
        except DocumentError as broken:
            raise RecordError(f"{path}, {where}: invalid JSON ({broken}): expected one object per line") from None
        if not isinstance(record, dict):
            raise RecordError(f"{path}, {where}: invalid {type(record).__name__}: expected one JSON object per line")
        yield where, _value(record, _named(field, list(record), f"{path}, {where}"), f"{path}, {where}")


def _csv_rows(path: Path, field: str | None) -> Iterator[tuple[str, Prompt]]:
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        wanted = _named(field, list(reader.fieldnames or []), f"{path}")
        for number, record in enumerate(reader, 1):
            yield f"row {number}", _value(record, wanted, f"{path}, row {number}")
    except csv.Error as broken:
        raise RecordError(
            f"{path}, line {reader.line_num}: invalid CSV ({broken}); quote fields that contain quotes"
        ) from None


def _parquet_rows(path: Path, field: str | None) -> Iterator[tuple[str, Prompt]]:
    import polars as pl  # slow to import, and rarely needed here
    from polars.exceptions import PolarsError

    try:
        rows = pl.read_parquet(io.BytesIO(_content(path)))
    except (PolarsError, pl.exceptions.PanicException) as broken:
        raise RecordError(f"{path}: not a Parquet file ({' '.join(str(broken).split())[:200]})") from None
    wanted = _named(field, rows.columns, f"{path}")
    for number, record in enumerate(rows.iter_rows(named=True), 1):
        yield f"row {number}", _value(record, wanted, f"{path}, row {number}")


#: What reads a file, by its suffix: (path, field) -> (where in the file, text).
READERS: dict[str, Callable[[Path, str | None], Iterator[tuple[str, Prompt]]]] = {
    ".jsonl": _json_lines,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
    ".txt": _lines,
}


def _named(field: str | None, names: list[str], where: str) -> str:
    """Return the field named, if the record has it, or the only one."""
    shown = ", ".join(names) or "none"
    if field is None:
        if len(names) == 1:
            return names[0]
        raise RecordError(f"{where}: missing field: pass --field, the field of the prompt, one of {shown}")
    if field not in names and field.split(".")[0] not in names:
        raise RecordError(f"{where}: unknown field {field!r}: it has {shown}")
    return field


def is_empty(prompt: Prompt) -> bool:
    """Return True for a text of spaces, or no token ids."""
    return not (prompt.strip() if isinstance(prompt, str) else prompt)


def _value(record: Mapping[str, Any], field: str, where: str) -> Prompt:
    """Return text or token ids of a field; dots reach into objects (by name) and lists (by number)."""
    value: Any = record
    for step in [field] if field in record else field.split("."):
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, ValueError, TypeError):
            raise RecordError(f"{where}: no field {field!r}: no {step!r} in it") from None
    if isinstance(value, list) and not any(isinstance(each, str | list | dict) for each in value[:1]):
        return _token_ids(value, field, where)
    if not isinstance(value, str):
        reach = ", reach into it with dots, as in turns.0" if isinstance(value, list | dict) else ""
        raise RecordError(f"{where}: field {field!r} is {type(value).__name__}, expected text or token ids{reach}")
    return value


def _token_ids(values: list[Any], field: str, where: str) -> tuple[int, ...]:
    for at, value in enumerate(values):
        if type(value) is not int or value < 0:
            raise RecordError(f"{where}: invalid token id {value!r} in {field}.{at}: expected a whole number from 0 on")
    return tuple(values)


def _text(path: Path) -> str:
    """Return a file's text, unpacked; UTF-8, with or without a byte order mark."""
    data = _content(path)
    try:
        return (_unpacked(data, path) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except UnicodeDecodeError as broken:
        raise RecordError(f"{path} is not UTF-8 (byte {broken.start}); convert it, as with `iconv -t utf-8`") from None


def _content(path: Path) -> bytes:
    try:
        return content(path, MOST_BYTES)
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist; check the path") from None
    except IsADirectoryError:
        raise RecordError(f"{path} is a folder, expected a file") from None
    except OSError as refused:
        raise RecordError(f"{path}: {refused.strerror}; check the path, or split the file") from None


def _unpacked(data: bytes, path: Path) -> bytes:
    try:
        with gzip.open(io.BytesIO(data)) as stream:
            text = stream.read(MOST_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as broken:
        raise RecordError(f"{path} is cut short, or not a gzip file ({broken})") from None
    if len(text) > MOST_BYTES:
        raise RecordError(f"{path} unpacks to more than {MOST_BYTES:,} bytes; split it")
    return text
