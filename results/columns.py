"""Results of versions that had fewer settings (`results/settings.py`) get them, with the values that they had."""

from __future__ import annotations

import polars as pl

from moereplay.results.schema import DTYPES
from moereplay.results.settings import older, setting_kinds


def with_config(part: pl.DataFrame) -> pl.DataFrame:
    """Results of any version, their column `config` with the settings that it lacks."""
    config = with_settings(part.select("config").unnest("config"))
    return part.with_columns(config.to_struct("config"))


def with_settings(table: pl.DataFrame) -> pl.DataFrame:
    """A table of configurations of any version, with the settings that it lacks: each had its default."""
    found, kinds = table.columns, setting_kinds()
    absent = {name: value for name, value in older().items() if name not in found}
    if not absent:
        return table
    first = min(found.index(name) for name in kinds if name in found)
    names = dict.fromkeys([*found[:first], *(name for name in kinds if name in found or name in absent), *found])
    filled = [pl.lit(value, DTYPES[kinds[name]]).alias(name) for name, value in absent.items()]
    return table.with_columns(filled).select(list(names))
