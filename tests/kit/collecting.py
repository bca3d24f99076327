"""Keep collection short: load a module at its first use, and name the case in the failure of a test with a loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class Lazily:
    """Stand-in for a module that takes seconds to import: it is loaded with the first attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


@contextmanager
def case(*facts: object) -> Iterator[None]:
    """Add the case to the failure of what is asserted inside."""
    try:
        yield
    except BaseException as failure:
        failure.add_note(f"case: {' '.join(map(str, facts))[:300]}")
        raise
