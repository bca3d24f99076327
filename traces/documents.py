"""Read files, JSON and TOML within limits, with errors in one line; write JSON.

A path may lead to a pipe, which blocks, or to a device without an end. A document of a few bytes may be nested deeper
than Python's stack, or hold an integer of more digits than Python prints.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from typing import Any

#: Of this package, where it is not installed: a checkout on PYTHONPATH.
CHECKOUT = Path(__file__).resolve().parents[1] / "pyproject.toml"
MOST_BYTES = 1 << 24  #: size of a document
DEEPEST = 64  #: nesting of lists and tables
MOST_BITS = 1023  #: length of an integer, so that it can be converted to a float
#: Flags of `os.open` for a path that may be anything: opening a pipe does not block.
AT_ONCE = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
#: A TOML key of many parts, for which tomllib takes cubic time. Possessive quantifiers prevent backtracking.
LONG_KEY = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{DEEPEST}}}""")


class DocumentError(ValueError):
    """A document that cannot be read or exceeds a limit; the message is one line without the file's name."""


def content(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a file. Raises OSError for a folder, a pipe, a device, or more than `most` bytes."""
    try:
        handle = os.open(path, AT_ONCE)
    except ValueError as impossible:  # a path with a zero byte
        raise OSError(errno.EINVAL, str(impossible), str(path)) from None
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        _check_regular(found, path)
        if found.st_size > most:
            raise OSError(errno.EINVAL, f"{found.st_size:,} bytes, more than {most:,}", str(path))
        return file.read(most)


def refuse_irregular(path: Path) -> None:
    """Raise OSError for a missing file, a folder, a pipe or a device, which other code must not open."""
    try:
        _check_regular(path.stat(), path)
    except ValueError as impossible:
        raise OSError(errno.EINVAL, str(impossible), str(path)) from None


def _check_regular(found: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder, expected a file", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, expected a file", str(path))


def from_json(text: str | bytes) -> Any:
    """Parse a JSON text. Raises DocumentError."""
    try:
        found = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_table)
        return checked(found, finite=True)
    except RecursionError:
        raise _too_deep() from None
    except DocumentError:
        raise
    except ValueError as broken:
        raise fault_of(broken) from None


def json_text(document: object, **layout: Any) -> str:
    """Return the JSON of a document; `layout` is passed to `json.dumps`. NaN and infinities become null."""
    try:
        return json.dumps(document, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(_finite(document), allow_nan=False, **layout)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a table. Raises DocumentError for a duplicate key: readers differ in which value counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for at, key in enumerate(keys) if key in keys[:at])
        raise DocumentError(f"the key {twice[:60]!r} is repeated in one table")
    return found


def from_toml(text: str | bytes) -> dict[str, Any]:
    """Parse a TOML text. Raises DocumentError."""
    try:
        written = text if isinstance(text, str) else text.decode()
        if LONG_KEY.search(written):
            raise _too_deep()
        return checked(tomllib.loads(written))
    except RecursionError:
        raise _too_deep() from None
    except DocumentError:
        raise
    except ValueError as broken:
        raise fault_of(broken) from None


def _refuse_constant(word: str) -> None:
    raise DocumentError(f"invalid number {word}: expected a finite number or null")


def checked(document: Any, finite: bool = False) -> Any:
    """Return the document. Raises DocumentError if it is nested too deep or has an integer that is too long.

    With `finite`, infinities and NaN are errors too; TOML and YAML allow them, and the fields of models reject them.
    """
    level, depth = [document], 0
    while level:
        if depth > DEEPEST:
            raise _too_deep()
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, int) and value.bit_length() > MOST_BITS:
                raise _too_long()
            elif finite and isinstance(value, float) and not isfinite(value):
                raise DocumentError("a number beyond 1.8e308: expected a finite one")
        level, depth = below, depth + 1
    return document


def fault_of(broken: Exception) -> DocumentError:
    """Return a parser's message as one line."""
    message = " ".join(str(broken).split())
    return _too_long() if "integer string conversion" in message else DocumentError(message)


def _too_deep() -> DocumentError:
    return DocumentError(f"nested deeper than {DEEPEST} levels")


def _too_long() -> DocumentError:
    return DocumentError("an integer of more than 300 digits")


def canonical(document: object) -> bytes:
    """Return the canonical JSON of a document, for hashing."""
    return json_text(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def package_version() -> str:
    """Return the version of this package, installed or of a checkout."""
    try:
        return version("moereplay")
    except PackageNotFoundError:
        return tomllib.loads(CHECKOUT.read_text("utf-8"))["project"]["version"]
