"""Atomic writes, folders that only this user can write to, and the files of this installation.

A file or folder is written under a hidden scratch name next to its target and then renamed. The scratch name contains
the writer's host and process id, so the next process that writes there removes the leftovers of a killed one.

Standard library only: every command looks up its trace here.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import BinaryIO

SUFFIX = ".tmp"


def write_whole(path: Path, data: bytes) -> None:
    """Write or replace a file, and create the folders above it. An OSError leaves an existing file as it was."""
    with whole_file(path) as file:
        file.write(data)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a scratch file that replaces `path` at the end; an exception leaves an existing file as it was."""
    try:
        with _beside(path) as scratch:
            with scratch.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a write that fails names no file
        raise


@contextmanager
def whole_folder(path: Path, synced: bool = True) -> Iterator[Path]:
    """Open a scratch folder that is renamed to `path`, which must not exist, at the end; an exception removes it.

    `synced`: its files are on the disk by then; False where their content is compared with digests anyway.
    """
    with _beside(path) as scratch:
        scratch.mkdir()
        yield scratch
        for file in scratch.rglob("*") if synced else ():
            if file.is_file():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
        scratch.rename(path)


def refuse_inside_trace(path: Path) -> None:
    """Raise OSError for a path inside a trace, whose folder may hold the trace's own files only."""
    for folder in path.absolute().parents:
        document = folder / "zarr.json"
        if document.is_file() and b'"moereplay-trace"' in document.read_bytes():
            raise OSError(errno.EINVAL, f"{folder} is a trace; other files cannot be written into it", str(path))


@contextmanager
def leaving_no_folders(path: Path) -> Iterator[None]:
    """After an exception remove folders at and above a path that are new, unless they hold anything."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for folder in new:
                folder.rmdir()
        raise


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yield a scratch name next to `path`; create the folders above, and remove all of it after an exception."""
    refuse_inside_trace(path)
    scratch = scratch_beside(path)
    with leaving_no_folders(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_abandoned(path.parent)
        try:
            yield scratch
        except BaseException:
            with suppress(OSError):  # a folder that cannot be accessed any more cannot be cleaned either
                remove(scratch)
            raise


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def scratch_beside(path: Path) -> Path:
    """Return a hidden name next to `path`, which `clear_abandoned` removes once this process has ended."""
    return path.with_name(f".{path.name}.{scratch_name()}{SUFFIX}")


def scratch_name() -> str:
    """Return HOST-PROCESS-RANDOM, which identifies the writer."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def is_abandoned(name: str) -> bool:
    """Return True if a name ends with a `scratch_name` of a process of this host that has ended."""
    found = re.search(rf"{re.escape(socket.gethostname())}-(\d+)-\w+$", name)
    return found is not None and not _is_alive(int(found[1]))


@cache
def clear_abandoned(folder: Path) -> None:
    """Remove scratch files of killed processes. Cached, because a folder may hold very many results."""
    for left in folder.glob(f".*{SUFFIX}"):
        if is_abandoned(left.name.removesuffix(SUFFIX)):
            remove(left)


def _is_alive(pid: int) -> bool:
    if sys.platform == "win32":  # os.kill would terminate the process
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


# -- Digests


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's bytes. Raises OSError."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_of(files: Sequence[Path]) -> str:
    """Return the SHA-256 of one file's bytes; of several, of the lines that `sha256sum` prints for their names."""
    hashes = [sha256_of(file) for file in files]
    if len(files) == 1:
        return hashes[0]
    listing = "".join(f"{sha}  {file.name}\n" for sha, file in zip(hashes, files, strict=True))
    return hashlib.sha256(listing.encode()).hexdigest()


# -- Private folders: machine code and arrays in them are executed, or indexed by without a check

PRIVATE = 0o700
OTHERS_WRITE = 0o022


def claimed(path: Path) -> bool:
    """Create a folder if needed; return True if only this user owns it and can write to it.

    A folder of this user that others could write to is emptied first.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(PRIVATE, exist_ok=True)
        if not (_keeps_its_folders(path.parent) and _is_ours(path.lstat())):
            return False
        if _is_open(path.lstat()):
            shutil.rmtree(path)
            path.mkdir(PRIVATE, exist_ok=True)  # another process may be doing the same
        path.chmod(PRIVATE)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def private_folder(name: str) -> Path:
    """Return the private folder `name` in the user's cache, else in a temporary folder. Raises OSError."""
    cache = user_cache()
    if cache is not None and claimed(cache / name):
        return cache / name
    folder = temporary() / name
    folder.mkdir(PRIVATE, exist_ok=True)
    return folder


def forget_unused(home: Path, pattern: str, seconds: float) -> None:
    """Delete what was not used for so long, by its time. A process that still uses it makes it again."""
    oldest = time.time() - seconds
    for path in home.glob(pattern):
        with suppress(OSError):
            if path.lstat().st_mtime < oldest:
                remove(path)


def user_cache() -> Path | None:
    """Return moereplay's folder in the user's cache, None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moereplay"
    except RuntimeError:
        return None


def temporary() -> Path:
    """Return this user's private temporary folder, the same for all of their processes.

    If another user occupies its name, return the first folder that an earlier process created instead.
    """
    folder = Path(tempfile.gettempdir())
    name = f"moereplay-{os.getuid()}" if _has_owners() else "moereplay"
    found = (path for path in (folder / name, *sorted(folder.glob(f"{name}-*"))) if claimed(path))
    return next(found, None) or Path(tempfile.mkdtemp(prefix=f"{name}-"))


def _keeps_its_folders(parent: Path) -> bool:
    """Return True if no other user can rename entries of `parent`; restrict a folder of this user first."""
    found = parent.stat()
    if not _has_owners() or found.st_mode & stat.S_ISVTX:
        return True
    if _is_open(found) and found.st_uid == os.getuid():
        parent.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS_WRITE)
        return True
    return found.st_uid in (0, os.getuid()) and not _is_open(found)


def _is_ours(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and (not _has_owners() or found.st_uid == os.getuid())


def _is_open(found: os.stat_result) -> bool:
    return _has_owners() and bool(found.st_mode & OTHERS_WRITE)


def _has_owners() -> bool:
    """Return False on Windows, where mode bits carry no access rights and homes are private anyway."""
    return hasattr(os, "getuid")


# -- This installation: the bundled trace, and the command that installs optional dependencies

SAMPLE = "miniature"  #: name of the bundled trace
DISTRIBUTION = "moereplay"


def bundled(path: Path, folder: Path = Path()) -> Path:
    """Return the bundled trace for its name, unless the folder has a file of that name; else the path in the folder."""
    if str(path) != SAMPLE or (folder / path).exists():
        return folder / path
    return Path(__file__).with_name("samples") / f"{SAMPLE}.zarr"


def name_of(path: Path) -> str:
    """Return the name that a user types for the trace at a path."""
    return SAMPLE if path == bundled(Path(SAMPLE)) else str(path)


def install_command(extra: str) -> str:
    """Return the command that installs the optional dependencies `extra`.

    In a clone it installs the clone with this extra. For a wheel it lists the packages themselves: moereplay is on no
    package index, so `pip install 'moereplay[...]'` would fail, or install another project of that name.
    """
    clone = _clone()
    if clone is None:
        return f"pip install {' '.join(map(quote, _packages(metadata.distribution(DISTRIBUTION), extra)))}"
    place = "." if clone == Path.cwd() else str(clone)
    return f"pip install -e {quote(f'{place}[{extra}]')}"


def install_contrib(folder: str) -> str:
    """Return the command that installs the plug-ins of `contrib/FOLDER`: from the clone, else as a distribution."""
    clone = _clone()
    if clone is None:
        return f"pip install {DISTRIBUTION}-{folder}"
    return f"pip install {quote(str(Path('' if clone == Path.cwd() else clone, 'contrib', folder)))}"


def _clone() -> Path | None:
    """Return the folder of the clone that is installed or run from, None for a wheel."""
    try:
        return _clone_of(metadata.distribution(DISTRIBUTION))
    except metadata.PackageNotFoundError:  # run from its folder
        return Path(__file__).resolve().parents[1]


def _clone_of(found: metadata.Distribution) -> Path | None:
    """Return the folder of an editable installation (PEP 610), None for a wheel."""
    import json
    from urllib.parse import urlparse
    from urllib.request import url2pathname

    project = Path(str(found.locate_file("pyproject.toml")))
    if project.is_file():  # Python runs in the clone and finds the metadata that its build left there
        return project.parent
    try:
        origin = json.loads(found.read_text("direct_url.json") or "{}")
        editable = origin["dir_info"]["editable"]
        return Path(url2pathname(urlparse(origin["url"]).path)) if editable is True else None
    except (ValueError, KeyError, TypeError):
        return None


def _packages(found: metadata.Distribution, extra: str) -> list[str]:
    """Return the requirements of an extra without their markers, such as `submitit>=1.5.3`."""
    from packaging.requirements import Requirement

    needed = [Requirement(text) for text in found.requires or ()]
    wanted = [each for each in needed if each.marker and each.marker.evaluate({"extra": extra})]
    return [str(each).partition(";")[0].strip() for each in wanted]
