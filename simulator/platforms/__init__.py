"""Platforms as files: presets by name, files of the user, the base that a file extends, and figures changed in place.

Each preset is a TOML file in this folder, every figure with its source; adding one is a file here and its name below.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moereplay import policies
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Platform, Power
from moereplay.traces.documents import DocumentError, Sparse, content, first_fault, from_toml, toml_text
from moereplay.traces.texts import hint, nearest, typed

NAMES = (
    "a100-5gbps",
    "rtx4090-pcie4",
    "h100-pcie5",
    "h200-pcie5",
    "phone-ufs4",
    "mac-nvme",
    "jetson-orin",
    "desktop-ram",
    "desktop-24gb",
    "desktop-mmap",
    "laptop-8gb",
    "workstation-8ch",
    "two-gpus",
)


CHARGES = "decisions.by_policy"  #: the table that may be given any policy's name in place


def presets() -> list[Platform]:
    """Return every platform that ships with the program."""
    return [platform(name) for name in NAMES]


def platform(name: str) -> Platform:
    """Return a preset by name, or a platform file (.toml), with changes: `a100-5gbps:link.bytes_per_s=25e9`.

    Raises ConfigError.
    """
    base, *changes = name.split(":")
    return _changed(_unchanged(base), name, changes) if changes else _unchanged(base)


_KEPT: dict[str, Platform] = {}


def kept(machine: Platform) -> str:
    """Return a name under which this process finds a platform that lies in no file; `as_toml` writes it for others."""
    name = f"{machine.name.replace(':', ' ')} {machine.seal}"
    _KEPT[name] = machine
    return name


def _unchanged(name: str) -> Platform:
    if name in _KEPT:
        return _KEPT[name]
    return _preset(name) if name in NAMES else _valid(_document(name, ()), name)


@cache  # a sweep loads the same preset thousands of times
def _preset(name: str) -> Platform:
    return _valid(_document(name, ()), name)


def _document(name: str, extending: tuple[str, ...]) -> dict[str, Any]:
    """Return the tables of a preset or file, merged over those of its `base`."""
    if name in extending:
        chain = " -> ".join((*extending, name))
        raise ConfigError(f"platform {extending[0]} extends itself: {chain}; remove one `base`")
    own = _read(name)
    base = own.pop("base", None)
    if base is None:
        return own
    if not isinstance(base, str):
        raise ConfigError(f"platform {name}: invalid base {base!r}: expected the name of a preset or a .toml file")
    where = base if base in NAMES else str(Path(name).parent / base)
    below = _document(where, (*extending, name))
    source = {"source": f"own figures; the others of {base}: {below.get('source', 'no source')}"}
    return _laid_over(below, source | own)


def _laid_over(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `own` over `base`, figure by figure; links and a table of another kind replace the base's as a whole.

    Names, and the calibration and the runs that describe the base's figures, are not inherited.
    """
    hidden = {"name", "summary", "calibration", "tried"}
    hidden |= {"link", "links"} - own.keys() if {"link", "links"} & own.keys() else set()
    both = {key: value for key, value in base.items() if key not in hidden}
    return both | {key: _over(both.get(key), value) for key, value in own.items()}


def _over(old: object, new: object) -> object:
    """Lay a table over one of the same kind; replace anything else."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    if new.get("kind", old.get("kind")) != old.get("kind"):
        return new
    return {**old, **{key: _over(old.get(key), value) for key, value in new.items()}}


def _changed(machine: Platform, name: str, changes: Sequence[str]) -> Platform:
    """Return the machine with changes `table.key=value`, without measurements of the unchanged machine."""
    if any(change.startswith("power.") for change in changes):  # which no platform has to have before
        machine = machine.model_copy(update={"power": machine.power or Power()})
    document = {key: value for key, value in machine.document().items() if key not in ("calibration", "tried")}
    tables = _tables(machine, document)
    for change in changes:
        where, equals, value = change.partition("=")
        table, _, figure = where.rpartition(".")
        if not equals or figure not in tables.get(table, ()):
            listed = {name: figures for name, figures in tables.items() if name in (table, "") or name != CHARGES}
            known = [f"{name}.{key}=".lstrip(".") for name, figures in listed.items() for key in figures]
            named = hint(where, known, "write one of")
            raise ConfigError(f"platform {machine.name} has no figure {where!r}: {named}")
        tables[table][figure] = value
    source = f"own figures: {', '.join(changes)}; the others: {machine.source}"
    return _valid(document | tables[""] | {"name": name, "source": source}, name)


def _tables(machine: Platform, document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a platform's tables of figures by name: `link`, or `links.0` and so on; `compute` and the others.

    Adds the figures that the document leaves at their default to it.
    """
    rows = document.get("links") or [document["link"]]
    links = {f"links.{row}" if "links" in document else "link": table for row, table in enumerate(rows)}
    tiers = {f"tiers.{row}": table for row, table in enumerate(document.get("tiers", ()))}
    for link, row in zip(machine.wires, [*rows, *tiers.values()], strict=True):
        row.update(_defaults(link, row))
    others = {
        name: getattr(machine, name)
        for name in ("compute", "cpu", "contention", "loading", "decisions", "draft", "power")
    }
    for name, part in others.items():
        if part is not None:
            document[name] = document.get(name, {}) | _defaults(part, document.get(name, {}))
    named = {name: document[name] for name, part in others.items() if part is not None}
    formats = {
        f"{name}.{of}": table[of]
        for name, table in named.items()
        for of in ("formats", "dense_formats")
        if table.get(of)
    }
    charges = dict.fromkeys((name for kind in policies.NAMES for name in policies.names(kind)), 0)
    document["decisions"]["by_policy"] = charges | machine.decisions.by_policy  # any policy may be charged in place
    own = {name: getattr(machine, name) for name in ("overlap", "memory_bytes", "fault_ns", "reserve_bytes")}
    return {"": own} | links | tiers | named | formats | {CHARGES: document["decisions"]["by_policy"]}


def _defaults(part: Sparse, table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(part, name) for name in sorted(part.later) if name not in table}


def _meant(called: str) -> str:
    """Return what an unknown name may mean: a platform, or a card, of which one can be made."""
    from moereplay.simulator.cards import recognised

    found = recognised(called)
    begun = next((name for name in NAMES if name.startswith(called.lower())), "")
    if begun or nearest(called, NAMES) or found is None or not found.is_exact:
        return hint(begun or called, NAMES, "pass a .toml file, or choose from")
    return (
        f"it is a card; write its platform with: moereplay platforms --gpu {typed(found.card.name)} --ram 64GB "
        "--out FILE.toml"
    )


def _read(name: str) -> dict[str, Any]:
    """Return the tables of a platform's file."""
    if name not in NAMES and not name.endswith(".toml"):
        called = Path(name).name
        raise ConfigError(f"unknown platform {called!r}: {_meant(called)}")
    try:
        return dict(from_toml(_text(name)))
    except OSError as error:
        raise ConfigError(f"cannot read platform file {name}: {error.strerror}; check the path") from None
    except DocumentError as error:
        raise ConfigError(f"platform {name} is not valid TOML: {error}") from None


def _text(name: str) -> str | bytes:
    if name in NAMES:
        return files("moereplay.simulator.platforms").joinpath(f"{name}.toml").read_text("utf-8")
    return content(Path(name))


def _valid(document: Mapping[str, Any], name: str) -> Platform:
    try:
        return Platform.model_validate(_with_rows(document, name))
    except ValidationError as error:
        fault = re.sub(r"^(compute|cpu)\.(roofline|measured)(?=[.:])", r"\1", first_fault(error))
        if "links" not in document:  # say it of the table that is there, or should be
            fault = re.sub(r"^links(\.0)?(?=[.:])", "link", fault)
        raise ConfigError(f"platform {name}: {fault}") from None


def _with_rows(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the document with its links as rows: `[link]` is one."""
    if "link" not in document:
        return dict(document)
    if "links" in document:
        raise ConfigError(f"platform {name}: [link] cannot be combined with [[links]]; remove one of them")
    others = {key: value for key, value in document.items() if key != "link"}
    return others | {"links": [document["link"]]}


# written


def sealed(machine: Platform) -> Platform:
    """Return the machine as its file is read, with the digest of its figures in `[calibration]`.

    Raises ConfigError for figures that no file may have.
    """
    read = _valid(from_toml(as_toml(machine)), machine.name)
    assert read.calibration is not None  # or there is nothing to seal
    return read.model_copy(update={"calibration": read.calibration.model_copy(update={"digest": read.seal})})


def as_toml(machine: Platform) -> str:
    """Return the platform as an editable file."""
    return "\n".join(_lines(machine.document(), "")) + "\n"


def _lines(table: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield a table's own figures, then its inner tables."""
    said = {key: value for key, value in table.items() if value is not None}
    inner = {key: value for key, value in said.items() if isinstance(value, dict) or key in ("links", "tiers")}
    yield from (f"{_key(key)} = {_figure(value)}" for key, value in said.items() if key not in inner)
    for key, value in inner.items():
        path = f"{name}{_key(key)}"
        for row in [value] if isinstance(value, dict) else value:
            yield from ("", f"[{path}]" if isinstance(value, dict) else f"[[{path}]]", *_lines(row, f"{path}."))


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _figure(name)


def _figure(value: object) -> str:
    """Return a TOML value."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_figure, value))}]"
    if isinstance(value, str):
        return toml_text(value)
    return str(value).lower() if isinstance(value, bool) else repr(value)
