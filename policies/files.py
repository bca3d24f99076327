"""User policies: register a file in the form of `policies/<kind>/*.py` in the catalogue of this process.

A policy of an installed package is registered as the file of its module.
The file is code that its user chose to run. It is read once, so that the hashed bytes are those that run, here and
in worker processes. Files that it imports are not hashed.
"""

from __future__ import annotations

import ast
import hashlib
import os
import stat
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import TYPE_CHECKING, Any

from moereplay import policies
from moereplay.policies.contract import Policy, PolicyError
from moereplay.policies.declaration import check
from moereplay.traces.plugins import using

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

VERSION_DIGITS = 12
MOST_BYTES = 1 << 20  #: of a file
_contents: dict[str, bytes] = {}  # of registered files, by path as given
_registering = threading.RLock()


def register(path: Path) -> Policy:
    """Add the policy of a file to its kind. Raises PolicyError with file, line and text, or OSError.

    A file is read once per process, so that a run has one version of it. An existing name is an error;
    repeating the same content has no effect.
    """
    before = _by_version().get(_version(_contents.get(str(path), b"")))
    return before or _register(str(path), _content(path))


def register_installed(point: EntryPoint) -> None:
    """Add the policy of an entry point `kind.name = package.module:POLICY`. Raises PolicyError."""
    with using(point, PolicyError):
        spec = find_spec(point.module)
        if spec is None or spec.origin is None or point.attr != "POLICY":
            raise PolicyError(f"invalid entry point {point.value!r}: expected package.module:POLICY")
        policy = register(Path(spec.origin))
        if f"{policy.kind}.{policy.name}" != point.name:
            del policies.REGISTERED[policy.kind][policy.name]
            raise PolicyError(f"{spec.origin} has the {policy.kind} policy {policy.name!r}")


def registered() -> list[tuple[str, bytes]]:
    """Return the arguments with which `register_all` repeats the registration in another process."""
    known = _by_version()
    return [(path, content) for path, content in _contents.items() if _version(content) in known]


def register_all(files: Iterable[tuple[str, bytes]]) -> None:
    """Add the policies of another process, once. Thread-safe."""
    for path, content in files:
        _register(path, content)


def blamed(error: BaseException) -> str | None:
    """Return one line on an error's innermost line in a policy file; None if it was raised elsewhere."""
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    for path, line in reversed(lines):
        if path in _contents:
            return _at(path, line, f"{type(error).__name__}: {error}")
    return blamed(error.__cause__) if error.__cause__ else None  # SimPy raises a copy without lines


def complaint(hook: Any, what: str, line: int = 0) -> PolicyError:
    """Return an error about a hook of a policy file, at the running line or at the hook's first."""
    return PolicyError(_at(hook.__code__.co_filename, line or hook.__code__.co_firstlineno, what))


def complaint_here(what: str) -> PolicyError:
    """Return an error about the innermost running line of a policy file, if there is one."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in _contents:
            return PolicyError(_at(frame.f_code.co_filename, frame.f_lineno, what))
        frame = frame.f_back
    return PolicyError(what)


def documentation(policy: Policy) -> str:
    """Return the docstring of the policy's file."""
    module = _module_name(policy.version) if policy.version else f"moereplay.policies.{policy.kind}.{policy.name}"
    return (sys.modules[module].__doc__ or "").strip()


def source(policy: Policy) -> bytes:
    """Return the bytes of the policy's file."""
    if policy.version:
        return next(content for content in _contents.values() if _version(content) == policy.version)
    return Path(policies.__file__).with_name(policy.kind).joinpath(f"{policy.name}.py").read_bytes()


def _content(path: Path) -> bytes:
    """Read the file. Raises OSError, or PolicyError for an endless one: a pipe or a device."""
    if "\0" in str(path):
        raise PolicyError(f"invalid path {path}: it contains a zero byte")
    found = path.stat()
    if stat.S_ISFIFO(found.st_mode) or stat.S_ISCHR(found.st_mode) or found.st_size > MOST_BYTES:
        raise PolicyError(f"invalid policy file {path}: expected a regular file of at most {MOST_BYTES:,} bytes")
    return path.read_bytes()


def _register(path: str, content: bytes) -> Policy:
    with _registering:
        return _added(path, content)


def _added(path: str, content: bytes) -> Policy:
    version = _version(content)
    _contents[path] = content
    if version in _by_version():
        return _by_version()[version]
    try:
        policy = replace(_declared(path, content, version), version=version)
        if policy.name in policies.names(policy.kind):
            what = f"{policy.kind} policy {policy.name!r} exists already; choose another name"
            raise PolicyError(_at(path, _line_of_policy(content), what))
    except BaseException:
        del _contents[path]
        raise
    policies.REGISTERED[policy.kind][policy.name] = policy
    return policy


def _version(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:VERSION_DIGITS]


def _by_version() -> dict[str, Policy]:
    return {policy.version: policy for given in policies.REGISTERED.values() for policy in given.values()}


def _declared(path: str, content: bytes, version: str) -> Policy:
    """Return the file's POLICY, checked. Raises PolicyError."""
    module = _run(path, content, _module_name(version))
    if not hasattr(module, "POLICY"):
        raise PolicyError(f"{path}: missing POLICY: end the file with POLICY = Eviction(...), or another kind")
    try:
        return check(module.POLICY)
    except Exception as error:
        raise PolicyError(blamed(error) or _at(path, _line_of_policy(content), str(error))) from None


def _run(path: str, content: bytes, name: str) -> ModuleType:
    """Run the file as a module, without writing a cache file next to it."""
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # where its functions say that they are from
    ending, os._exit = os._exit, sys.exit  # a file that ends the process would do so without a word
    try:
        exec(compile(content, path, "exec", dont_inherit=True), vars(module))
    except SyntaxError as error:
        if error.filename not in (path, None):  # of a file that this one imports
            raise PolicyError(blamed(error) or f"{path}: {error}") from None
        raise PolicyError(_at(path, error.lineno or 1, f"{type(error).__name__}: {error.msg}")) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of code that may raise anything
        raise PolicyError(blamed(error) or _at(path, 1, f"{type(error).__name__}: {error}")) from None
    finally:
        os._exit = ending
    return module


def _module_name(version: str) -> str:
    return f"policy_file_{version}"


def _line_of_policy(content: bytes) -> int:
    """Return the last line that assigns POLICY."""
    found = [1]
    for node in ast.parse(content).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found += [node.lineno for target in targets if isinstance(target, ast.Name) and target.id == "POLICY"]
    return found[-1]


def _at(path: str, line: int, what: str) -> str:
    """Return one line: file, line, message, and the source text."""
    lines = _contents.get(path, b"").decode("utf-8", "replace").splitlines()
    text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return f"{path}:{line}: {' '.join(what.split())}: {text}"
