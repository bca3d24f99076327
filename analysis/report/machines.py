"""The machines of the results: the figures that their seconds are made from, and whether these were measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from moereplay.analysis.report.material import Material
from moereplay.analysis.tables import cell
from moereplay.results.read import fields, runs
from moereplay.results.remarks import seconds_in_words
from moereplay.results.schema import fields_of


def machines(material: Material) -> list[dict[str, Any]]:
    """Of every platform: its seconds in words, the changes that its name makes, and its figures by their names."""
    if material.frame.is_empty():
        return []
    stored = {name: figures for one in material.provenances for name, figures in one.get("platforms", {}).items()}
    return [
        {
            "name": name,
            "seconds": seconds,
            "changes": name.split(":")[1:],
            "figures": dict(_flat(stored.get(name.partition(":")[0], {}))),
        }
        for name, seconds in _seconds(material).items()
    ]


def _seconds(material: Material) -> dict[str, str]:
    """What the times of each platform rest on."""
    platforms = runs(material.frame)["platform"].to_list()
    found: dict[str, str] = {}
    for name, about in sorted(zip(platforms, material.frame["about"].to_list(), strict=True), key=lambda each: each[0]):
        found[name] = seconds_in_words(about, "calibrated: ")
    return found


def estimates(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The platforms whose seconds nobody has measured."""
    named: dict[str, list[str]] = {}
    for each in found:
        if not each["seconds"].startswith("calibrated"):
            named.setdefault(each["seconds"], []).append(each["name"])
    said = "hit rates and bytes are counted"
    return [f"seconds of {', '.join(names)}: {seconds}; {said}" for seconds, names in named.items()]


def dense_weights(material: Material) -> list[str]:
    """What the results assume of the bytes of dense weights, each once."""
    if "assumed" not in fields_of(material.frame.schema.get("about")):
        return []
    said = material.frame.select(pl.col("about").struct.field("assumed")).to_series().drop_nulls()
    return sorted(set(said))


def _flat(figures: Any, inside: str = "") -> Iterator[tuple[str, str]]:
    """Each figure under its dotted name, as a platform file spells it."""
    if isinstance(figures, Mapping):
        for name, value in figures.items():
            yield from _flat(value, f"{inside}.{name}" if inside else str(name))
    elif isinstance(figures, list):
        for at, value in enumerate(figures):
            yield from _flat(value, f"{inside}[{at}]")
    elif figures is not None:
        yield inside, _number(figures)


def _number(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e18
    return cell(int(value)) if whole else cell(value)


def versions_of_semantics(material: Material) -> list[int]:
    """Of all results; several cannot be compared."""
    known = "semantics" in fields(material.frame) if not material.frame.is_empty() else False
    return sorted(set(runs(material.frame)["semantics"].to_list())) if known else []
