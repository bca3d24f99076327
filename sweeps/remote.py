"""Traces in object stores (`s3://`, `gs://`, `https://`, ...): fetched once to this machine."""

from __future__ import annotations

import shutil
import uuid
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.objects import Objects, cache_folder


def fetched(url: str) -> Path:
    """The trace of a URL as a folder in the user's cache; what is there already is not fetched again.

    A trace in a store is taken to stay as it is: remove the folder to fetch it anew. Raises ConfigError.
    """
    name = url.partition("://")[2].rstrip("/").rpartition("/")[2]
    if name in ("", ".", ".."):
        raise ConfigError(f"{url} names no trace; expected an address as s3://bucket/NAME.zarr")
    final = cache_folder() / "fetched" / sha256(url.encode()).hexdigest()[:16] / name
    if final.exists():
        return final
    scratch = final.with_name(f"{final.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        _download(Objects(url.rstrip("/")), scratch)
        with suppress(OSError):  # another process was first
            scratch.rename(final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final


def _download(objects: Objects, folder: Path) -> None:
    """Every object below the URL. Raises ConfigError if there is none, the store refuses, or the disk is full."""
    for name in objects.names():
        target = folder / name
        if ".." in target.parts or not target.is_relative_to(folder):
            raise ConfigError(f"cannot fetch {objects.url}: {name!r} leads out of the trace; check the address")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(objects.get(name))
        except OSError as error:
            raise ConfigError(f"cannot fetch {objects.url}: {error}; make room") from None
    if not folder.exists():
        raise ConfigError(f"{objects.url} holds nothing; check the address")
