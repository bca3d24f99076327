"""What a report is made from: stored results, and the traces that are still there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from moereplay.results.checks import Check
from moereplay.traces.schema import Trace


class Source(NamedTuple):
    """A trace of the results, as far as it is at hand."""

    name: str  #: as a command names it
    trace: Trace | None = None
    missing: str = ""  #: why it is not at hand, and how to get it


class Material(NamedTuple):
    """Everything that a page shows is taken from here. `frame` and `curves` may be without rows, not both."""

    frame: pl.DataFrame  #: of `results.stored.load`
    curves: pl.DataFrame  #: of `results.curves.load`
    failed: int  #: configurations without a result
    checks: Sequence[Check]
    provenances: Sequence[Mapping[str, Any]]
    sources: Mapping[str, Source]  #: by digest
    remarks: Sequence[str]  #: on bounds, of the traces that are at hand
    foresees: Callable[[Mapping[str, Any]], bool]  #: whether the policies of a configuration know the future
    version: str  #: of the package that makes the page
