"""What tests of importers share: import a file into memory, and the one-line refusal of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from traces import importers
from traces.importers import Options
from traces.schema import Request, Trace, TraceError, memory_trace

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"
on_real_data = pytest.mark.skipif(not DATA.is_dir(), reason="sample traces are not beside the repository")

SIZED = Options(expert_bytes=1000)


def imported(path: Path, options: Options = SIZED, format: str | None = None) -> tuple[Trace, list[Request]]:
    foreign = importers.read(path, options, format)
    requests = list(foreign.requests)
    return memory_trace(foreign.header, requests), requests


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, options: Options = SIZED, format: str | None = None) -> str:
    with pytest.raises(TraceError) as refused:
        imported(path, options, format)
    assert "\n" not in str(refused.value)
    return str(refused.value)
