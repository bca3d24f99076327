"""Columns of the settings in results (`results/settings.py`), and results of versions that had fewer of them."""

from __future__ import annotations

import polars as pl

from results.settings import EXPERTS, TEXT, WHOLE, columns, older

_DTYPES: dict[str, pl.DataType] = {TEXT: pl.String(), WHOLE: pl.Int64(), EXPERTS: pl.List(pl.List(pl.Int64))}
#: By name, in order.
SETTINGS = {name: _DTYPES[kind] for name, kind in columns().items()}
CONFIG = pl.Struct(SETTINGS)


def with_config(part: pl.DataFrame) -> pl.DataFrame:
    """Results of any version, their column `config` with the settings that they lack."""
    config = with_settings(part.select("config").unnest("config"))
    return part.with_columns(config.to_struct("config"))


def with_settings(table: pl.DataFrame) -> pl.DataFrame:
    """A table of configurations of any version, with the settings that it lacks: each had its default."""
    found = table.columns
    absent = {name: value for name, value in older().items() if name not in found}
    if not absent:
        return table
    first = min(found.index(name) for name in SETTINGS if name in found)
    names = dict.fromkeys([*found[:first], *(name for name in SETTINGS if name in found or name in absent), *found])
    filled = [pl.lit(value, SETTINGS[name]).alias(name) for name, value in absent.items()]
    return table.with_columns(filled).select(list(names))
