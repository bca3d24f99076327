"""`moereplay curve` as a user meets it: the numbers of replays, files that plot draws, refusals before any counting."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace
from moereplay.traces.synthetic import Synthetic, synthesise
from moereplay.traces.writer import write_trace
from tests.commands.test_cli import ROOT
from tests.kit.cases import sizes
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded
from tests.kit.every import every
from tests.kit.tiny_runs import small_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of eight; prompts of four tokens demand up to eight at once."""
    return stored(small_trace(), tmp_path_factory.mktemp("curve") / "small.zarr")


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, whose experts differ in bytes."""
    drawn = Synthetic(geometry=sizes(2, 6, 2, [30, 20]), prompt_tokens=0, decode_tokens=20)
    return stored(synthesise(drawn), tmp_path_factory.mktemp("unequal") / "unequal.zarr")


def stored(made: Trace, path: Path) -> Path:
    write_trace(path, made.header, map(made.request, range(made.requests)))
    return path


def rows(shown: str) -> dict[str, list[str]]:
    """Capacity -> the other cells, of the table."""
    cells = (line.split() for line in shown.splitlines())
    return {row[0]: row[1:] for row in cells if row and row[0].endswith("%") and len(row) > 2}


def test_the_table_has_the_misses_of_replays_and_a_dash_where_times_decide(trace: Path) -> None:
    shown = moereplay("curve", trace)
    assert shown.returncode == 0, shown.stderr
    assert "SIMULATED" in shown.stdout
    assert "belady: 4 of 32 capacities, from 2 to 5 experts, hold less than one step demands" in unfolded(shown.stdout)
    table = rows(shown.stdout)
    assert list(table) == ["5%", "10%", "25%", "50%", "75%", "100%"]  # 1 % and 2 % hold no expert
    assert table["10%"][4:] == ["-", "-", "-"]
    for column, eviction in ((1, "lru"), (4, "belady")):
        for capacity in ("25%", "50%", "75%"):
            config = configure(eviction=eviction, capacity=capacity)
            replayed = replay(open_trace(trace), config, engine="reference")
            assert int(table[capacity][column]) == replayed.totals["misses"]
            complete = replayed.totals["complete_steps"] / replayed.totals["steps"]
            assert table[capacity][column + 2] == f"{complete:.2%}"


@pytest.mark.slow
def test_a_platform_closes_the_gaps_with_its_own_replays(trace: Path) -> None:
    told = ("curve", trace, "--eviction", "belady", "--platform", "phone-ufs4", "--engine", "reference", "--json")
    document = json.loads(moereplay(*told).stdout)
    assert [at + 1 for at, replayed in enumerate(document["replayed"]) if replayed] == [2, 3, 4, 5]
    config = configure(eviction="belady", capacity="3experts", platform="phone-ufs4")
    replayed = replay(open_trace(trace), config, engine="reference").totals
    assert document["misses"][2] == replayed["misses"]
    assert document["complete_steps"][2] == replayed["complete_steps"]
    assert document["config"]["platform"] == "phone-ufs4"


def test_json_is_one_document_and_out_one_file_per_policy(trace: Path, tmp_path: Path) -> None:
    shown = moereplay("curve", trace, "--eviction", "lru", "--scope", "per_layer", "--json", "--out", tmp_path)
    document = json.loads(shown.stdout)
    (path,) = tmp_path.iterdir()
    assert f"wrote {path}" in shown.stderr
    assert pl.read_parquet(path).drop("digest").to_dicts() == [document]
    assert len(document["misses"]) == 8
    columns = zip(*document["layer_misses"], strict=True)
    assert [None if None in layers else sum(layers) for layers in columns] == document["misses"]
    assert document["misses"].count(None) not in (0, 8)
    before = path.read_bytes()
    assert moereplay("curve", trace, "--scope", "per_layer", "--out", tmp_path).returncode == 0
    assert (path.read_bytes(), len(list(tmp_path.iterdir()))) == (before, 2)


@pytest.mark.slow
def test_plot_draws_curves_alone_and_behind_replays(trace: Path, tmp_path: Path) -> None:
    assert moereplay("curve", trace, "--out", tmp_path).returncode == 0
    drawn = moereplay("plot", tmp_path, "--out", tmp_path / "alone")
    assert drawn.returncode == 0, drawn.stderr
    assert {path.name for path in (tmp_path / "alone").iterdir()} == {
        f"hit_rate_by_capacity.{k}" for k in ("csv", "png", "svg")
    }
    replays = f"no replay in {tmp_path}; create one with: moereplay replay TRACE --capacity 5%,25% --out {tmp_path}"
    assert drawn.stderr.splitlines()[-1].endswith(
        f"misses, complete_by_capacity, ttft_by_capacity, tpot_by_capacity: {replays}"
    )
    refused = moereplay("plot", tmp_path, "--figure", "misses")
    assert (refused.returncode, "no results in" in refused.stderr) == (2, True)
    replayed = moereplay("replay", trace, "--capacity", "25%,50%", "--out", tmp_path)
    assert replayed.returncode == 0, replayed.stderr
    drawn = moereplay("plot", tmp_path, "--figure", "hit_rate_by_capacity")
    assert drawn.returncode == 0, drawn.stderr
    with_curves = (tmp_path / "figures" / "hit_rate_by_capacity.svg").read_bytes()
    for path in tmp_path.glob("curve-*.parquet"):
        path.unlink()
    assert moereplay("plot", tmp_path, "--figure", "hit_rate_by_capacity").returncode == 0
    assert (tmp_path / "figures" / "hit_rate_by_capacity.svg").read_bytes() != with_curves


@pytest.mark.long
def test_plot_says_which_curves_match_no_replay(trace: Path, tmp_path: Path) -> None:
    assert moereplay("curve", trace, "--eviction", "lru", "--passes", "token", "--out", tmp_path).returncode == 0
    assert moereplay("curve", trace, "--eviction", "lru", "--out", tmp_path).returncode == 0
    assert moereplay("replay", trace, "--capacity", "25%,50%", "--out", tmp_path).returncode == 0
    said = moereplay("plot", tmp_path).stderr
    command = f"moereplay curve TRACE --out {tmp_path}"
    why = f"1 of 2 curves match no replay: lru (passes token); create matching ones with: {command}"
    assert f"left out: curves: {why}" in said.splitlines()
    assert "left out" not in moereplay("plot", tmp_path, "--figure", "misses").stderr
    assert moereplay("replay", trace, "--capacity", "25%,50%", "--passes", "token", "--out", tmp_path).returncode == 0
    assert "left out: curves" not in moereplay("plot", tmp_path).stderr


def test_three_policies_are_a_table_of_80_columns(trace: Path) -> None:
    shown = moereplay("curve", trace, "--eviction", "lru,belady,relaxed_belady").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert [len(line.split()) for line in shown.splitlines() if line.startswith("50% ")] == [9]


def test_a_pool_of_unequal_bytes_has_lru_alone_and_says_why(unequal: Path) -> None:
    shown = moereplay("curve", unequal)
    assert (shown.returncode, "no curve of belady" in shown.stderr) == (0, True)
    assert "lru misses" in shown.stdout and "belady misses" not in shown.stdout
    asked = moereplay("curve", unequal, "--eviction", "belady")
    assert (asked.returncode, "more room can cost hits" in asked.stderr) == (2, True)
    per_layer = moereplay("curve", unequal, "--scope", "per_layer")
    assert "belady" in per_layer.stdout


def test_a_division_is_a_capacity_that_misses_as_often(trace: Path, unequal: Path) -> None:
    told = ("--scope", "per_layer", "--contract", "sequential", "--divide", "25%,50%")
    document = json.loads(moereplay("curve", trace, *told, "--json").stdout)
    assert [(row["policy"], row["total"]) for row in document["divisions"]] == [
        (policy, total) for policy in ("lru", "belady") for total in ("25%", "50%")
    ]
    for row in document["divisions"]:
        how = {"eviction": row["policy"], "contract": "sequential"}
        for misses, capacity in (("misses", row["capacity"]), ("equal_pools_misses", row["total"])):
            config = configure(capacity=capacity, scope="per_layer", **how)
            assert replay(open_trace(trace), config).totals["misses"] == row[misses]
        one = replay(open_trace(trace), configure(capacity=row["total"], **how)).totals["misses"]
        assert row["one_pool_misses"] == one
        assert row["fewer_than_one"] == (one - row["misses"]) / one
    shown = moereplay("curve", trace, *told)
    first = document["divisions"][0]
    assert f"lru at 25%: --scope per_layer --capacity {first['capacity']}" in unfolded(shown.stdout)
    lines = [line.split() for line in shown.stdout.splitlines() if line.startswith("belady  ")]
    assert [line[-4] for line in lines] == [str(row["equal_pools_misses"]) for row in document["divisions"][2:]]
    rows = json.loads(moereplay("curve", unequal, *told, "--json").stdout)["divisions"]
    assert [row["one_pool_misses"] is None for row in rows] == [False, False, True, True]


REFUSALS = {
    "missing trace": (["nowhere.zarr"], "nowhere.zarr"),
    "no stack algorithm": (["TRACE", "--eviction", "lru,fifo"], "invalid --eviction 'fifo'"),
    "unknown policy": (["TRACE", "--eviction", "lur"], "did you mean lru?"),
    "empty entry": (["TRACE", "--eviction", "lru,"], "''"),
    "two documents": (["TRACE", "--json"], "--json requires one policy, not 2"),
    "unknown platform": (["TRACE", "--platform", "a100-5gb"], "did you mean a100-5gbps?"),
    "unknown engine": (["TRACE", "--engine", "warp"], "unknown engine 'warp': choose from "),
    "unknown contract": (["TRACE", "--contract", "loose"], "atomic"),
    "unknown passes": (
        ["TRACE", "--passes", "all"],
        "unknown passes 'all': expected recorded, token, chunk:N, decode:N or batch:N",
    ),
    "unknown reset": (["TRACE", "--reset", "often"], "never, request or a number"),
    "unknown scope": (["TRACE", "--scope", "rack"], "per_layer"),
    "division of one pool": (["TRACE", "--divide", "25%"], "--divide requires --scope per_layer"),
    "division by times": (
        ["TRACE", "--scope", "per_layer", "--divide", "25%"],
        "no division of 8,000,000 bytes: below 24,000,000 in equal pools",
    ),
    "division on a platform": (
        ["TRACE", "--scope", "per_layer", "--divide", "25%", "--platform", "a100-5gbps"],
        "--divide cannot be combined with --platform",
    ),
    "file in the way": (["TRACE", "--out", "FILE"], "cannot write"),
}


@every("name", REFUSALS, apart=True)
def test_bad_input_is_one_line_and_exit_code_two(name: str, trace: Path, tmp_path: Path) -> None:
    arguments, said = REFUSALS[name]
    (tmp_path / "file").write_text("in the way")
    paths = {"TRACE": trace, "FILE": tmp_path / "file"}
    refused = moereplay("curve", *(paths.get(word, word) for word in arguments), cwd=tmp_path)
    assert refused.returncode == 2, refused.stderr
    lines = [line for line in refused.stderr.strip().splitlines() if not re.search(r"steps, |^compiling ", line)]
    assert len(lines) == 1 and said in lines[0]
    assert refused.stdout == ""


@pytest.mark.long
def test_the_first_count_says_that_it_compiles_and_the_next_is_quiet(trace: Path, tmp_path: Path) -> None:
    """A cache folder of its own is what a new version finds."""
    command = [sys.executable, "-W", "error", "-m", "moereplay", "curve", str(trace), "--eviction", "lru"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1", "XDG_CACHE_HOME": str(tmp_path)}
    first, second = (
        subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=True) for _ in "ab"
    )
    assert "compiling the count of lru" in first.stderr
    assert "compiling" not in second.stderr
    assert first.stdout == second.stdout


def test_the_python_example_runs_and_both_its_numbers_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = re.search(r"## From Python\n\n```python\n(.*?)```", (ROOT / "docs/curves.md").read_text(), re.DOTALL)
    assert example
    monkeypatch.chdir(ROOT)
    names: dict = {}
    exec(example[1], names)
    rate, misses, gaps, whole = capsys.readouterr().out.split()
    assert float(rate) == pytest.approx(1 - int(misses) / names["lru"].accesses)
    assert (int(gaps) > 0, whole) == (True, "True")
