"""Experiment files: TOML, or YAML by its suffix, with settings changed from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moereplay.policies import files
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.experiment.schema import Experiment, Range
from moereplay.sweeps.experiment.settings import check_name
from moereplay.sweeps.experiment.yaml_text import from_yaml
from moereplay.traces.documents import DocumentError, content, from_toml
from moereplay.traces.frozen import words
from moereplay.traces.texts import hint

TABLES = ("base", "grid", "zip", "include", "exclude")


def read(path: Path, changes: Sequence[str] = ()) -> Experiment:
    """The experiment of a file; `changes` are `table.key=value`, values as in TOML.

    The policies of its files join the catalogue. Raises ConfigError naming the file, the key and the nearest valid
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
        _take(path, name)
    return experiment


def _take(path: Path, name: str) -> None:
    try:
        files.register(path.parent / name)
    except OSError as error:
        said = error.strerror or error
        raise ConfigError(f"{path}: policy_files: {path.parent / name}: {said}; check the path") from None


def _complaint(error: ValidationError) -> str:
    """The first thing that is wrong; of an axis, what is wrong with the list or the range that it looks like."""
    found = error.errors()
    first = next((each for each in found if each["type"] not in ("list_type", "model_type")), found[0])
    keys = takewhile(lambda word: "[" not in word and word != Range.__name__, map(str, first["loc"]))
    return f"{'.'.join(keys)}: {words(first)}"


def _document(path: Path) -> dict[str, Any]:
    try:
        data = content(path)
        document = from_yaml(data) if path.suffix in (".yaml", ".yml") else from_toml(data)
    except (OSError, DocumentError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: {said}; expected an experiment in TOML, or YAML with the suffix .yaml") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected tables such as [base] and [grid], found {type(document).__name__}")
    return document


def _change(document: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    table, dot, name = key.replace('"', "").strip().partition(".")
    if not equals or not table:
        raise ConfigError(f"--set {change!r}: write table.key=value, for example --set base.capacity=10%")
    value = _value(text.strip())
    if not dot:
        document[table] = value
        return
    inside = document.setdefault(table, {})
    if not isinstance(inside, dict):
        raise ConfigError(f"--set {change!r}: {table} is no table with keys; edit the file")
    inside[name] = value


def _value(text: str) -> Any:
    """A TOML value, or a text without its quotes."""
    try:
        return from_toml(f"value = {text}")["value"]
    except DocumentError:
        return text


def _check_tables(path: Path, document: Mapping[str, Any]) -> None:
    for name in document:
        if name not in Experiment.model_fields:
            raise ConfigError(f"{path}: nothing is called {name!r}: {hint(name, Experiment.model_fields)}")


def _check_settings(path: Path, document: dict[str, Any], table: str) -> None:
    """Names of settings; `[grid.prefetch] depth = [1, 2]` is flattened to `"prefetch.depth"` on the way."""
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
