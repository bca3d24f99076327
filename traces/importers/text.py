"""Text files, plain or gzip, read a piece at a time; damage and gzip bombs are refused."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from traces.documents import refuse_irregular
from traces.schema import TraceError

PIECE = 1 << 20  #: characters read at a time
LONGEST_LINE = 1 << 24  #: characters: 32,767 logits of one token take a million
#: Compressed data may expand to FREE bytes, or to EXPANSION times its size: routes expand 5 to 20 times, a bomb 1,000.
FREE, EXPANSION = 1 << 25, 100
GZIP_START = b"\x1f\x8b"
PACKED = ".gz"
MOST_JSON = 1 << 26  #: bytes of one document, which is held whole; as Python's lists it takes twenty times as many
TEXT_SUFFIXES = (".csv", ".tsv", ".jsonl", ".json")


def suffix_of(path: Path) -> str:
    """The suffix that names the format: `.csv` of `a.csv` and of `a.csv.gz`."""
    inner = Path(path.stem).suffix if path.suffix == PACKED else ""
    return inner if inner in TEXT_SUFFIXES else path.suffix


def start_of(file: Path, length: int) -> bytes:
    """The first bytes of the text, unpacked; fewer if the file is shorter or damaged."""
    try:
        with _opened(file) as stream:
            return stream.read(length)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return b""


def holds(file: Path, mark: str) -> bool:
    """Whether a short text stands somewhere in a JSON file; False for what cannot be read."""
    before = ""
    if file.stat().st_size > MOST_JSON:
        return True  # `read_json` says what is wrong with it
    try:
        for piece in pieces(file):
            if mark in before + piece:
                return True
            before = piece[-len(mark) :]
    except TraceError:
        return False
    return False


def pieces(file: Path) -> Iterator[str]:
    """The text, every line end as one newline. Raises TraceError if it is not UTF-8, or damaged or bloated gzip."""
    count, most = 0, allowance(file.stat().st_size)
    try:
        with _opened(file) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig") as text:
            while piece := text.read(PIECE):
                count += len(piece)
                if count > most and isinstance(stream, gzip.GzipFile):
                    raise TraceError(f"{file}: expands more than {EXPANSION}-fold; unpack it yourself if that is right")
                yield piece
    except UnicodeDecodeError as broken:
        raise TraceError(f"{file}: not UTF-8 text ({broken.reason}); expected text") from broken
    except (EOFError, zlib.error, gzip.BadGzipFile) as broken:
        raise TraceError(f"{file}: damaged gzip ({broken}); download or record it again") from broken


def allowance(size: int) -> int:
    """Bytes that `size` compressed ones may expand to."""
    return max(FREE, EXPANSION * size)


def _opened(file: Path) -> BinaryIO | gzip.GzipFile:
    """The file's bytes, unpacked if it is gzip by its first bytes, whatever its name. Raises TraceError for no file."""
    try:
        refuse_irregular(file)
    except OSError as wrong:
        raise TraceError(f"{file}: {wrong.strerror}; check the path") from None
    with file.open("rb") as stream:
        packed = stream.read(len(GZIP_START)) == GZIP_START
    return gzip.open(file, "rb") if packed else file.open("rb")


def blocks(file: Path, skip: int = 0, ended: bool = False) -> Iterator[tuple[int, list[str]]]:
    """(number of the first, lines) many lines at a time, without the first `skip` and the blank ones at the end.

    Of blank lines between rows, which no format has, the first is given. `ended` refuses a last line without its line
    end, of which the rest may be missing. Raises TraceError.
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
        number += len(lines)


def _lines(file: Path, ended: bool) -> Iterator[list[str]]:
    rest = ""
    for piece in pieces(file):
        *lines, rest = (rest + piece).split("\n")
        if max(len(rest), *map(len, lines), 0) > LONGEST_LINE:
            raise TraceError(f"{file}: a line of more than {LONGEST_LINE:,} characters; expected a line per row")
        yield lines
    if ended and rest.strip():
        raise TraceError(f"{file}: the last line has no line end; was the file cut off? End it with one if it is whole")
    yield [rest]


def first_lines(file: Path, mark: str, most: int) -> list[str]:
    """The lines at the start that begin with `mark`. Raises TraceError if there are more than `most`."""
    found: list[str] = []
    for _, lines in blocks(file):
        for line in lines:
            if not line.startswith(mark):
                return found
            found.append(line)
            if len(found) > most:
                raise TraceError(f"{file}: more than {most:,} lines begin with {mark!r}; expected rows after them")
    return found


def read_json(file: Path) -> Any:
    """The file as one JSON document. Raises TraceError saying where it breaks."""
    if file.stat().st_size > MOST_JSON:
        raise TraceError(f"{file}: more than {MOST_JSON:,} bytes of JSON; write a file per run, or JSON lines")
    return parse_json("".join(pieces(file)), str(file))


def parse_json(text: str, place: str) -> Any:
    """A JSON document found at `place` (for the message). Raises TraceError if it is broken or cut off."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as broken:
        raise TraceError(f"{place}: not JSON ({broken.msg} at character {broken.pos}); expected all of it") from broken
    except ValueError as broken:  # an integer of thousands of digits
        raise TraceError(f"{place}: JSON with a number of thousands of digits; expected a routing trace") from broken
    except RecursionError as broken:
        raise TraceError(f"{place}: JSON nested too deep; expected a routing trace") from broken
