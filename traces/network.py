"""Read documents and beginnings of files over the network, and data sets and models of the Hugging Face hub.

Every answer is untrusted: it has limits in time and size, and is kept only after it has made a model.
"""

from __future__ import annotations

import io
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from hashlib import sha256
from http.client import HTTPException
from ipaddress import ip_address
from pathlib import Path
from socket import getaddrinfo
from string import punctuation
from typing import Any, TypeVar, cast
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urljoin, urlsplit

from moereplay.traces.files import temporary, user_cache, write_whole
from moereplay.traces.schema import TraceError, shown
from moereplay.traces.texts import without_password

ENDPOINT = "https://huggingface.co"
IDENTITY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)  #: owner/name of the hub
OFFLINE = "HF_HUB_OFFLINE"  #: huggingface_hub reads it too
IDLE_S, ANSWER_S, MODEL_S = 20, 30, 120  #: longest waits: for bytes, for a whole answer, for all answers of a model
MOST_BYTES = 1 << 28  #: of all answers of a model
MOST_DOCUMENT = 1 << 26
BLOCK = 1 << 18  #: bytes of one ranged request
MOVED, MOST_MOVES = (301, 302, 303, 307, 308), 5
#: Handlers of addresses of the web alone: no files, no FTP, and no redirects; `_moved` follows those that it allows.
WEB = (request.ProxyHandler, request.HTTPHandler, request.HTTPSHandler, request.UnknownHandler)
ENDS = (request.HTTPDefaultErrorHandler, request.HTTPErrorProcessor)
R = TypeVar("R")


class MissingError(TraceError):
    """A file that the server does not have."""


def endpoint() -> str:
    """Return the address of the hub, without a slash at its end."""
    return os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")


def is_offline() -> bool:
    """Return whether nothing may be read over the network, by `--offline` or as huggingface_hub understands it."""
    said = os.environ.get(OFFLINE) or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return said.upper() in ("1", "ON", "YES", "TRUE")


def begun(work: Callable[[], R]) -> Future[R]:
    """Start work in a thread that keeps neither Ctrl-C nor the end of the process waiting."""
    future = Future[R]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again where the result is waited for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Network:
    """The answers for one model: each read once, all within one time and one number of bytes."""

    def __init__(self, kept: bool) -> None:
        """Start the clock; with `kept`, use what earlier commands have kept."""
        self.used_kept = False
        self._kept, self._ends, self._left = kept, time.monotonic() + MODEL_S, MOST_BYTES
        self._answers: dict[str, bytes] = {}

    def document(self, address: str) -> bytes:
        """Return a whole document. Raises TraceError, and MissingError if the server does not have it."""
        return self.once(address, lambda: self._answer(address, MOST_DOCUMENT)[1])

    def once(self, name: str, read: Callable[[], bytes]) -> bytes:
        """Return what is kept under a name, or what `read` returns. Raises MissingError if the file is not there."""
        kept = _cache(name)
        if self._kept and kept.is_file():
            self.used_kept, data = True, kept.read_bytes()
        else:
            try:
                data = read()
            except MissingError:
                data = b""
        self._answers[name] = data
        if not data:
            raise MissingError(f"{name}: the server answers 404 Not Found")
        return data

    def keep(self) -> None:
        """Keep all answers for later commands, whole or not at all; ignore a cache that cannot be written."""
        with suppress(OSError):
            for name, data in self._answers.items():
                write_whole(_cache(name), data)

    def part(self, address: str, first: int, last: int) -> tuple[bytes, int]:
        """Return bytes of a file, as far as it has them, and its size. Raises TraceError for any others."""
        stated, body = self._answer(address, last - first + 1, f"bytes={first}-{last}")
        found = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", stated, re.ASCII)
        if not found:
            raise TraceError(
                f"{address}: the server does not support ranged requests; download the file and pass its path"
            )
        begin, end, size = map(int, found.groups())
        if (begin, end) != (first, min(last, size - 1)) or len(body) != end - begin + 1:
            raise TraceError(
                f"{address}: the server sent {len(body):,} bytes as {shown(stated)}, asked for {first:,} to {last:,}; "
                "download the file and pass its path"
            )
        return body, size

    def _answer(self, address: str, most: int, part: str = "") -> tuple[str, bytes]:
        """Return the range that an answer states, and its body. Raises TraceError."""
        _check(address)
        if is_offline():
            raise TraceError(f"{address}: not read, as --offline or {OFFLINE} is set; pass a local file")
        seconds = min(ANSWER_S, self._ends - time.monotonic())
        most = min(most, self._left)
        try:
            if seconds <= 0:
                raise TimeoutError
            stated, body = begun(partial(_received, address, part, most, time.monotonic() + seconds)).result(seconds)
        except HTTPError as wrong:
            kind = MissingError if wrong.code == 404 else TraceError
            denied = "; is it gated? Accept its terms and set HF_TOKEN" if wrong.code in (401, 403) else ""
            said = shown(f"{wrong.code} {wrong.reason}")
            raise kind(f"{address}: the server answers {said}{denied}") from None
        except TimeoutError:
            limit = f"no whole answer in {ANSWER_S} s, or not all of them in {MODEL_S} s"
            raise TraceError(f"{address}: cannot be reached ({limit}); pass a local file") from None
        except (OSError, ValueError, HTTPException) as wrong:
            reason = str(getattr(wrong, "reason", wrong)) or type(wrong).__name__
            raise TraceError(f"{address}: cannot be reached ({shown(reason, 120)}); pass a local file") from None
        self._left -= len(body)
        if len(body) > most:
            raise TraceError(f"{address}: more than {most:,} bytes: expected a model's config.json or headers")
        return stated, body


def _received(address: str, part: str, most: int, ends: float) -> tuple[str, bytes]:
    """Return the stated range and at most one byte more than `most`. Raises OSError, ValueError or HTTPException."""
    with _opened(address, {"Range": part} if part else {}) as answer:
        body = bytearray()
        while len(body) <= most and (block := answer.read1(BLOCK)):
            body += block
            if time.monotonic() > ends:
                raise TimeoutError
        if answer.length and len(body) <= most:
            raise OSError(f"the answer ends {answer.length:,} bytes before its end")
        return answer.headers.get("Content-Range", "") if answer.status == 206 else "", bytes(body[: most + 1])


def _opened(address: str, headers: dict[str, str]) -> Any:
    """Open an address, or where it has moved to. The token is for the hub, which redirects to other servers."""
    web = request.OpenerDirector()
    for handler in (*WEB, *ENDS):
        web.add_handler(handler())
    asked = request.Request(address, headers=headers | {"User-Agent": "moereplay"})
    if (token := os.environ.get("HF_TOKEN", "").strip()) and address.startswith(f"{endpoint()}/"):
        if not (token.isascii() and token.isprintable()):
            raise ValueError("HF_TOKEN holds characters that no token has")
        asked.add_header("Authorization", f"Bearer {token}")
    for _ in range(MOST_MOVES):
        try:
            return web.open(asked, timeout=IDLE_S)
        except HTTPError as moved:
            moved.close()
            where = moved.headers.get("Location")
            if moved.code not in MOVED or not where:
                raise
            asked = request.Request(_moved(asked.full_url, where), headers=headers | {"User-Agent": "moereplay"})
    raise URLError(f"more than {MOST_MOVES} redirects")


def _moved(address: str, where: str) -> str:
    """Return where a redirect leads. Raises URLError for another scheme, and for a machine of the local network."""
    to = quote(urljoin(address, where), encoding="iso-8859-1", safe=punctuation)
    old, new = urlsplit(address), urlsplit(to)
    schemes = ("https",) if old.scheme == "https" else ("http", "https")
    inwards = new.hostname != old.hostname and _is_local(new.hostname) and not _is_local(old.hostname)
    if new.scheme not in schemes or "@" in new.netloc or inwards:
        raise URLError(f"it redirects to {without_password(to)}")
    return to


def _is_local(host: str | None) -> bool:
    """Return whether a host is this machine or one of its own network."""
    try:
        return any(not ip_address(found[4][0]).is_global for found in getaddrinfo(host, None))
    except (OSError, ValueError):  # a name that only a proxy knows
        return False


def _check(address: str) -> None:
    """Raises TraceError unless an address is one of the web, without a password."""
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if usable and "@" in parts.netloc:
        fix = "remove the password; HF_TOKEN gives access to gated models, else download the file and pass its path"
        raise TraceError(f"invalid address {shown(address, 200)}: {fix}")
    if not usable or not address.isprintable() or " " in address:
        said = shown(address, 200)
        raise TraceError(f"invalid address {said}: expected http://HOST/... or https://HOST/...")


def _cache(name: str) -> Path:
    """Return the file that keeps an answer."""
    return (user_cache() or temporary()) / "models" / sha256(name.encode(errors="replace")).hexdigest()[:32]


class Ranged(io.RawIOBase):
    """A file at an address that is read by ranged requests, in blocks from its beginning on. Raises TraceError."""

    def __init__(self, network: Network, address: str) -> None:
        self._network, self._address, self._at, self._held = network, address, 0, b""
        self.size = 0
        self._more()

    def read(self, size: int = -1) -> bytes:
        """Read the next `size` bytes."""
        end = min(self._at + size, self.size)
        while len(self._held) < end:
            self._more()
        found = self._held[self._at : end]
        self._at = end
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place counted from the beginning."""
        assert whence == 0
        self._at = offset
        return offset

    def beginning(self, size: int) -> bytes:
        """Return the first `size` bytes, as far as they were read."""
        return self._held[:size]

    def _more(self) -> None:
        first = len(self._held)
        body, size = self._network.part(self._address, first, first + max(BLOCK, first) - 1)  # twice as much each time
        if not body or (first and size != self.size):
            raise TraceError(f"{self._address}: the file has changed while it was read, or is empty; try again")
        self.size = size
        self._held += body


# -- Repositories of the hub, by its own package: it keeps what it has read, and knows the user's login


def snapshot(identity: str, what: str, seconds: float | None = None, **asked: Any) -> Path:
    """Return the folder of a `model` or a `data set` of the hub; `asked` names its files. Raises TraceError."""
    from huggingface_hub import errors, snapshot_download

    kind = "" if what == "model" else " --repo-type dataset"
    # Errors of its network library, and of answers of another shape.
    broken = cast(
        "tuple[type[Exception], ...]", (*errors.HfHubHTTPError.__bases__, OSError, ValueError, LookupError, TypeError)
    )
    fix = f"run `hf download {identity}{kind} --local-dir DIR` on a connected machine and pass DIR"
    try:
        return Path(begun(partial(snapshot_download, identity, **asked)).result(seconds))
    except errors.GatedRepoError:
        raise TraceError(f"{identity} is gated: accept its terms on huggingface.co, then `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise TraceError(f"{identity} is neither a folder nor a (public) {what} on the Hugging Face hub") from None
    except errors.RevisionNotFoundError:
        raise TraceError(f"{identity} has no revision {asked.get('revision')!r} on the Hugging Face hub") from None
    except (errors.LocalEntryNotFoundError, TimeoutError):
        why = f"--offline or {OFFLINE} is set" if is_offline() else "the Hugging Face hub cannot be reached"
        raise TraceError(f"{identity} is not a folder here, and {why}; {fix}, or set HF_HOME to its cache") from None
    except broken as refused:
        said = shown(" ".join(str(refused).split()), 200)
        raise TraceError(f"{identity}: the Hugging Face hub says: {said}") from None
