"""Expand an experiment into configurations: its grid, or draws from it, with [[include]] and without [[exclude]]."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from moereplay.policies.contract import PolicyError
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.experiment.schema import PRESET, Experiment, Range, Settings, configuration, spelled, whole
from moereplay.sweeps.grid import check_count
from moereplay.traces.texts import typed


class Interval(NamedTuple):
    """Axis to draw from: a setting, and the range of its values."""

    name: str
    ends: Range


#: Axis of the grid: the settings of each of its values, or an interval.
Choices = list[Settings] | Interval


def configurations(experiment: Experiment, file: Path) -> list[ReplayConfig]:
    """Return every distinct configuration, in the file's order. Raises ConfigError or PolicyError naming the file."""
    _check_size(experiment, file)
    check_values(experiment, file)
    found: dict[ReplayConfig, None] = {}
    for settings in combinations(experiment, file):
        if not is_excluded(experiment, settings):
            found[_checked(file, settings)] = None
    if not found:
        raise ConfigError(f"{file}: [[exclude]] leaves no configuration; remove one of its tables")
    return list(found)


def grid_size(across: Sequence[Choices]) -> int | None:
    """Return the number of combinations of the axes; None if one of them is a range."""
    return None if any(isinstance(axis, Interval) for axis in across) else prod(map(len, across))


def combinations(experiment: Experiment, file: Path) -> Iterator[Settings]:
    """Yield the settings of the grid, or of the draws from it, then those of [[include]]."""
    for chosen in _drawn(experiment, file):
        yield {**experiment.base, **chosen}
    for settings in experiment.include:
        yield {**experiment.base, **settings}


def axes(experiment: Experiment, file: Path) -> list[Choices]:
    """Return the axes of the grid: one per key of [grid] and per [[zip]]. Raises ConfigError for unequal lists."""
    grid: list[Choices] = [
        Interval(name, axis) if isinstance(axis, Range) else [{name: value} for value in axis]
        for name, axis in experiment.grid.items()
    ]
    return grid + [_in_step(file, number, table) for number, table in enumerate(experiment.zip, 1)]


def choose(axis: Choices, share: float) -> Settings:
    """Return the settings of an axis at a share of its length, 0 <= share < 1."""
    if isinstance(axis, Interval):
        return {axis.name: axis.ends.at(share)}
    return axis[int(share * len(axis))]


def is_excluded(experiment: Experiment, settings: Settings) -> bool:
    """Return whether an [[exclude]] table of the experiment matches these settings."""
    return any(_matches(settings, pattern) for pattern in experiment.exclude)


def _check_size(experiment: Experiment, file: Path) -> None:
    """Raise ConfigError if the product of the axes is too large, before any combination is made and excluded."""
    size = grid_size(axes(experiment, file))
    if experiment.random is None and size is not None:
        advice = f"shorten its lists, draw some with [random] n, or search them: moereplay tune {typed(file)}"
        check_count(size + len(experiment.include), f"{file}: [grid] makes", advice)


def _in_step(file: Path, number: int, table: Mapping[str, Sequence[Any]]) -> list[Settings]:
    lengths = {name: len(values) for name, values in table.items()}
    if len(set(lengths.values())) != 1:
        raise ConfigError(
            f"{file}: [[zip]] {number}: lists of equal length are required, but their lengths are {lengths}"
        )
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def _drawn(experiment: Experiment, file: Path) -> Iterator[Settings]:
    across = axes(experiment, file)
    lists = [axis for axis in across if not isinstance(axis, Interval)]
    ranges = len(across) > len(lists)
    if experiment.random is None:
        if ranges:
            raise ConfigError(f"{file}: a range in [grid] requires [random] with n; or use a list")
        yield from (_merged(parts) for parts in itertools.product(*lists))
        return
    dice, n = random.Random(experiment.random.seed), experiment.random.n
    if ranges:
        yield from (_merged([choose(axis, dice.random()) for axis in across]) for _ in range(n))
        return
    for index in _sample(dice, prod(map(len, lists)), n):
        yield _merged(_at(lists, index))


def _sample(dice: random.Random, total: int, n: int) -> Iterable[int]:
    """Draw `n` different numbers below `total`, or all if there are fewer."""
    if total <= sys.maxsize:
        return dice.sample(range(total), min(n, total))
    found: dict[int, None] = {}  # `sample` needs a range that fits; two equal draws are very rare
    while len(found) < n:
        found[dice.randrange(total)] = None
    return found


def _at(lists: Sequence[Sequence[Settings]], index: int) -> list[Settings]:
    """Return the combination at a position of the product, without making the others."""
    parts: list[Settings] = []
    for values in reversed(lists):
        index, at = divmod(index, len(values))
        parts.append(values[at])
    return parts[::-1]


def _merged(parts: Sequence[Settings]) -> Settings:
    return {name: value for part in parts for name, value in part.items()}


def _matches(settings: Settings, pattern: Mapping[str, Any]) -> bool:
    """Return whether all settings of a pattern match; a policy without parameters matches it with any parameters.

    Settings match as the file writes them or as the configuration resolves them (preset applied, dots folded).
    """
    settings = {**settings, **whole(settings)}
    for name, wanted in pattern.items():
        allowed = [spelled(value) for value in (wanted if isinstance(wanted, list) else [wanted])]
        field = ReplayConfig.model_fields.get(name)
        found = spelled(settings.get(name, field.default if field else None))
        if not any(found == value or found.startswith(f"{value}:") for value in allowed):
            return False
    return True


#: Settings that are refused under the default of another one, and a value of that one which allows them.
ALLOWS = {"arrivals": {"passes": "batch:1"}}


def check_values(experiment: Experiment, file: Path) -> None:
    """Check each value on its own, so that an error can name its key. Raises ConfigError or PolicyError."""
    for table, name, value in itertools.chain(_values(experiment), _excluded(experiment)):
        try:
            configuration(ALLOWS.get(name, {}) | {name: value})
        except (ConfigError, PolicyError) as error:
            raise type(error)(f"{file}: {table} {name}: {str(error).removeprefix(f'{name}: ')}") from None


def platforms(experiment: Experiment) -> set[str]:
    """Return every platform that a configuration may name, directly or through a preset. Raises ConfigError."""
    named = [{name: value} for _, name, value in _values(experiment) if name in ("platform", PRESET)]
    return {configuration(settings).platform for settings in [{}, *named]}


def _values(experiment: Experiment) -> Iterator[tuple[str, str, Any]]:
    """Yield (table, name, value) of every setting without a dot."""
    tables: list[tuple[str, Mapping[str, Any]]] = [("[base]", {k: [v] for k, v in experiment.base.items()})]
    tables.append(
        ("[grid]", {k: [v.at(0), v.at(1)] if isinstance(v, Range) else v for k, v in experiment.grid.items()})
    )
    tables += [("[[zip]]", table) for table in experiment.zip]
    tables += [("[[include]]", {k: [v] for k, v in table.items()}) for table in experiment.include]
    for table, settings in tables:
        for name, values in settings.items():
            for value in values if "." not in name else ():
                yield table, name, value


def _excluded(experiment: Experiment) -> Iterator[tuple[str, str, Any]]:
    """Yield (table, name, value) of every [[exclude]] entry without a dot."""
    for pattern in experiment.exclude:
        for name, wanted in pattern.items():
            for value in wanted if isinstance(wanted, list) else [wanted]:
                if "." not in name:
                    yield "[[exclude]]", name, value


def _checked(file: Path, settings: Settings) -> ReplayConfig:
    try:
        return configuration(settings)
    except (ConfigError, PolicyError) as error:
        shown = ", ".join(f"{name} = {value!r}" for name, value in settings.items())
        raise type(error)(f"{file}: {shown}: {error}") from None
