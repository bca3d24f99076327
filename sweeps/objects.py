"""Access objects below a URL (`s3://`, `gs://`, `az://`, `file://`, ...) through obstore, and fetch traces."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from moereplay.simulator.errors import ConfigError
from moereplay.sweeps import extra

#: A mistyped address fails within seconds; computed results are worth waiting minutes for the network.
FETCHES = {"max_retries": 5, "retry_timeout": timedelta(seconds=30)}
STORES = {"max_retries": 12, "retry_timeout": timedelta(minutes=5)}
#: Environment variables that obstore reads.
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION (AWS_ENDPOINT_URL where it is not Amazon's)",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
#: Without credentials obstore requests a token from the cloud machine that it runs on.
REFUSED = ("latest/api/token", "token request", "401 Unauthorized", "403 Forbidden", "must be specified", "Missing ")
MISSING = ("404 Not Found", "No such file or directory")


def is_url(text: str) -> bool:
    """Return whether a text is a URL."""
    return "://" in text


def cache_folder() -> Path:
    """Return the user's cache folder of this program."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moereplay"


@dataclass(frozen=True)
class Objects:
    """Objects below a URL without a trailing slash. Every method raises ConfigError naming the URL."""

    url: str

    def names(self) -> list[str]:
        """List the names of all objects, relative to the URL."""
        with _translated("fetch", self.url):
            pages = extra("remote", "obstore").list(_opened(self.url, fetching=True))
            return [found["path"] for page in pages for found in page]

    def get(self, name: str) -> bytes:
        """Return the content of an object."""
        with _translated("fetch", f"{self.url}/{name}"):
            return bytes(extra("remote", "obstore").get(_opened(self.url, fetching=True), name).bytes())

    def put(self, name: str, data: bytes) -> None:
        """Create or replace an object atomically."""
        with _translated("store", f"{self.url}/{name}"):
            extra("remote", "obstore").put(_opened(self.url, fetching=False), name, data)


@cache
def _opened(url: str, fetching: bool) -> Any:
    """Open a pool of connections, one per process."""
    return extra("remote", "obstore.store").from_url(url, retry_config=FETCHES if fetching else STORES)


@contextmanager
def _translated(doing: str, url: str) -> Iterator[None]:
    """Convert obstore's errors to a ConfigError of one line with advice."""
    try:
        yield
    except (OSError, ValueError, extra("remote", "obstore.exceptions").BaseError) as error:
        raise ConfigError(f"cannot {doing} {url}: {_summary(str(error))}; {_advice(url, str(error))}") from None


def _summary(text: str) -> str:
    """Return the failed request and the response from an error's first line, with the code of its XML body."""
    code = re.search(r"<Code>(\w+)</Code>", text)
    line = text.splitlines()[0].rpartition("Error performing ")[2].partition(": <")[0]
    return line + (f" ({code[1]})" if code else "")


def _advice(url: str, message: str) -> str:
    credentials = CREDENTIALS.get(url.partition("://")[0], "the store's credentials")
    if any(sign in message for sign in REFUSED):
        return f"set {credentials} in the environment"
    if any(sign in message for sign in MISSING):
        return "make that bucket or folder first, or correct its name"
    return f"check the address, the network and, in the environment, {credentials}"


# -- Traces in object stores


def fetched(url: str) -> Path:
    """Fetch the trace at a URL into the user's cache, unless it is cached, and return its folder.

    Traces in a store are assumed immutable: remove the folder to fetch one again. Raises ConfigError.
    """
    name = url.partition("://")[2].rstrip("/").rpartition("/")[2]
    if name in ("", ".", ".."):
        raise ConfigError(f"invalid trace URL {url!r}: expected an address such as s3://bucket/NAME.zarr")
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
    """Download every object below the URL. Raises ConfigError if there is none, or on an I/O error."""
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
        raise ConfigError(f"nothing found at {objects.url}; check the address")
