"""Text files, packed or not, in UTF-8, UTF-16 or UTF-32, read in pieces; damaged files and bombs are rejected.

The first bytes show how a file is packed and encoded: PowerShell's `>` writes UTF-16, its `Out-File -Encoding utf8` a
byte order mark. Every importer of text reads files through this module.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moereplay.traces.importers.archive import SUFFIXES as PACKED
from moereplay.traces.importers.archive import Unpacked, files_in, packing_of
from moereplay.traces.schema import TraceError, shown

PIECE = 1 << 20  #: characters read at a time
BUFFER = 1 << 18  #: bytes read at a time
LONGEST_LINE = 1 << 24  #: characters: 32,767 logits of one token take a million
MOST_BLANK = 1 << 16  #: blank lines in a row
MOST_JSON = 1 << 26  #: characters of one document, which is held in memory; Python's lists take 20 times as many bytes
TEXT_SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".txt", ".log")
#: Marks of the order of bytes; UTF-32's begins with UTF-16's.
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
LONGEST_MARK = 4
TEXT_BYTES = bytes({*range(256)} - {*range(9), *range(14, 27), 28, 29, 30, 31, 127})  #: all but controls
BINARY_WITHIN = 256  #: bytes that are looked at


def suffix_of(path: Path) -> str:
    """Return the suffix that names the format: `.csv` of `a.csv` and of `a.csv.gz`, or of the only file of `a.zip`."""
    if path.suffix not in PACKED:
        return path.suffix
    inner = Path(path.stem).suffix
    if path.suffix == ".zip" and inner not in TEXT_SUFFIXES:
        try:
            with zipfile.ZipFile(path) as archive:
                names = files_in(archive)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
            names = []
        inner = Path(names[0]).suffix if len(names) == 1 else ""
    return inner if inner in TEXT_SUFFIXES else path.suffix


def encoding_of(start: bytes) -> str:
    """Return the encoding of a text by its first bytes: its mark, UTF-16 if every other byte is zero, else UTF-8."""
    for mark, encoding in MARKS.items():
        if start.startswith(mark):
            return encoding
    for first, encoding in ((0, "utf-16-le"), (1, "utf-16-be")):
        letters, zeros = start[first:LONGEST_MARK:2], start[1 - first : LONGEST_MARK : 2]
        if len(start) >= LONGEST_MARK and not any(zeros) and all(9 <= letter < 127 for letter in letters):
            return encoding
    return "utf-8"


def start_of(file: Path, length: int) -> bytes:
    """Return the first bytes of the unpacked text as UTF-8 without a mark; fewer if it is shorter or damaged."""
    try:
        with Unpacked(file) as stream:
            found = _read(stream, LONGEST_MARK * (length + 1))
    except TraceError:
        return b""
    encoding = encoding_of(found)
    if encoding == "utf-8":
        return found[:length]
    text = codecs.getincrementaldecoder(encoding)("ignore").decode(found)
    return text.encode("utf-8", "ignore")[:length]


def binary_start(file: Path) -> str:
    """Describe the first bytes of a file that no text begins with; empty for a text."""
    start = start_of(file, BINARY_WITHIN)
    if not start.translate(None, TEXT_BYTES):
        return ""
    return (
        f"binary data that begins with the bytes {start[:8].hex(' ')} ({shown(start[:8].decode('ascii', 'replace'))!r})"
    )


def _read(stream: Unpacked, length: int) -> bytes:
    """Read `length` bytes, fewer at the end of the file."""
    found = b""
    while more := stream.read(length - len(found)):
        found += more
    return found


def holds(file: Path, mark: str) -> bool:
    """Return True if a JSON file contains a short text; False for an unreadable file."""
    before = ""
    if file.stat().st_size > MOST_JSON:
        return True  # `read_json` reports the error
    try:
        for piece in pieces(file):
            before += piece
            if mark in before:
                return True
            before = before[-len(mark) :]
    except TraceError:
        return False
    return False


def refuse_bomb(file: Path) -> None:
    """Read a packed document, or the first of packed lines, once before importers look at it. Raises TraceError."""
    with Unpacked(file) as stream:
        packed = stream.packing is not None
    if packed and suffix_of(file) == ".jsonl":
        next(blocks(file), None)
    elif packed:
        for _ in pieces(file):
            pass


def pieces(file: Path) -> Iterator[str]:
    """Yield the text, line ends as newlines. Raises TraceError if it is not text, damaged, or expands too far."""
    with Unpacked(file) as stream:
        start = _read(stream, LONGEST_MARK * 2)
        again = packing_of(start, file.with_suffix(""))
        if stream.packing and again:
            raise TraceError(f"{file}: {again.name} inside {stream.packing.name}; unpack it once")
    encoding = encoding_of(start)
    if encoding == "utf-8" and start.translate(None, TEXT_BYTES):
        raise TraceError(f"{file}: {binary_start(file)}, not a text: expected UTF-8 text")
    try:
        with io.TextIOWrapper(io.BufferedReader(Unpacked(file), BUFFER), encoding=encoding) as text:
            while piece := text.read(PIECE):
                yield piece
    except UnicodeError as broken:
        if binary := binary_start(file):
            raise TraceError(f"{file}: {binary}, not a text: expected UTF-8 text") from broken
        name = encoding.removesuffix("-sig").upper()
        reason = broken.reason if isinstance(broken, UnicodeDecodeError) else str(broken)
        raise TraceError(f"{file}: not {name} text ({reason}): expected UTF-8 text") from broken


def blocks(file: Path, skip: int = 0, ended: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the first line, lines) in blocks, without the first `skip` lines and trailing blank ones.

    Of consecutive blank lines between rows, only the first is yielded. `ended` rejects a last line without a line
    end, which may be truncated. Raises TraceError.
    """
    number, blank = 1, 0
    for lines in _lines(file, ended):
        kept = len(lines)
        while kept and not lines[kept - 1].strip():
            kept -= 1
        fresh = max(0, skip + 1 - number)
        if kept > fresh:
            if blank:
                yield blank, [""]
            yield number + fresh, lines[fresh:kept]
            blank = 0
        if kept < len(lines):
            blank = blank or number + kept
            if number + len(lines) - blank > MOST_BLANK:
                raise TraceError(f"{file}: more than {MOST_BLANK:,} blank lines from line {blank:,} on: expected rows")
        number += len(lines)


def _lines(file: Path, ended: bool) -> Iterator[list[str]]:
    rest = ""
    for piece in pieces(file):
        *lines, rest = (rest + piece).split("\n")
        if max(len(rest), *map(len, lines), 0) > LONGEST_LINE:
            raise TraceError(f"{file}: a line of more than {LONGEST_LINE:,} characters: expected one line per row")
        yield lines
    if ended and rest.strip():
        raise TraceError(
            f"{file}: the last line has no line end: the file may be truncated; if it is complete, append a line end"
        )
    yield [rest]


def first_lines(file: Path, mark: str, most: int) -> list[str]:
    """Return the lines at the start that begin with `mark`. Raises TraceError if there are more than `most`."""
    found: list[str] = []
    for _, lines in blocks(file):
        for line in lines:
            if not line.startswith(mark):
                return found
            found.append(line)
            if len(found) > most:
                raise TraceError(f"{file}: more than {most:,} lines begin with {mark!r}: expected rows after them")
    return found


def read_json(file: Path) -> Any:
    """Return the file as one JSON document. Raises TraceError with the position of an error."""
    parts: list[str] = []
    count = file.stat().st_size  # of bytes: packed, they are fewer than the characters
    for piece in pieces(file) if count <= MOST_JSON else ():
        parts.append(piece)
        count = sum(map(len, parts))
        if count > MOST_JSON:
            break
    if count > MOST_JSON:
        raise TraceError(f"{file}: more than {MOST_JSON:,} characters of JSON; write a file per run, or JSON lines")
    return parse_json("".join(parts), str(file))


def parse_json(text: str, place: str) -> Any:
    """Parse a JSON document; `place` is for the message. Raises TraceError if it is invalid."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as broken:
        raise TraceError(f"{place}: not JSON ({broken.msg} at character {broken.pos})") from broken
    except ValueError as broken:  # an integer of thousands of digits
        raise TraceError(f"{place}: JSON with a number of thousands of digits: expected a routing trace") from broken
    except RecursionError as broken:
        raise TraceError(f"{place}: JSON nested too deeply: expected a routing trace") from broken


# -- Cells of a file, as people and programs write them: a number, or a list of numbers.

SEPARATORS = re.compile(r"[\s,;|]+")
BRACKETS = ("[]", "()", "{}")
DIGITS = 18  #: of a whole number, which int64 holds
PLAIN = re.compile(rf"\d{{1,{DIGITS}}}(?: \d{{1,{DIGITS}}})*", re.ASCII)


def number(cell: Any) -> float | None:
    """Return a finite number, as int if it is an integer; None for anything else, including true and false."""
    if isinstance(cell, str):
        if len(cell) <= DIGITS and cell.isascii() and cell.isdigit():
            return int(cell)
        cell = _parsed(cell.strip())
    if isinstance(cell, bool) or not isinstance(cell, int | float) or not math.isfinite(cell):
        return None
    if cell != int(cell):
        return float(cell)
    return int(cell) if abs(cell) < 10**DIGITS else None


def whole(cell: Any) -> int | None:
    """Return an integer, which may be written as 5.0; None for anything else."""
    found = number(cell)
    return found if isinstance(found, int) else None


def numbers(cell: Any) -> list[float] | None:
    """Return the numbers of a list `[3, 17]`, `3 17` or `3;17`, or a single number; None for anything else."""
    if isinstance(cell, str) and PLAIN.fullmatch(cell):  # what nearly every file has
        return [int(each) for each in cell.split(" ")]
    if isinstance(cell, str):
        text = cell.strip()
        cell = SEPARATORS.split(text[1:-1].strip() if text[:1] + text[-1:] in BRACKETS else text)
    found = [number(part) for part in (cell if isinstance(cell, list) else [cell])]
    return None if None in found else [value for value in found if value is not None]


def _parsed(text: str) -> float | None:
    if len(text) > 2 * DIGITS or "_" in text or not text.isascii():
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None
