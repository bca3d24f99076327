"""`moereplay quality` on the miniature: what it prints and writes, what it refuses, killed and typed again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from moereplay.results.quality import load
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded
from tests.kit.every import every

TEXT = Path(__file__).resolve().parents[2] / "tracegen" / "miniature" / "heldout.txt"
SETS = """
[base]
capacity = "25%"
reset = "request"
[sets.lru]
eviction = "lru"
[sets.prior]
routing = ["cache_prior:lam=.1", "cache_prior:lam=1"]
[sets.bits]
miss = "lowest_bit:bits=2"
"""
SMALL = ("--window", 14, "--limit", 2, "--device", "cpu", "--dtype", "float32")
FILES = ("quality.parquet", "examples.parquet", "figures/quality_by_miss_rate.png", "figures/quality_by_speed.svg")


def command(folder: Path, *more: object, batch: int = 2) -> tuple[object, ...]:
    (folder / "sets.toml").write_text(SETS)
    tasks = ("--tasks", f"perplexity:{TEXT}", "--batch", batch)
    return ("quality", "miniature", "--sets", folder / "sets.toml", *tasks, *SMALL, "--out", folder / "out", *more)


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("quality")
    return folder, moereplay(*command(folder))


@pytest.mark.long
def test_a_table_per_task_with_every_set_beside_the_unmodified_model(answered) -> None:
    folder, ended = answered
    assert ended.returncode == 0, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines()]
    table = {" ".join(row[:-6]): row[-6:] for row in rows if len(row) > 6}
    assert {"unmodified", "lru", "prior cache_prior:lam=.1", "prior cache_prior:lam=1"} <= set(table)
    assert table["lru"][2] == table["unmodified"][2], "the same predictions"
    assert float(table["prior cache_prior:lam=1"][0]) < float(table["lru"][0]), "fewer misses"
    assert "perplexity:heldout.txt: 2 texts" in ended.stdout
    assert "set bits runs without batches: miss lowest_bit:bits=2 rounds an expert" in unfolded(ended.stderr)
    assert all((folder / "out" / name).exists() for name in FILES)


@pytest.mark.slow
def test_what_is_written_holds_an_example_per_row(answered) -> None:
    folder, _ = answered
    frame, flat = load(folder / "out"), pl.read_parquet(folder / "out" / "examples.parquet")
    assert len(frame) == 5 and len(flat) == 5 * 2 * 3, "sets, windows, and nll, kl, top1"
    for row in frame.iter_rows(named=True):
        figures = {each["name"]: each["value"] for each in row["measures"]}
        means = dict(
            flat.filter(pl.col("set") == row["set"]).group_by("measure").agg(pl.col("value").mean()).iter_rows()
        )
        assert means == pytest.approx({name: figures[name] for name in means}), "windows of one length weigh the same"
    worst = flat.filter(pl.col("measure") == "kl").group_by("set").agg(pl.col("value").sum()).sort("value")
    assert worst["set"][-1] == "bits" and worst["value"][0] == 0
    assert (
        flat.filter(pl.col("set") == "lru").drop("set").equals(flat.filter(pl.col("set") == "unmodified").drop("set"))
    )


@pytest.mark.slow
def test_typed_again_nothing_is_asked_and_the_bytes_are_the_same(answered) -> None:
    folder, _ = answered
    before = {name: (folder / "out" / name).read_bytes() for name in FILES}
    again = moereplay(*command(folder, "--json"))
    assert again.returncode == 0 and again.stderr.count("kept from an earlier run") == 5
    assert {name: (folder / "out" / name).read_bytes() for name in FILES} == before
    rows = {row["set"]: row for row in json.loads(again.stdout)["rows"]}
    assert rows["lru"]["figures"]["live_miss_rate"] == rows["lru"]["figures"]["replayed_miss_rate"]
    assert {each["measure"] for each in rows["bits"]["differences"]} == {"nll", "perplexity", "kl", "top1"}
    assert rows["bits"]["config"]["miss"] == "lowest_bit:bits=2"
    assert rows["lru"]["mass_changed"] == 0 and rows["bits"]["mass_changed"] == pytest.approx(2.4 / 3)


@pytest.mark.slow
def test_plot_draws_the_folder_again(answered) -> None:
    folder, _ = answered
    ended = moereplay("plot", folder / "out", "--out", folder / "drawn", "--figure", "quality_by_speed")
    assert ended.returncode == 0, ended.stderr
    drawn, first = (folder / each / "quality_by_speed.png" for each in ("drawn", "out/figures"))
    assert drawn.read_bytes() == first.read_bytes()


SETS_REFUSED = (
    ('[sets.unmodified]\neviction = "lru"', "'unmodified' is reserved for the model without policies; rename the set"),
    ('[sets.a]\neviction = "belady"', "policy set a: eviction belady needs the future"),
    ('[sets.a]\npasses = "token"', "policy set a: --passes token"),
    ('[sets.a]\nrouting = "nope"', "policy set a: unknown routing policy 'nope'"),
)


@every("sets, said", SETS_REFUSED, apart=True)
def test_sets_that_no_model_can_run_under_are_refused_by_name(tmp_path: Path, sets: str, said: str) -> None:
    line = command(tmp_path)
    (tmp_path / "sets.toml").write_text(sets)
    ended = moereplay(*line, cwd=tmp_path)
    assert ended.returncode == 2 and said in unfolded(ended.stderr)


def test_without_the_harness_its_tasks_are_refused_with_what_to_install(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("moereplay.tracegen.quality.named.find_spec", lambda name: None)
    ended = moereplay(*command(tmp_path, "--tasks", "gsm8k"))
    assert ended.returncode == 2
    assert "task gsm8k needs lm-evaluation-harness: pip install " in ended.stderr and "[quality]" in ended.stderr


@pytest.mark.long
def test_killed_and_typed_again_is_as_undisturbed(answered, tmp_path: Path) -> None:
    """kill -9 at several moments; each time the same command goes on."""
    line = [sys.executable, "-m", "moereplay", *map(str, command(tmp_path))]
    for seconds in (6, 9, 12):
        with subprocess.Popen(line, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as running:
            time.sleep(seconds)
            running.send_signal(signal.SIGKILL)
    assert moereplay(*command(tmp_path)).returncode == 0
    folder, _ = answered
    for name in FILES[:2]:
        assert (tmp_path / "out" / name).read_bytes() == (folder / "out" / name).read_bytes()
    assert not list(tmp_path.rglob("*.partial"))
    ours, theirs = (sorted(each.name for each in (where / "out" / "traces").iterdir()) for where in (tmp_path, folder))
    assert ours == theirs
