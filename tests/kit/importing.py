"""Shared by importer tests: import a file into memory, and get the one-line error of an invalid file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moereplay.traces.importers import registry as importers
from moereplay.traces.importers.contract import Options
from moereplay.traces.schema import Request, Trace, TraceError, memory_trace
from tests.kit.recordings import FOLDER as DATA
from tests.kit.recordings import needs_recording

__all__ = ["DATA"]

on_real_data = needs_recording("gpt-oss-20b", "qwen3-30b-a3b", "gemma-4-26b-a4b", "olmoe-counts", claim="import")

SIZED = Options(expert_bytes=1000)
CSV = "request,token,layer,expert_0,expert_1\n"
IDS = np.array([[[3, 1]]])


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


def gptoss(path: Path, ids: np.ndarray = IDS, probs: np.ndarray | None = None, **more: object) -> Path:
    """A published run of one layer, as an archive."""
    shown = np.full(ids.shape, 0.5) if probs is None else probs
    np.savez(path, ids=ids, probs=shown, **({"offsets": [0, len(ids)]} | more))  # type: ignore[arg-type]
    return path


def router_data(layer: dict[str, object]) -> str:
    """A published run of one token and layer, as JSON."""
    return json.dumps({"router_data": [{"token_0": {"layer_0": layer}}]})
