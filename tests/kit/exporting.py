"""Shared parts of exporter tests: a small trace with every array, options that a format needs, and an export."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moereplay.traces.exporters import contract
from moereplay.traces.exporters.contract import Export, Exporter, Options
from moereplay.traces.schema import Request, Trace, memory_trace
from tests.kit.stored import HEADER, everything

ALL = contract.exporters()
NEEDED = {"cache_bytes": 2_600, "licence": "mit"}  #: of 4,800 bytes of experts


def whole(requests: int = 3, tokens: int = 7) -> Trace:
    """Every array that a trace may hold; in one place nothing was routed."""
    made = [everything(tokens + at, at) for at in range(requests)]
    made[0].chosen[2, 1, 1] = -1
    return memory_trace(HEADER, made)


def options_for(exporter: Exporter, **more: object) -> Options:
    """Return the options that the format requires, and the given ones."""
    return Options.model_validate({name: NEEDED[name] for name in exporter.needs} | more)


def out_of(exporter: Exporter, folder: Path) -> Path:
    """A name that the format takes."""
    return folder / (Path(exporter.writes).name if exporter.suffix else "out")


def exported(trace: Trace, name: str, folder: Path, **more: object) -> tuple[Path, Export]:
    """The trace in that format: where it lies, and what was said."""
    exporter = contract.load(name)
    out = out_of(exporter, folder)
    return out, contract.export(trace, exporter, options_for(exporter, **more), out)


def same_rows(found: list[Request], trace: Trace, *names: str) -> bool:
    """Return True if the requests have the trace's rows, bit by bit."""
    lengths = [len(request.chosen) for request in found] == np.diff(trace.request_offsets).tolist()
    prompts = [request.prompt_length for request in found] == trace.prompt_lengths.tolist()
    bits = [
        np.concatenate([request.arrays()[name] for request in found]).tobytes() == trace.read(name).tobytes()
        for name in names
    ]
    return lengths and prompts and all(bits)
