"""Plug-ins: what installed packages add to a registry by entry points of a group, such as `moereplay.policies`.

Finding them reads the metadata of every installed package, so a registry asks only for a name that it does not have
itself, or for a list of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@cache
def plugins(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, in alphabetical order; of one name, the first distribution's."""
    from importlib.metadata import entry_points  # takes as long to import as the rest of a registry

    points: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda point: (point.name, distribution_of(point))):
        points.setdefault(point.name, point)
    return points


def distribution_of(point: EntryPoint) -> str:
    """Return the name and version of the distribution that an entry point belongs to."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"


@contextmanager
def using(point: EntryPoint, error: type[Exception]) -> Iterator[None]:
    """Raise what a plug-in raises as `error`, in one line that names its distribution."""
    try:
        yield
    except (Exception, SystemExit) as wrong:  # code of others may raise anything
        told = " ".join(str(wrong).split())
        what = told if isinstance(wrong, error) else f"{type(wrong).__name__}: {told}"
        raise error(f"plug-in {point.name} of {distribution_of(point)} cannot be used: {what}") from None
