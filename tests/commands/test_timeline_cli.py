"""`moereplay timeline` as a user meets it: a file that is the replay, each time the same, and refusals before it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from moereplay.analysis.timeline import COMPUTE, FILLS, LINKS, PASSES, STALLS, Machine, Timeline, limited
from moereplay.results.errors import ResultError
from moereplay.results.result import Event
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.store import open_trace
from moereplay.traces.writer import write_trace
from tests.commands.test_cli import SAMPLE
from tests.kit.command import moereplay_here as moereplay
from tests.kit.every import every

SETTINGS = {"capacity": "25%", "prefetch": "top_k", "eviction": "least_stale"}
OPTIONS = tuple(word for name, value in SETTINGS.items() for word in (f"--{name}", value))
NS = 1000


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first request of the bundled trace: 71 tokens in a pass, and 32 passes of one."""
    sample, path = open_trace(SAMPLE), tmp_path_factory.mktemp("timeline") / "first.zarr"
    write_trace(path, sample.header, [sample.request(0)], sample.router_bias)
    return path


@pytest.fixture(scope="module")
def written(trace: Path) -> Path:
    path = trace.with_name("all.json.gz")
    ended = moereplay("timeline", trace, *OPTIONS, "--out", path)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert "open it in https://ui.perfetto.dev" in ended.stderr
    return path


def read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data, parse_float=Decimal, parse_int=Decimal)


def on(document: Mapping[str, Any], tracks: range) -> list[dict[str, Any]]:
    return [each for each in document["traceEvents"] if each["ph"] == "X" and each["tid"] in tracks]


def ns(events: list[dict[str, Any]]) -> int:
    """Whole: no digit was lost."""
    total = sum(each["dur"] for each in events) * NS
    assert total == int(total)
    return int(total)


def one(track: int) -> range:
    return range(track, track + 1)


@pytest.mark.slow
def test_a_trace_in_a_file_is_the_replay(trace: Path, written: Path) -> None:
    document, totals = read(written), replay(open_trace(trace), configure(**SETTINGS)).totals
    compute, links = on(document, one(COMPUTE)), on(document, range(LINKS, FILLS))
    sums = {kind: ns([each for each in compute if each["name"].startswith(kind)]) for kind in ("dense", "expert")}
    assert sums == {"dense": totals["dense_ns"], "expert": totals["expert_ns"]}
    assert ns(on(document, one(STALLS))) == totals["stall_ns"]
    assert ns(links) == totals["link_busy_ns"]
    for cause in ("demand", "prefetch"):
        moved = sum(each["args"]["bytes"] for each in links if each["args"]["cause"] == cause)
        assert moved == totals[f"bytes_{cause}"]
    passes = [each for each in on(document, one(PASSES)) if each["name"].startswith("pass ")]
    assert ns(passes) == totals["time_ns"]
    assert {key: int(passes[0]["args"][key]) for key in ("request", "tokens")} == {"request": 0, "tokens": 71}


def test_a_file_says_what_it_is_of(trace: Path, written: Path) -> None:
    document, result = read(written), replay(open_trace(trace), configure(**SETTINGS))
    said, title = document["otherData"], document["traceEvents"][0]
    assert title["args"]["name"] == f"SIMULATED: miniature, trace {result.about['trace'][:12]}"
    assert (said["label"], said["identity"], said["model"]) == ("SIMULATED", result.about["identity"], "miniature")
    assert said["configuration"]["eviction"] == "least_stale" and said["totals"]["hits"] == result.totals["hits"]


def test_the_same_replay_gives_the_same_bytes(trace: Path, written: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.json.gz"
    assert moereplay("timeline", trace, *OPTIONS, "--out", again).returncode == 0
    assert again.read_bytes() == written.read_bytes()


def test_some_passes_are_those_of_the_whole_file(trace: Path, written: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.json"
    shown = ("--first-pass", 5, "--passes-shown", 2)
    assert moereplay("timeline", trace, *OPTIONS, *shown, "--out", part).returncode == 0
    links, every = range(LINKS, FILLS), read(written)
    wanted = [each for each in on(every, links) if each["args"]["pass"] in (5, 6)]
    assert on(read(part), links) == wanted
    assert [each["name"] for each in on(read(part), one(PASSES)) if each["name"][:5] == "pass "] == ["pass 5", "pass 6"]
    ended = moereplay("timeline", trace, *OPTIONS, "--first-pass", 31, "--passes-shown", 9, "--out", part)
    assert ended.returncode == 0 and "2 of 33 passes" in ended.stdout + ended.stderr


@every(
    "words, said",
    [
        (("--eviction", "lru,fifo"), "expand to 2"),
        (("--out", "x.parquet"), ".json or .json.gz"),
        (("--out", "-"), "standard output"),
        (("--out", "file/x.json"), "is not a folder"),
        (("--first-pass", 198), "197"),
        (("--engine", "fast"), "unknown engine"),
    ],
    apart=True,
)
def test_what_cannot_be_is_refused_before_anything_runs(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moereplay.commands.replay.run", None)
    (tmp_path / "file").touch()
    ended = moereplay("timeline", "miniature", *words, cwd=tmp_path)
    assert ended.returncode == 2 and said in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_more_events_than_a_viewer_opens_are_refused_with_what_to_type(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moereplay.analysis.timeline.limited.__defaults__", (2000,))
    ended = moereplay("timeline", trace, *OPTIONS, "--first-pass", 3, cwd=tmp_path)
    assert ended.returncode == 2 and "passes 3 to 32 make more than 2,000 events" in ended.stderr
    assert list(tmp_path.iterdir()) == []
    typed = ended.stderr[ended.stderr.index("--first-pass") :].split()
    assert typed[:2] == ["--first-pass", "3"]
    assert moereplay("timeline", trace, *OPTIONS, *typed, cwd=tmp_path).returncode == 0


def test_a_pass_that_is_too_large_by_itself_says_so() -> None:
    events = [Event(0, 5, "dense", 0, 0, -1, 0, "compute")]
    made = Timeline(events, 5, Machine(["link"], [], (0,), ((1,),)))
    with pytest.raises(ResultError, match="pass 0 alone makes more than 3 events; --passes chunk:N"):
        list(limited(made, range(1), most=3))
