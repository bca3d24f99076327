"""Recordings of other people: where they are looked for, and what is left unchecked where they are not.

They are public, but not ours to pass on. A test that replays one says so by `needs_recording`; without it the test is
skipped, and the summary at the end names the statements of docs/evidence.md that nobody has checked in this run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("MOEREPLAY_RECORDINGS") or ROOT.parent / "shared" / "data" / "traces")

#: A folder in FOLDER, and where its files are published.
SOURCES = {
    "gpt-oss-20b": "AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting on Hugging Face, Apache-2.0",
    "qwen3-30b-a3b": "github.com/Shriniwas410/cacheable-by-design, MIT",
    "gemma-4-26b-a4b": "github.com/Helldez/BigMoeOnEdge, Apache-2.0",
    "olmoe-counts": "github.com/allenai/OLMoE, Apache-2.0",
}

#: Claims that need recordings, in the words of docs/evidence.md.
CLAIMS = {
    "libcachesim": "LRU, FIFO, LFU, ARC and Belady equal libCacheSim access by access on routing of gpt-oss-20b and "
    "Qwen3-30B-A3B",
    "scripts": "Two independent scripts count the same hits of LRU and Belady on both models",
    "phone": "A replay reproduces the hit/miss column that a phone recorded while running Gemma-4-26B-A4B",
    "curves": "`moereplay curve` counts the misses of LRU and Belady at every capacity",
    "import": "`moereplay import` reads the recordings of other tools as published",
    "inspect": "`moereplay inspect` finds no fault in real routing",
    "geometry": "the expert bytes of `moereplay models` are those of a phone's trace",
}
UNCHECKED = "unchecked"  #: the property of a test that was skipped: its claim


def needs_recording(*names: str, claim: str) -> pytest.MarkDecorator:
    """The test replays these recordings, and is what the claim of that name rests on."""
    assert claim in CLAIMS and set(names) <= set(SOURCES)
    return pytest.mark.recording(names, claim)


def skip_without(item: pytest.Item) -> None:
    """Skip a test whose recordings are not there."""
    for mark in item.iter_markers("recording"):
        names, claim = mark.args
        missing = [name for name in names if not (FOLDER / name).is_dir()]
        if missing:
            item.user_properties.append((UNCHECKED, claim))
            pytest.skip(f"no recording of {', '.join(missing)} in {FOLDER}")


def summary(skipped: Sequence[pytest.TestReport]) -> Iterator[str]:
    """Count the tests skipped for missing recordings, by claim, and those skipped for other reasons."""
    claims = [value for report in skipped for name, value in report.user_properties if name == UNCHECKED]
    if claims:
        yield f"{len(claims)} skipped tests need other people's recordings, which {FOLDER} lacks (see CONTRIBUTING.md)."
        yield "Of docs/evidence.md they leave unchecked:"
        yield from (f"  {claims.count(name):3} tests: {text}" for name, text in CLAIMS.items() if name in claims)
    if others := len(skipped) - len(claims):
        yield f"{others} tests were skipped for other reasons; -rs prints them."
