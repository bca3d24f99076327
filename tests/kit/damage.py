"""Damage a file: other bytes, other values, or no file at all. Seeded, so that a case can be repeated."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

NINES = "9" * 4301  #: more digits than Python turns into an integer without being told to
#: What stands in the place of a number or another value: beyond every range, of another type, or no value at all.
VALUES = (
    *(NINES, f"-{NINES}", f"0x{'f' * 5000}", f"1e{NINES}", "1e400", "-1e400", "nan", "inf", "NaN", "-Infinity"),
    *("-0", "-0.0", "-1", "0", "0.1", "1e18", "1e300", "99999999999999999999999"),
    *(str(2**31), str(2**63 - 1), str(2**63), str(2**64), "true", "null", '"x"', '""', "[]", "{}", '{"a": {"a": 1}}'),
    *("2024-13-45", "2024-01-01", "12:30:59", "1_000", "٣", '"' + "x" * 100_000 + '"', '"\\u0000"', '"\\ud800"'),
    *("[" * 100_000, "[" * 900 + "]" * 900, '{"a":' * 100_000, "[" * 300 + "1" + "]" * 300, "a." * 30_000 + "a=1"),
)
NUMBER = re.compile(rb"-?\d+(\.\d+)?")
HUGE = 8 << 30  #: bytes of a file without content

Damage = Callable[[Path, Random], None]


def _flipped(data: bytes, rng: Random) -> bytes:
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 30))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


def _cut(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _without(data: bytes, rng: Random) -> bytes:
    start, stop = sorted(rng.sample(range(len(data) + 1), 2))
    return data[:start] + data[stop:]


def _twice(data: bytes, rng: Random) -> bytes:
    start, stop = sorted(rng.sample(range(len(data) + 1), 2))
    return data[:stop] + data[start:]


def _many_times(data: bytes, rng: Random) -> bytes:
    return data * rng.choice((2, 5, 50))


def _inserted(what: bytes) -> Callable[[bytes, Random], bytes]:
    def insert(data: bytes, rng: Random) -> bytes:
        at = rng.randrange(len(data) + 1)
        return data[:at] + what + data[at:]

    return insert


def _other_number(data: bytes, rng: Random) -> bytes:
    found = list(NUMBER.finditer(data))
    if not found:
        return rng.choice(VALUES).encode()
    at = rng.choice(found)
    return data[: at.start()] + rng.choice(VALUES).encode() + data[at.end() :]


def _swapped_lines(data: bytes, rng: Random) -> bytes:
    lines = data.splitlines(keepends=True)
    rng.shuffle(lines)
    return b"".join(lines)


#: Of content, whatever its format: (bytes, draws) -> bytes.
BYTES: dict[str, Callable[[bytes, Random], bytes]] = {
    "flipped": _flipped,
    "cut": _cut,
    "without": _without,
    "twice": _twice,
    "many_times": _many_times,
    "number": _other_number,
    "number_again": _other_number,
    "number_once_more": _other_number,
    "lines_swapped": _swapped_lines,
    "empty": lambda data, rng: b"",
    "nul": _inserted(b"\0"),
    "no_utf8": _inserted(b"\xff\xfe"),
    "surrogate": _inserted(b"\xed\xa0\x80"),
    "crlf": lambda data, rng: data.replace(b"\n", b"\r\n"),
    "bom": lambda data, rng: b"\xef\xbb\xbf" + data,
    "brackets": lambda data, rng: b"[" * 100_000,
    "braces": lambda data, rng: b'{"a":' * 100_000,
    "digits": lambda data, rng: NINES.encode(),
    "noise": lambda data, rng: rng.randbytes(1000),
}


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_bytes(b"x")


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, HUGE)


#: In place of a file.
NO_FILE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "folder": _folder,
    "pipe": os.mkfifo,
    "loop": lambda path: path.symlink_to(path.name),
    "zero_device": lambda path: path.symlink_to("/dev/zero"),
    "null_device": lambda path: path.symlink_to("/dev/null"),
    "sparse": _sparse,
}


def damages() -> dict[str, Damage]:
    """Every way of damaging a file, by name."""
    return {name: _rewriting(change) for name, change in BYTES.items()} | {
        name: _replacing(make) for name, make in NO_FILE.items()
    }


def _rewriting(change: Callable[[bytes, Random], bytes]) -> Damage:
    def damage(path: Path, rng: Random) -> None:
        content = change(path.read_bytes(), rng)
        path.unlink()  # it may be a link to what other cases read
        path.write_bytes(content)

    return damage


def _replacing(make: Callable[[Path], object]) -> Damage:
    def damage(path: Path, rng: Random) -> None:
        path.unlink()
        make(path)

    return damage


def json_damage(path: Path, rng: Random) -> None:
    """Another value, one key more or one less, somewhere in a JSON document."""
    document = json.loads(path.read_bytes())
    owner, key = rng.choice(list(_places(document)))
    how = rng.randrange(4)
    if how == 0 and isinstance(owner, dict):
        del owner[key]
    elif how == 1 and isinstance(owner, dict):
        owner[rng.choice(("x" * 100_000, "\u0000", "\u202e", "__proto__", "٣"))] = owner[key]
    else:
        owner[key] = "@here@"
    text = json.dumps(document).replace('"@here@"', rng.choice(VALUES))
    path.unlink()
    path.write_text(text)


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value in a document."""
    inside = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(inside):
        yield document, key
        if isinstance(value, dict | list):
            yield from _places(value)
