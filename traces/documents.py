"""Read files, JSON and TOML within limits and as immutable typed models, with errors in one line; write JSON.

A path may lead to a pipe, which blocks, or to a device without an end. A document of a few bytes may be nested deeper
than Python's stack, or hold an integer of more digits than Python prints.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
)

from moereplay.traces.texts import MOST_NAME, hint, settled, shown

ModelT = TypeVar("ModelT", bound=BaseModel)

#: Of this package, where it is not installed: a checkout on PYTHONPATH.
CHECKOUT = Path(__file__).resolve().parents[1] / "pyproject.toml"
MOST_BYTES = 1 << 24  #: size of a document
DEEPEST = 64  #: nesting of lists and tables
MOST_BITS = 1023  #: length of an integer, so that it can be converted to a float
#: Flags of `os.open` for a path that may be anything: opening a pipe does not block.
AT_ONCE = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
#: A TOML key of many parts, for which tomllib takes cubic time. Possessive quantifiers prevent backtracking.
LONG_KEY = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{DEEPEST}}}""")


class DocumentError(ValueError):
    """A document that cannot be read or exceeds a limit; the message is one line without the file's name."""


def content(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a file. Raises OSError for a folder, a pipe, a device, or more than `most` bytes."""
    try:
        handle = os.open(path, AT_ONCE)
    except ValueError as impossible:  # a path with a zero byte
        raise OSError(errno.EINVAL, str(impossible), str(path)) from None
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        _check_regular(found, path)
        if found.st_size > most:
            raise OSError(errno.EINVAL, f"{found.st_size:,} bytes, more than {most:,}", str(path))
        return file.read(most)


def refuse_irregular(path: Path) -> None:
    """Raise OSError for a missing file, a folder, a pipe or a device, which other code must not open."""
    try:
        _check_regular(path.stat(), path)
    except ValueError as impossible:
        raise OSError(errno.EINVAL, str(impossible), str(path)) from None


def _check_regular(found: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder, expected a file", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, expected a file", str(path))


def from_json(text: str | bytes) -> Any:
    """Parse a JSON text. Raises DocumentError."""
    try:
        found = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_table)
        return checked(found, finite=True)
    except RecursionError:
        raise _too_deep() from None
    except DocumentError:
        raise
    except json.JSONDecodeError as broken:
        if not broken.doc[: broken.pos].strip():  # not even its beginning is JSON, as of a web page or an empty file
            raise DocumentError(f"expected JSON, found {shown(repr(broken.doc.strip()[:40]))}") from None
        raise fault_of(broken) from None
    except ValueError as broken:
        raise fault_of(broken) from None


def json_text(document: object, **layout: Any) -> str:
    """Return the JSON of a document; `layout` is passed to `json.dumps`. NaN and infinities become null."""
    try:
        return json.dumps(document, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(_finite(document), allow_nan=False, **layout)


def toml_text(text: str) -> str:
    """Return a text as a TOML file holds it. TOML's basic strings are JSON's, except for DEL, which JSON may leave."""
    return json_text(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a table. Raises DocumentError for a duplicate key: readers differ in which value counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for at, key in enumerate(keys) if key in keys[:at])
        raise DocumentError(f"the key {twice[:60]!r} is repeated in one table")
    return found


def from_toml(text: str | bytes) -> dict[str, Any]:
    """Parse a TOML text. Raises DocumentError."""
    try:
        written = text if isinstance(text, str) else text.decode()
        if LONG_KEY.search(written):
            raise _too_deep()
        return checked(tomllib.loads(written))
    except RecursionError:
        raise _too_deep() from None
    except DocumentError:
        raise
    except ValueError as broken:
        raise fault_of(broken) from None


def _refuse_constant(word: str) -> None:
    raise DocumentError(f"invalid number {word}: expected a finite number or null")


def checked(document: Any, finite: bool = False) -> Any:
    """Return the document. Raises DocumentError if it is nested too deep or has an integer that is too long.

    With `finite`, infinities and NaN are errors too; TOML and YAML allow them, and the fields of models reject them.
    """
    level, depth = [document], 0
    while level:
        if depth > DEEPEST:
            raise _too_deep()
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, int) and value.bit_length() > MOST_BITS:
                raise _too_long()
            elif finite and isinstance(value, float) and not isfinite(value):
                raise DocumentError("a number beyond 1.8e308: expected a finite one")
        level, depth = below, depth + 1
    return document


def fault_of(broken: Exception) -> DocumentError:
    """Return a parser's message as one line."""
    message = " ".join(str(broken).split())
    return _too_long() if "integer string conversion" in message else DocumentError(message)


def _too_deep() -> DocumentError:
    return DocumentError(f"nested deeper than {DEEPEST} levels")


def _too_long() -> DocumentError:
    return DocumentError("an integer of more than 300 digits")


def canonical(document: object) -> bytes:
    """Return the canonical JSON of a document, for hashing."""
    return json_text(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def canonical_digest(document: object) -> str:
    """Return the SHA-256 of a document's canonical JSON."""
    return hashlib.sha256(canonical(document)).hexdigest()


def package_version() -> str:
    """Return the version of this package, installed or of a checkout."""
    try:
        return version("moereplay")
    except PackageNotFoundError:
        return tomllib.loads(CHECKOUT.read_text("utf-8"))["project"]["version"]


# -- Base classes of configurations, geometries and platforms


class Frozen(BaseModel):
    """Immutable model that rejects unknown keys (a misspelt setting is an error) and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: object, info: ValidationInfo) -> object:
        """Reject `true` as a number, and texts in lists of numbers; pydantic would convert both."""
        if info.field_name is not None and _holds_numbers(cls, info.field_name):
            _refuse_others(value)
        return value


@cache
def _holds_numbers(model: type[BaseModel], field: str) -> bool:
    """Return True for a number, and for lists and tables of numbers only."""
    return _leaves(model.model_fields[field].annotation) - {type(None)} in ({int}, {float}, {int, float})


def _leaves(annotation: Any) -> set[Any]:
    """Return the types in an annotation, without lists, unions and the keys of tables."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is None or not inner:
        return {annotation}
    inner = inner[:1] if origin is Annotated else inner[1:] if origin is dict else inner
    return set[Any]().union(*(_leaves(each) for each in inner if each is not Ellipsis))


def _refuse_others(value: object, listed: bool = False) -> None:
    """Raise ValueError for `true`, `false`, and strings in lists; an option's own string may be a number."""
    if isinstance(value, bool) or (listed and isinstance(value, str)):
        raise ValueError("expected a number" if not listed else f"expected numbers, not {value!r}")
    if isinstance(value, dict):
        for each in value.values():
            _refuse_others(each)
    elif isinstance(value, list | tuple):
        for each in value:
            _refuse_others(each, True)


class Sparse(Frozen):
    """Model whose newer fields (`later`) are omitted from documents when they equal their default.

    So existing documents keep their hashes when a field is added.
    """

    later: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _without_defaults(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        unset = {name for name, default in _defaults(type(self)).items() if getattr(self, name) == default}
        return {name: value for name, value in whole(self).items() if name not in unset}


@cache
def _defaults(model: type[Sparse]) -> dict[str, Any]:
    """Return the defaults of the newer fields, to compare with."""
    return {name: model.model_fields[name].get_default(call_default_factory=True) for name in model.later}


class _OneLine(type(BaseModel)):
    """Metaclass whose constructors raise `refused_as`; validation inside another model raises pydantic's error."""

    refused_as: type[Exception]

    def __call__(cls, *given: Any, **named: Any) -> Any:
        try:
            return super().__call__(*given, **named)
        except ValidationError as wrong:
            raise cls.refused_as(f"{cls.__name__}: {first_fault(wrong)}") from None


#: Unpacked in the class statement: type checkers then still derive the constructor's arguments from the fields.
_METACLASS: dict[str, Any] = {"metaclass": _OneLine}


class Public(Sparse, **_METACLASS):
    """Model that users construct: a wrong value raises `refused_as` in one line."""

    refused_as: ClassVar[type[Exception]] = ValueError


# -- Texts of headers


MOST_NOTES = 1_000


def _notes(notes: tuple[str, ...]) -> tuple[str, ...]:
    left_out = len(notes) - MOST_NOTES + 1
    return notes if left_out <= 1 else (*notes[: MOST_NOTES - 1], f"{left_out:,} more notes")


Name = Annotated[str, AfterValidator(lambda text: settled(text, MOST_NAME))]
Text = Annotated[str, AfterValidator(settled)]
Notes = Annotated[tuple[Text, ...], AfterValidator(_notes)]


# -- Validation errors of pydantic as one line: place, expected value, value found

#: Message by the type of pydantic's error; braces take the error's context.
EXPECTED = {
    "missing": "missing",
    "extra_forbidden": "unknown key",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected at least {ge}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "multiple_of": "expected a multiple of {multiple_of}",
    "too_short": "expected at least {min_length} of them",
    "too_long": "expected at most {max_length} of them",
    "finite_number": "expected a finite number",
    "int": "expected a whole number",
    "float": "expected a number",
    "bool": "expected true or false",
    "string": "expected a text",
    "list": "expected a list",
    "tuple": "expected a list",
    "dict": "expected a table",
    "mapping": "expected a table",
    "model": "expected a table",
    "union_tag_invalid": "unknown kind {tag!r}: choose from {expected_tags}",
    "union_tag_not_found": "missing kind",
}
LONGEST = 60  #: characters of a value in a message


def json_lines(path: Path, kind: type[ModelT], expected: str) -> list[tuple[str, ModelT, str]]:
    """Read a file of JSON lines: where each is, its value and its text. Raises DocumentError naming file and line."""
    try:
        lines = content(path).decode("utf-8").splitlines()
    except OSError as wrong:
        raise DocumentError(f"{path}: {wrong.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise DocumentError(f"{path}: expected lines of JSON, found bytes that are no text") from None
    found: list[tuple[str, ModelT, str]] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                found.append((where, kind.model_validate(from_json(line)), line))
            except ValidationError as wrong:
                raise DocumentError(f"{where}: {first_fault(wrong)}; expected {expected}") from None
            except DocumentError as wrong:
                raise DocumentError(f"{where}: {wrong}; expected {expected}") from None
    return found


def first_fault(error: ValidationError) -> str:
    """Return the first error of a document, after its place: `link.depth: expected at least 1 (got 0)`."""
    fault = error.errors()[0]
    where = ".".join(map(str, fault["loc"]))
    return f"{where}: {words(fault)}" if where else words(fault)


def words(fault: Mapping[str, Any]) -> str:
    """Return an entry of `ValidationError.errors()` without its place: the expected value and the value found."""
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "value_error":  # the message of one of our own validators
        return f"{fault['msg'].removeprefix('Value error, ')}{_got(fault)}"
    if kind == "literal_error":
        options = [option.strip("' ") for option in context["expected"].replace(" or ", ", ").split(", ")]
        return f"unknown value {shown(fault['input'], LONGEST + 1)!r}: {hint(str(fault['input']), options)}"
    expected = EXPECTED.get(kind) or EXPECTED.get(kind.split("_")[0])
    if expected is None:
        return f"{fault['msg']}{_got(fault)}"
    limits = {name: int(x) if isinstance(x, float) and x.is_integer() else x for name, x in context.items()}
    expected = expected.format(**limits)
    return expected if kind in ("missing", "extra_forbidden") else f"{expected}{_got(fault)}"


def _got(fault: Mapping[str, Any]) -> str:
    """Return the value found, shortened; empty for a whole document."""
    found = fault["input"]
    if not fault["loc"] or isinstance(found, dict):
        return ""
    text = repr(found) if isinstance(found, str) else shown(found, LONGEST + 1)
    return f" (got {text if len(text) <= LONGEST else text[: LONGEST - 3] + '...'})"


# -- Bytes of a KV cache by the length of the context: a base of geometries and known models


class Window(NamedTuple):
    """Layers whose attention keeps only the last positions: sliding windows and chunks."""

    positions: Annotated[int, Field(ge=1, le=1 << 40)]
    kv_bytes: Annotated[int, Field(ge=1, le=1 << 60)]  #: per position, all such layers together


#: Positions of a batch, which llama.cpp and ollama keep beside a window, and by how many a window's cache grows
#: (llama.cpp, src/llama-kv-cache-iswa.cpp).
BATCH, CELLS = 512, 256


class Cached:
    """A model with keys and values: a geometry, or a known model."""

    kv_bytes: int
    kv_windows: tuple[Window, ...]

    def kv_cache(self, context: int) -> int:
        """Return the bytes of a KV cache that `context` positions are read from."""
        return self._cache(context, lambda window: window)

    def kv_held(self, context: int) -> int:
        """Return the bytes of memory that an engine keeps for it: windows have room for a batch."""
        return self._cache(context, lambda window: -(-(window + BATCH) // CELLS) * CELLS)

    def _cache(self, context: int, room: Callable[[int], int]) -> int:
        beyond = sum(kv_window.kv_bytes * max(0, context - room(kv_window.positions)) for kv_window in self.kv_windows)
        return max(0, self.kv_bytes * context - beyond)
