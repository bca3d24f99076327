"""Traces in object stores (`s3://`, `gs://`, `https://`, ...): fetched once to this machine, by obstore."""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from simulator.errors import ConfigError
from simulator.extras import extra


def is_remote(path: str) -> bool:
    """Whether a trace is named by a URL."""
    return "://" in path


def fetched(url: str) -> Path:
    """The trace of a URL as a folder in the user's cache; what is there already is not fetched again.

    A trace in a store is taken to stay as it is: remove the folder to fetch it anew. Raises ConfigError.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moereplay" / "fetched"
    final = cache / sha256(url.encode()).hexdigest()[:16] / url.rstrip("/").rsplit("/", 1)[1]
    if final.exists():
        return final
    scratch = final.with_name(f"{final.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        _download(url, scratch)
        with suppress(OSError):  # another process was first
            scratch.rename(final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final


def _download(url: str, folder: Path) -> None:
    """Every object below the URL. Raises ConfigError if there is none or the store refuses."""
    obstore = extra("remote", "obstore")
    try:
        store = extra("remote", "obstore.store").from_url(url.rstrip("/"))
        for page in obstore.list(store):
            for found in page:
                target = folder / found["path"]
                if ".." in target.parts:
                    raise ValueError(f"{found['path']!r} leads out of the trace")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(obstore.get(store, found["path"]).bytes())
    except (OSError, ValueError, extra("remote", "obstore.exceptions").BaseError) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(f"cannot fetch {url}: {said}; check the address and credentials") from None
    if not folder.exists():
        raise ConfigError(f"{url} holds nothing; check the address")
