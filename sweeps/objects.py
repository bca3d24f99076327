"""Objects below a URL (`s3://`, `gs://`, `az://`, `file://`, ...), by obstore; whatever fails is told in one line."""

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

#: A mistyped address is told in seconds; what has been computed is worth minutes of a network that comes back.
FETCHES = {"max_retries": 5, "retry_timeout": timedelta(seconds=30)}
STORES = {"max_retries": 12, "retry_timeout": timedelta(minutes=5)}
#: What obstore reads from the environment.
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION (AWS_ENDPOINT_URL where it is not Amazon's)",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
#: Without credentials obstore asks the machine it runs on for a token.
REFUSED = ("latest/api/token", "token request", "401 Unauthorized", "403 Forbidden", "must be specified", "Missing ")
MISSING = ("404 Not Found", "No such file or directory")


def is_url(text: str) -> bool:
    """Whether something is named by a URL."""
    return "://" in text


def cache_folder() -> Path:
    """The user's, for what was fetched."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moereplay"


@dataclass(frozen=True)
class Objects:
    """What lies below a URL, which has no slash at its end. Everything in here raises ConfigError naming the URL."""

    url: str

    def names(self) -> list[str]:
        """Of all objects, relative to the URL."""
        with _told("fetch", self.url):
            pages = extra("remote", "obstore").list(_opened(self.url, fetching=True))
            return [found["path"] for page in pages for found in page]

    def get(self, name: str) -> bytes:
        """The content of an object."""
        with _told("fetch", f"{self.url}/{name}"):
            return bytes(extra("remote", "obstore").get(_opened(self.url, fetching=True), name).bytes())

    def put(self, name: str, data: bytes) -> None:
        """Make an object, or make it anew; others see it whole or not at all."""
        with _told("store", f"{self.url}/{name}"):
            extra("remote", "obstore").put(_opened(self.url, fetching=False), name, data)


@cache
def _opened(url: str, fetching: bool) -> Any:
    """A pool of connections, one per process."""
    return extra("remote", "obstore.store").from_url(url, retry_config=FETCHES if fetching else STORES)


@contextmanager
def _told(doing: str, url: str) -> Iterator[None]:
    """What obstore raises as one line that says what to do."""
    try:
        yield
    except (OSError, ValueError, extra("remote", "obstore.exceptions").BaseError) as error:
        raise ConfigError(f"cannot {doing} {url}: {_said(str(error))}; {_advice(url, str(error))}") from None


def _said(text: str) -> str:
    """The request that failed and the answer: of the first line, without the XML that begins there but for its code."""
    code = re.search(r"<Code>(\w+)</Code>", text)
    line = text.splitlines()[0].rpartition("Error performing ")[2].partition(": <")[0]
    return line + (f" ({code[1]})" if code else "")


def _advice(url: str, said: str) -> str:
    credentials = CREDENTIALS.get(url.partition("://")[0], "the store's credentials")
    if any(sign in said for sign in REFUSED):
        return f"set {credentials} in the environment"
    if any(sign in said for sign in MISSING):
        return "make that bucket or folder first, or correct its name"
    return f"check the address, the network and, in the environment, {credentials}"


# -- Traces in object stores (`s3://`, `gs://`, `https://`, ...): fetched once to this machine.


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
