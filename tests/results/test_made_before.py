"""Results that earlier versions wrote stay readable, resume without a replay, and share a folder with new ones.

tests/results/before was written at commit 2d11a6e, the last one before rooms `results` and `sweeps` existed, by
`moereplay replay miniature --capacity 25% --eviction lru --out replays`, `moereplay curve miniature --out curves` and
`moereplay sweep run experiment.toml --out sweep`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from moereplay.results import read
from moereplay.results.counters import COUNT, COUNTERS, Counter
from moereplay.results.parts import part_of
from moereplay.results.schema import FACTS, fields_of, table_schemas
from moereplay.results.settings import setting_kinds
from moereplay.results.stored import load
from moereplay.simulator.config import KINDS, configure
from moereplay.simulator.replay import replay
from moereplay.sweeps import jobs
from moereplay.sweeps.jobs import Batch, compute
from moereplay.sweeps.run import planned
from moereplay.sweeps.store import Folder
from moereplay.traces.store import open_trace
from tests.kit.command import moereplay_here as moereplay

LATER = ("seconds", "calibration", "arrival_ns", "queued_ns")  #: facts that older results do not have
BEFORE = Path(__file__).resolve().with_name("before")
SAMPLE = Path(__file__).resolve().parents[2] / "traces" / "samples" / "miniature.zarr"


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """A copy, with its trace where the experiment looks for it."""
    folder = tmp_path / "tests" / "results" / "before"
    shutil.copytree(BEFORE, folder)
    (tmp_path / "traces").symlink_to(BEFORE.parents[2] / "traces")
    return folder


def test_a_folder_of_replays_opens_and_takes_new_parts(before):
    replays = before / "replays"
    assert load(replays)["about"].struct.field("identity").to_list() == ["6f1a3ac40081255e"]
    ended = moereplay("replay", "miniature", "--capacity", "25%", "--eviction", "lru,fifo", "--out", replays)
    assert ended.returncode == 0, ended.stderr
    loaded = load(replays)
    assert not FACTS.keys() & fields_of(loaded.schema["totals"])
    runs = read.runs(loaded).sort("eviction")
    assert runs["eviction"].to_list() == ["fifo", "lru"]
    assert runs["misses"].null_count() == 0


def test_replays_of_then_are_merged_with_a_sweep(before, tmp_path):
    """The replay and the sweep of then share no configuration."""
    ended = moereplay("sweep", "merge", before / "replays", before / "sweep", "--out", tmp_path / "merged")
    assert ended.returncode == 0, ended.stderr
    apart = [runs["identity"].to_list() for runs in (load_runs(before / "replays"), load_runs(before / "sweep"))]
    merged = load_runs(tmp_path / "merged")
    assert merged["identity"].to_list() == sorted({*apart[0], *apart[1]})
    assert merged.filter(pl.col("identity").is_in(apart[0])).equals(load_runs(before / "replays"))
    about = json.loads(next((tmp_path / "merged").glob("part-*/provenance.json")).read_text())
    assert [each["command"][1] for each in about["merged"]] == ["replay", "sweep"]


def load_runs(folder: Path) -> pl.DataFrame:
    return read.runs(load(folder)).sort("identity")


def test_a_replay_of_today_writes_the_numbers_of_then(before, tmp_path):
    then = load(before / "replays")
    ended = moereplay("replay", "miniature", "--capacity", "25%", "--out", tmp_path / "today")
    assert ended.returncode == 0, ended.stderr
    today = load(tmp_path / "today").select(then.columns)
    for column in ("config", "about", "totals", "bounds", "per_layer", "per_request"):
        assert fields_of(today.schema[column]) == fields_of(then.schema[column]), column
        assert known_then(today[column].to_list(), then[column].to_list()) == then[column].to_list(), column


def known_then(today: Any, then: Any) -> Any:
    """Return old results in today's form: newer counters and facts are null."""
    if isinstance(then, dict):
        since = {name for name, value in then.items() if value is None and (name in COUNTERS or name in LATER)}
        since |= {"capacity_forms"}  # a sentence, which may be put in other words
        return {name: value if name in since else known_then(today[name], value) for name, value in then.items()}
    if isinstance(then, list):
        return [known_then(*pair) for pair in zip(today, then, strict=True)]
    return today


def test_a_sweep_resumes_with_no_replay(before):
    ended = moereplay("sweep", "run", before / "experiment.toml", "--out", before / "sweep")
    assert ended.returncode == 0, ended.stderr
    assert "2 configurations and 1 bound on 1 trace, 3 already stored" in ended.stderr
    assert len(list((before / "sweep").glob("part-*"))) == 3


@pytest.mark.slow
def test_a_sweep_takes_new_parts_beside_the_old(before):
    file = before / "experiment.toml"
    file.write_text(file.read_text().replace('"least_stale"', '"least_stale", "fifo"'))
    ended = moereplay("sweep", "run", file, "--out", before / "sweep")
    assert ended.returncode == 0, ended.stderr
    loaded = load(before / "sweep")
    assert sorted(loaded["config"].struct.field("eviction")) == ["fifo", "least_stale", "lru"]
    ended = moereplay("sweep", "show", before / "sweep", "--json")
    assert (ended.returncode, len([json.loads(line) for line in ended.stdout.splitlines()])) == (0, 3), ended.stderr


def test_curves_are_still_drawn(before, tmp_path):
    ended = moereplay("plot", before / "curves", "--out", tmp_path / "figures")
    assert ended.returncode == 0, ended.stderr
    assert list((tmp_path / "figures").glob("*.png"))


@pytest.fixture
def one_counter_more(monkeypatch) -> pytest.MonkeyPatch:
    """As in a later version; `undo` goes back to this one."""
    monkeypatch.setitem(COUNTERS, "spilled", Counter("spilled", COUNT, "made up by this test"))
    monkeypatch.setattr(jobs, "TABLES", table_schemas(setting_kinds(), KINDS))
    return monkeypatch


@pytest.mark.slow
def test_replays_of_before_and_after_a_counter_was_added_go_together(before, one_counter_more, tmp_path):
    replays = before / "replays"
    later = replay(open_trace(SAMPLE), configure(capacity="25%", eviction="fifo"), engine="reference")
    Folder(replays).store(part_of(later, None, None), {"sweep_version": 1})
    knowing = read.runs(load(replays)).sort("eviction")
    assert knowing.select("eviction", "spilled").rows() == [("fifo", 0), ("lru", None)]
    one_counter_more.undo()
    assert read.runs(load(replays)).sort("eviction").equals(knowing)
    assert read.layers(load(replays))["spilled"].null_count() > 0
    drawn = moereplay("plot", replays, "--figure", "misses", "--out", tmp_path / "figures")
    assert drawn.returncode == 0, drawn.stderr


@pytest.mark.slow
def test_parts_of_a_sweep_of_before_and_after_a_counter_was_added_go_together(before, one_counter_more, tmp_path):
    file, stored = before / "experiment.toml", before / "sweep"
    file.write_text(file.read_text().replace('"least_stale"', '"least_stale", "fifo"'))
    fifo = tuple(job for job in planned(file).jobs if job.kind == "configuration" and job.config.eviction == "fifo")
    Folder(stored).store(compute(Batch(0, fifo, "reference", True)).part, {"sweep_version": 1})
    expected = [("fifo", 0), ("least_stale", None), ("lru", None)]
    knowing = read.runs(load(stored)).sort("eviction")
    assert knowing.select("eviction", "spilled").rows() == expected
    one_counter_more.undo()
    assert moereplay("sweep", "merge", stored, "--out", tmp_path / "merged").returncode == 0
    for folder in (stored, tmp_path / "merged"):
        assert read.runs(load(folder)).sort("eviction").equals(knowing)
        shown = moereplay("sweep", "show", folder, "--json")
        assert (shown.returncode, len(shown.stdout.splitlines())) == (0, 3), shown.stderr
    assert moereplay("plot", tmp_path / "merged", "--out", tmp_path / "figures").returncode == 0
    again = moereplay("sweep", "run", file, "--out", stored)
    assert "4 already stored" in again.stderr
