"""Digests of what is stored: of every row, and of every file of replays, curves and validations."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from moereplay.traces.schema import canonical

#: In the metadata of a Parquet file: sha256 of the file, with zeros where the digest stands.
FILE_DIGEST = "moereplay.sha256"
NO_DIGEST = "0" * 64


def row_digest(row: Mapping[str, Any]) -> str:
    """sha256 of a stored row without its digest: polars checks no page of a Parquet file that it reads."""
    content = {name: value for name, value in row.items() if name != "digest"}
    return hashlib.sha256(canonical(content)).hexdigest()


def with_file_digest(data: bytes) -> bytes:
    """A Parquet file that was written with the metadata {FILE_DIGEST: NO_DIGEST}, with its digest there."""
    place = _file_digest(data)
    if place is None:
        raise AssertionError("the file was written without a place for its digest")
    return data[: place[0]] + hashlib.sha256(data).hexdigest().encode() + data[place[1] :]


def is_damaged(data: bytes) -> bool:
    """Whether a file is not what its digest says; one without a digest is an older version's."""
    place = _file_digest(data)
    if place is None:
        return False
    blank = data[: place[0]] + NO_DIGEST.encode() + data[place[1] :]
    return hashlib.sha256(blank).hexdigest().encode() != data[slice(*place)]


def _file_digest(data: bytes) -> tuple[int, int] | None:
    """Where the digest begins and ends: two bytes after its name, for the type and the length of a text in Thrift."""
    name = data.rfind(FILE_DIGEST.encode())  # metadata stand behind all rows
    begin = name + len(FILE_DIGEST) + 2
    return None if name < 0 else (begin, begin + len(NO_DIGEST))
