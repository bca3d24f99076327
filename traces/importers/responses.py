"""Saved responses of inference servers: JSON documents in a file or a folder, JSON lines, or lists of responses."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from traces.importers.sources import files_of
from traces.importers.text import blocks, holds, parse_json, read_json, suffix_of
from traces.schema import TraceError

Document = dict[str, Any]
SUFFIXES = (".json", ".jsonl")


def response_files(path: Path) -> list[Path]:
    """The file itself, or the JSON files directly in a folder, by name."""
    return sorted(file for suffix in SUFFIXES for file in files_of(path, suffix))


def sniff_for(path: Path, present: tuple[str, ...], absent: tuple[str, ...]) -> bool:
    """Whether there are such files, and the first has all of the marks and none of the others."""
    files = response_files(path)
    return bool(files) and all(_has(files[0], mark) for mark in present) and not any(_has(files[0], m) for m in absent)


def _has(file: Path, mark: str) -> bool:
    """In a document anywhere; in JSON lines on the first one."""
    if suffix_of(file) == ".json":
        return holds(file, f'"{mark}"')
    try:
        _, lines = next(blocks(file), (1, [""]))
    except TraceError:
        return False
    return f'"{mark}"' in lines[0]


def documents(file: Path) -> Iterator[tuple[str, Document]]:
    """Each response, after the place where it stands. Raises TraceError for what is no JSON, or no object."""
    if suffix_of(file) == ".jsonl":
        for number, lines in blocks(file):
            for at, line in enumerate(lines, number):
                yield from _objects(parse_json(line, f"{file} line {at}"), f"{file} line {at}")
    else:
        yield from _objects(read_json(file), str(file))


def _objects(document: Any, place: str) -> Iterator[tuple[str, Document]]:
    if isinstance(document, dict):
        yield place, document
        return
    if not isinstance(document, list) or not document:
        raise TraceError(f"{place}: no response of a server; expected an object, or a list of them")
    for number, each in enumerate(document):
        if not isinstance(each, dict):
            raise TraceError(f"{place}: [{number}] is no object; expected the response of a server")
        yield f"{place}: [{number}]", each


def choices_of(document: Document, place: str) -> list[Document]:
    """The objects in `choices`, or the response itself where it has none. Raises TraceError."""
    choices = document.get("choices", [document])
    if not isinstance(choices, list) or not all(isinstance(each, dict) for each in choices):
        raise TraceError(f"{place}: choices is no list of objects; expected the response of a server")
    return choices


def count(document: Any, name: str, place: str) -> int | None:
    """A number of tokens, None where it is missing. Raises TraceError for what is no such number."""
    value = document.get(name) if isinstance(document, dict) else None
    if value is not None and (type(value) is not int or not 0 <= value < 2**31):
        raise TraceError(f"{place}: {name} is no number of tokens; expected a whole number from 0 on")
    return value


def unbased(text: str, place: str) -> bytes:
    """The bytes of a base64 text. Raises TraceError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise TraceError(f"{place} is no base64; expected what the server sent, unchanged") from None
