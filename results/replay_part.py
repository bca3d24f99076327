"""One replay's part of a results folder: a row as Parquet, and beside it where the row comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from results.parts import PROVENANCE, Part
from results.result import Result
from results.write import parquet, to_frame, write_file, write_frame


def write_part(
    folder: Path, result: Result, bound: Mapping[str, int | None] | None, provenance: Mapping[str, Any] | None = None
) -> Path:
    """Write `part-<identity>.parquet` and then, beside it, its provenance in the form of a sweep's parts, if given.

    The same configuration replaces its own part. Raises ResultError.
    """
    identity = result.about["identity"]
    path, frame = folder / f"part-{identity}.parquet", to_frame([result], [bound])
    if provenance is None:
        write_frame(frame, path)
        return path
    documents = Part({path.stem: parquet(frame)}, {"configuration": [identity]}).documents(provenance)
    write_file(path, documents[path.name])
    write_file(folder / f"{path.stem}.{PROVENANCE}", documents[PROVENANCE])
    return path
