"""Look-up of quantisers by name and width."""

from __future__ import annotations

from importlib import import_module

from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.precision import DEFAULT, NAMES, at_width, check_quantiser
from moereplay.tracegen.precision.contract import Quantiser, version_of


def load(name: str) -> Quantiser:
    """Return the quantiser of that file."""
    return import_module(f"moereplay.tracegen.precision.{name}").QUANTISER


def quantiser_at(name: str, bits: float) -> Quantiser:
    """Return the quantiser that `name` selects at `bits`. Raises RecordError for a width that it lacks."""
    check_quantiser(name)
    found = load(at_width(name, bits))
    if found.widths is not None and bits not in found.widths:
        has = ", ".join(map(str, found.widths))
        raise RecordError(f"quantiser {name} has {has} bits, not {bits:g}; take {DEFAULT}, or other bits of --miss")
    return found


def titled(quantiser: Quantiser) -> str:
    """Return a quantiser's name with its library's version, which together determine its bytes."""
    return f"{quantiser.name} {version_of(NAMES[quantiser.name])}".strip()
