"""Read experiment files, TOML or YAML by suffix, with changes from the command line; read YAML 1.2 within limits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moereplay.policies import files
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps import extra
from moereplay.sweeps.experiment.schema import Experiment, Range, check_name
from moereplay.traces.documents import MOST_BITS, DocumentError, checked, content, fault_of, from_toml, words
from moereplay.traces.schema import shown
from moereplay.traces.texts import meant

TABLES = ("base", "grid", "zip", "include", "exclude")


def read(path: Path, changes: Sequence[str] = ()) -> Experiment:
    """Read an experiment; `changes` are `table.key=value`, values as in TOML.

    Registers the policies of its `policy_files`. Raises ConfigError naming the file, the key and the nearest valid
    word, or PolicyError.
    """
    document = _document(path)
    for change in changes:
        _change(document, change)
    _check_tables(path, document)
    for table in TABLES:
        _check_settings(path, document, table)
    try:
        experiment = Experiment.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_complaint(error)}") from None
    for name in experiment.policy_files:
        _register(path, name)
    return experiment


def _register(path: Path, name: str) -> None:
    try:
        files.register(path.parent / name)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{path}: policy_files: {path.parent / name}: {reason}; check the path") from None


def _complaint(error: ValidationError) -> str:
    """Describe the first error; for an axis, the error of the list or the range that it resembles."""
    found = error.errors()
    first = next((each for each in found if each["type"] not in ("list_type", "model_type")), found[0])
    keys = takewhile(lambda word: "[" not in word and word != Range.__name__, map(str, first["loc"]))
    return f"{'.'.join(keys)}: {words(first)}"


def _document(path: Path) -> dict[str, Any]:
    try:
        data = content(path)
        document = from_yaml(data) if path.suffix in (".yaml", ".yml") else from_toml(data)
    except (OSError, DocumentError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{path}: {reason}: expected an experiment in TOML, or in YAML with the suffix .yaml"
        ) from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected tables such as [base] and [grid], found {type(document).__name__}")
    return document


def _change(document: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    table, dot, name = key.replace('"', "").strip().partition(".")
    if not equals or not table:
        raise ConfigError(f"invalid --set {change!r}: expected table.key=value, for example base.capacity=10%")
    value = _loose_value(text.strip())
    if not dot:
        document[table] = value
        return
    inside = document.setdefault(table, {})
    if not isinstance(inside, dict):
        raise ConfigError(f"invalid --set {change!r}: {table} is not a table with keys; edit the file")
    inside[name] = value


def _loose_value(text: str) -> Any:
    """Parse a TOML value, or use it as an unquoted string."""
    try:
        return from_toml(f"value = {text}")["value"]
    except DocumentError:
        return text


def _check_tables(path: Path, document: Mapping[str, Any]) -> None:
    for name in document:
        if name not in Experiment.model_fields:
            known = Experiment.model_fields
            raise ConfigError(f"{path}: unknown key {name!r}: {meant(name, known)}expected {', '.join(known)}")


def _check_settings(path: Path, document: dict[str, Any], table: str) -> None:
    """Check the names of settings, and flatten `[grid.prefetch] depth = [1, 2]` to `"prefetch.depth"`."""
    found = document.get(table, {})
    rows = found if isinstance(found, list) else [found]
    flat = [_flat(row) if isinstance(row, dict) else row for row in rows]
    for number, row in enumerate(flat, 1):
        for name in row if isinstance(row, dict) else ():
            check_name(f"{path}: [[{table}]] {number}" if isinstance(found, list) else f"{path}: [{table}]", name)
    if table in document:
        document[table] = flat if isinstance(found, list) else flat[0]


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict) and not value.keys() & Range.model_fields.keys():
            flat |= {f"{name}.{inner}": below for inner, below in _flat(value).items()}
        else:
            flat[name] = value
    return flat


# -- YAML 1.2: `no`, `on` and `1:30` are texts; constructs that YAML readers interpret differently are rejected

MOST_BYTES = 1 << 20  #: PyYAML reads a megabyte in some ten seconds
MOST_VALUES = 1_000_000  #: aliases expanded
TAG = "tag:yaml.org,2002:"
#: The core schema, https://yaml.org/spec/1.2.2/#103-core-schema: plain scalars by tag.
CORE = {
    "null": re.compile(r"null|Null|NULL|~|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": re.compile(
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    ),
}
LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
KNOWN = {f"{TAG}{name}" for name in ("str", "seq", "map")}


def from_yaml(content: bytes) -> Any:
    """Parse a YAML text. Raises DocumentError, or ConfigError without PyYAML."""
    root = composed(content)
    if root is None:
        return None
    try:
        return checked(_value(root))
    except RecursionError:
        raise DocumentError("nested too deep") from None


def composed(content: bytes, tags: bool = True) -> Any:
    """Parse a text into PyYAML's nodes, checked before any value is built; None for an empty text.

    Raises DocumentError for a damaged text, a repeated key, a recursive alias, aliases that expand to
    millions of values, and, with `tags`, for tags such as `!!python/object` and for `<<`.
    """
    yaml = extra("yaml", "yaml")
    if len(content) > MOST_BYTES:
        raise DocumentError(f"{len(content):,} bytes of YAML, more than {MOST_BYTES:,}; write it in TOML")
    try:
        loader = type("Unresolved", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})
        root = loader(content.decode()).get_single_node()
    except RecursionError:
        raise DocumentError("nested too deep") from None
    except (yaml.YAMLError, ValueError, AttributeError, TypeError, KeyError, OverflowError) as broken:
        raise fault_of(broken) from None
    if root is not None:
        _check_size(root)
        for node in _nodes(root):
            _check_node(node, tags)
    return root


def _value(node: Any) -> Any:
    if isinstance(node.value, str):
        return _scalar(node)
    if node.tag == f"{TAG}map":
        return {_key(key): _value(value) for key, value in node.value}
    return [_value(each) for each in node.value]


def _key(node: Any) -> str:
    value = _scalar(node) if isinstance(node.value, str) else node.value
    if not isinstance(value, str):
        raise DocumentError(f"the key {shown(node.value)} is not a string; put it in quotes")
    return value


def _scalar(node: Any) -> Any:
    text = node.value
    if not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text):
        raise DocumentError(f"{shown(text)} contains an unpaired surrogate; write the whole character")
    kind = _kind(node)
    if kind == "null":
        return None
    if kind == "bool":
        return text[0] in "tT"
    return text if kind == "str" else _number(kind, text)


def _kind(node: Any) -> str:
    """Return the core schema's type of a scalar; a quoted one is a text."""
    if node.style is not None:
        return "str"
    if LEADING_ZERO.fullmatch(node.value):
        reading = f"{node.value} is octal in YAML 1.1 and decimal in YAML 1.2"
        raise DocumentError(f"{reading}; write {int(node.value)}, or {node.value!r} in quotes")
    return next((kind for kind, form in CORE.items() if form.fullmatch(node.value)), "str")


def _number(kind: str, text: str) -> int | float:
    if kind == "float":
        return float(re.sub(r"\.(?=[inIN])", "", text))  # .inf and .nan have their dot in YAML alone
    if text.startswith(("0o", "0x")):
        return int(text[2:], 8 if text[1] == "o" else 16)
    return int(text) if len(text) < MOST_BITS // 3 else 1 << MOST_BITS + 1  # too long: `checked` rejects it


def _nodes(root: Any) -> Iterator[Any]:
    """Yield every node once."""
    left, seen = [root], {id(root)}
    while left:
        node = left.pop()
        yield node
        for each in _inside(node):
            if id(each) not in seen:
                seen.add(id(each))
                left.append(each)


def _inside(node: Any) -> list[Any]:
    inside = node.value if isinstance(node.value, list) else []
    return [each for entry in inside for each in (entry if isinstance(entry, tuple) else (entry,))]


def _check_node(node: Any, tags: bool) -> None:
    keys = [key.value for key, _ in node.value if isinstance(key.value, str)] if _is_table(node) else []
    if "<<" in keys and tags:
        raise DocumentError("the key << merges tables only in YAML 1.1; write out the keys of both tables")
    if len(set(keys)) < len(keys):
        twice = next(key for at, key in enumerate(keys) if key in keys[:at])
        raise DocumentError(f"the key {shown(twice)} is repeated in one table, in line {node.start_mark.line + 1}")
    if tags and node.tag not in KNOWN:
        where = f"line {node.start_mark.line + 1}"
        raise DocumentError(f"unknown tag {shown(node.tag)} in {where}: write the value without it")


def _is_table(node: Any) -> bool:
    return isinstance(node.value, list) and any(isinstance(entry, tuple) for entry in node.value)


def _check_size(root: Any) -> None:
    """Reject texts whose aliases expand to too many values: a few letters can expand to millions."""
    sizes: dict[int, int] = {}
    if _size(root, sizes) > MOST_VALUES:
        raise DocumentError(f"its aliases expand to more than {MOST_VALUES:,} values")


def _size(node: Any, sizes: dict[int, int]) -> int:
    """Count the values that a node expands to; 0 in `sizes` marks nodes whose count is in progress."""
    if sizes.get(id(node)) == 0:
        raise DocumentError("an alias refers to a list or table that contains it")
    if id(node) not in sizes:
        sizes[id(node)] = 0
        sizes[id(node)] = 1 + sum(_size(each, sizes) for each in _inside(node))
    return sizes[id(node)]
