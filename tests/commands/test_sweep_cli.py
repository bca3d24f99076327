"""`moereplay sweep` as a user meets it: progress, resuming, interruptions, kills, and the answers that it prints."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import polars as pl
import pytest

from moereplay.analysis.figures.catalogue import FIGURES
from moereplay.commands.report import plot as plot_verb
from moereplay.commands.sweep import sweep_merge
from moereplay.commands.sweep import sweep_run as sweep_run_verb
from moereplay.commands.sweep_results import sweep_compare
from moereplay.commands.sweep_results import sweep_show as sweep_show_verb
from moereplay.results.errors import ResultError
from tests.kit.command import in_python, unfolded
from tests.kit.every import every, forget_policies
from tests.kit.sweeping import GRID, command_of, descendants, experiment, merged, moereplay, start, store_trace

plot, sweep_run, sweep_show = map(in_python, (plot_verb, sweep_run_verb, sweep_show_verb))

ROUNDS = int(os.environ.get("MOEREPLAY_KILLS", "3"))
SLOWLY = ("--engine", "reference")
CAPACITIES = [f"{20 + 25 * i / ROUNDS:g}%" for i in range(2 * ROUNDS)]
#: Long enough to be interrupted: 36 configurations and 6 bounds of about a tenth of a second.
LONG = f"""
traces = ["long.zarr"]
[grid]
capacity = {json.dumps(CAPACITIES)}
eviction = ["lru", "fifo", "least_stale"]
prefetch = ["none", "top_k"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An experiment and its undisturbed results."""
    folder = tmp_path_factory.mktemp("cli")
    sweep_run(experiment(folder), str(folder / "out"), workers=1)
    return folder


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> Path:
    """The experiment of a sweep of some seconds."""
    folder = tmp_path_factory.mktemp("long")
    store_trace(folder / "long.zarr", prompt_tokens=20, decode_tokens=40)
    (folder / "long.toml").write_text(LONG)
    return folder


@pytest.fixture(scope="module")
def whole(long) -> Path:
    """Its undisturbed results."""
    sweep_run(long / "long.toml", str(long / "whole"), workers=1)
    return long / "whole"


@pytest.mark.slow
def test_a_finished_sweep_says_what_it_is_and_does_nothing_twice(folder):
    before = sorted(folder.glob("out/part-*"))
    code, out, said = moereplay("sweep", "run", folder / "experiment.toml", "--out", folder / "out")
    assert (code, out) == (0, "")
    assert "18 configurations and 3 bounds on 1 trace, 21 already stored" in said
    assert sorted(folder.glob("out/part-*")) == before


@pytest.mark.slow
def test_a_damaged_part_is_named_and_not_called_stored(folder, tmp_path):
    """It is found before the night that a sweep takes. Once it is removed, the same command completes the sweep."""
    out = tmp_path / "out"
    shutil.copytree(folder / "out", out)
    for table in ("configurations", "layers", "bounds"):
        file = next(out.glob(f"part-*/{table}.parquet"))
        content = file.read_bytes()
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
        code, _, said = moereplay("sweep", "run", folder / "experiment.toml", "--out", out)
        assert code == 2 and f"{file.parent.name}/{table}.parquet is damaged" in said and "stored" not in said
        file.write_bytes(content)
    shutil.rmtree(file.parent)
    code, _, said = moereplay("sweep", "run", folder / "experiment.toml", "--out", out, "--workers", 1, *SLOWLY)
    assert code == 0, said
    assert merged(tmp_path / "a", out) == merged(tmp_path / "b", folder / "out")


def test_a_part_names_where_it_comes_from(folder):
    found = json.loads(next(folder.glob("out/part-*/provenance.json")).read_text())
    assert {"versions", "commit", "host", "engine", "experiment", "traces", "started", "holds", "sha256"} <= set(found)
    assert found["versions"]["polars"] == pl.__version__


def test_a_dry_run_counts_and_estimates_and_writes_nothing(folder, tmp_path):
    code, out, said = moereplay("sweep", "run", folder / "experiment.toml", "--out", tmp_path / "no", "--dry-run")
    assert code == 0, said
    assert re.search(r"replays +21 to run, [\d.e-]+ s each", out)
    assert re.search(r"time +about 0:00:0\d with \d+ workers, engine", out)
    assert re.search(r"memory +about [\d,]+ MiB per process", out)
    assert not (tmp_path / "no").exists()


def test_show_ranks_filters_and_groups(folder, capsys):
    sweep_show(str(folder / "out"), by="tpot_ms", where=["eviction=lru"], top=3)
    shown = capsys.readouterr()
    assert "SIMULATED: 6 configurations; seconds: estimated, not calibrated" in shown.out
    assert "\nbest tpot_ms first\n" in shown.out
    assert "eviction lru; miss fetch; routing standard; platform a100-5gbps" in unfolded(shown.out)  # what is alike
    assert "fastest at each capacity, " in unfolded(shown.out)
    assert "3 of 6 rows" in shown.err
    sweep_show(str(folder / "out"), group_by="eviction,prefetch", as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["configurations"] for row in rows] == [3] * 6
    sweep_show(str(folder / "out"), as_csv=True)
    assert len(capsys.readouterr().out.splitlines()) == 1 + 18


def test_show_in_brief_is_the_last_lines(folder, capsys):
    sweep_show(str(folder / "out"))
    whole = capsys.readouterr().out.splitlines()
    sweep_show(str(folder / "out"), brief=True)
    head, *best = capsys.readouterr().out.splitlines()
    assert head == whole[0] and best == whole[-len(best) :]
    assert best[0].startswith("fastest at each capacity, ")
    sweep_show(str(folder / "out"), group_by="eviction", brief=True)
    assert "nothing to compare: one configuration, or means of groups" in capsys.readouterr().out


def test_show_takes_the_folder_of_a_replay(folder, capsys):
    assert (
        moereplay("replay", folder / "tiny.zarr", "--capacity", "60%", "--eviction", "lru,fifo", "--out", folder / "r")[
            0
        ]
        == 0
    )
    sweep_show(str(folder / "r"), as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["eviction"] for row in rows} == {"lru", "fifo"}


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> Path:
    """Replays of twelve requests, which keep their rows."""
    folder = tmp_path_factory.mktemp("several")
    store_trace(folder / "twelve.zarr", requests=12, prompt_tokens=2, decode_tokens=8)
    grid = ("--capacity", "30%,60%", "--eviction", "lru,random", "--passes", "token", "--out", folder / "out")
    assert moereplay("replay", folder / "twelve.zarr", *grid)[0] == 0
    return folder / "out"


@pytest.mark.slow
def test_compare_sets_every_configuration_beside_one(several, capsys):
    sweep_compare(str(several), "lru", where=["capacity=60%"], as_json=True)
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert row["eviction"] == "random" and row["better"] in ("yes", "no", "can't tell")
    sweep_compare(str(several), "random", where=["capacity=60%"], as_json=True)
    (turned,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert turned["difference"] == pytest.approx(-row["difference"])
    assert {row["better"], turned["better"]} in ({"yes", "no"}, {"can't tell"})
    sweep_compare(str(several), row["identity"][:10], by="tpot_ms", as_csv=True)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split(",")[:4] == ["identity", "eviction", "capacity", "tpot_ms"] and len(lines) == 3
    assert head.split(",")[4:9] == ["difference", "low", "high", "half_width", "p_holm"]
    assert head.split(",")[9:] == ["better", "requests", "better_on"]


def test_compare_shows_a_table_that_fits(several, capsys):
    sweep_compare(str(several), "eviction=lru", where=["capacity=30%"])
    shown = capsys.readouterr().out
    assert "is eviction=lru better by hit_rate (differences in points) than each of these?" in unfolded(shown)
    assert max(map(len, shown.splitlines())) <= 80


@every(
    "one, options, said",
    [
        ("lru", {}, "'lru' .* 2 configurations"),
        ("lifo", {}, "'lifo'"),
        ("shape=round", {}, "'shape'"),
        ("least_stale:order=a", {}, "'least_stale:order=a'"),
        ("lru", {"where": ["capacity=60%"], "by": "gb_moved"}, "unknown figure to compare 'gb_moved'"),
    ],
)
def test_compare_refuses_what_is_not_one_configuration(several, one, options, said):
    with pytest.raises(ResultError, match=said):
        sweep_compare(str(several), one, **options)


@pytest.mark.slow
def test_requests_are_kept_unless_the_experiment_says_otherwise(folder, tmp_path, capsys):
    """Results stored without request rows stay unchanged, unless the experiment requires them."""
    file, out = folder / "experiment.toml", tmp_path / "out"
    sweep_run(file, str(out), workers=1, changes=["requests=false"])
    assert not list(out.glob("part-*/requests.parquet"))
    with pytest.raises(ResultError, match="requests = true"):
        sweep_compare(str(out), "lru", where=["prefetch=none", "capacity=20%"])
    capsys.readouterr()
    sweep_run(file, str(out), workers=1)
    assert "21 already stored" in capsys.readouterr().err
    sweep_run(file, str(out), workers=1, changes=["requests=true"])
    assert "3 already stored" in capsys.readouterr().err
    sweep_compare(str(out), "lru", where=["prefetch=none", "capacity=20%"], as_csv=True)
    assert merged(tmp_path / "a", out) == merged(tmp_path / "b", folder / "out")


def test_compare_takes_a_users_policy_without_the_version_of_its_file(tmp_path, capsys):
    """As --where does; of two versions it asks which."""
    store_trace(tmp_path / "t.zarr", requests=3, prompt_tokens=2, decode_tokens=8)
    for times in (2, 3):
        text = (
            "from moereplay.policies.contract import Eviction, expert_of\n"
            "def key(now, experts, copies, own, y):\n"
            f"    return experts[expert_of(now, y)]['last_use'] * {times}\n"
            "POLICY = Eviction(name='mine', summary='s', source='s', key=key, reads=frozenset())\n"
        )
        (tmp_path / "mine.py").write_text(text)
        code, _, said = moereplay(
            *("replay", tmp_path / "t.zarr", "--policy-file", tmp_path / "mine.py", "--engine", "reference"),
            *("--eviction", "lru,mine", "--capacity", "40%", "--passes", "token", "--out", tmp_path / "out"),
            *("--workers", 1),
        )
        assert code == 0, said
        forget_policies()  # those who compare need not have the file
        if times == 2:
            sweep_compare(str(tmp_path / "out"), "mine")
            assert "is mine better by hit_rate" in unfolded(capsys.readouterr().out)
    with pytest.raises(ResultError, match=r"mine.* 2 versions.*mine@"):
        sweep_compare(str(tmp_path / "out"), "mine")


@pytest.mark.slow
def test_merge_and_plot_take_the_folder(folder, tmp_path, capsys):
    sweep_merge([str(folder / "out")], str(tmp_path / "merged"))
    assert "18 configurations" in capsys.readouterr().err
    plot(str(tmp_path / "merged"), where=["prefetch=top_k"])
    assert {path.stem for path in (tmp_path / "merged" / "figures").iterdir()} == set(FIGURES)
    assert "left out: checks: none of these configurations was checked; `sweep run --every N` checks some" in (
        capsys.readouterr().err.splitlines()
    )


REFUSALS = {
    "impossible": (["--set", 'grid.capacity=["0.1%"]'], "cannot run"),
    "executor": (["--executor", "dask"], "choose from ray, local, slurm"),
}


@every("name", REFUSALS, apart=True)
def test_a_refusal_is_one_line_and_exit_code_two(name, folder, tmp_path):
    arguments, said = REFUSALS[name]
    code, out, answer = moereplay("sweep", "run", folder / "experiment.toml", "--out", tmp_path / "o", *arguments)
    assert (code, out) == (2, "")
    assert said in answer.strip().splitlines()[-1]
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_error_rows_are_told_and_the_others_are_there(folder, tmp_path, capsys):
    file = experiment(folder, GRID.replace('"20%"', '"0.1%"'), "some.toml")
    sweep_run(file, str(tmp_path), workers=1, keep_going=True)
    said = capsys.readouterr().err
    assert said.count("less than one expert of 1,000") == 10  # five before, five after
    assert "and 1 more error rows" in said
    sweep_show(str(tmp_path), errors=True)
    shown = capsys.readouterr().out
    assert shown.count("all: ") == 1 and shown.count("0.1%") == 2  # setting and reason, the same of all six
    assert len(re.findall(r"^[0-9a-f]{8} ", shown, re.MULTILINE)) == 6


def wait_for_parts(process: subprocess.Popen[str], out: Path, more_than: int) -> None:
    """Return once there are more parts, or the process has ended."""
    deadline = time.monotonic() + 60
    while len(list(out.glob("part-*"))) <= more_than and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.long
def test_ctrl_c_finishes_what_is_in_flight_and_says_how_to_resume(long, whole, tmp_path):
    process = start("sweep", "run", long / "long.toml", "--out", tmp_path / "out", "--workers", 2, *SLOWLY)
    wait_for_parts(process, tmp_path / "out", 1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group gets it
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping: " in said
    stored = re.search(rf"stopped with (\d+) of {7 * len(CAPACITIES)} done; run the same command to resume", said)
    assert stored
    code, _, said = moereplay("sweep", "run", long / "long.toml", "--out", tmp_path / "out", "--workers", 1)
    assert code == 0
    assert f"{stored[1]} already stored" in said
    assert merged(tmp_path / "a", tmp_path / "out") == merged(tmp_path / "b", whole)


@pytest.mark.long
def test_kills_of_driver_and_workers_lose_nothing_that_is_stored(long, whole, tmp_path):
    dice, out, killed = random.Random(4), tmp_path / "out", {"drivers": 0, "workers": 0}
    command = ("sweep", "run", long / "long.toml", "--out", out, "--workers", 2, *SLOWLY)
    for _ in range(ROUNDS):
        before = sorted(path.name for path in out.glob("part-*"))
        process = start(*command)
        wait_for_parts(process, out, len(before))
        time.sleep(dice.random() * 0.3)
        for worker in descendants(process.pid)[:1]:
            os.kill(worker, signal.SIGKILL)
            killed["workers"] += 1
        time.sleep(dice.random() * 0.5)
        workers = descendants(process.pid)
        process.kill()
        process.communicate()
        killed["drivers"] += process.returncode == -signal.SIGKILL
        assert set(before) <= {path.name for path in out.glob("part-*")}
        wait_for_end(workers)
    assert min(killed.values()) > 0
    code, _, said = moereplay(*command)
    assert code == 0, said
    assert merged(tmp_path / "a", out) == merged(tmp_path / "b", whole)


def wait_for_end(pids: list[int]) -> None:
    """Workers end by themselves once their driver is gone."""
    deadline = time.monotonic() + 20
    while any("spawn_main" in command_of(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker outlived its driver"
        time.sleep(0.05)


@pytest.mark.long
def test_a_dead_worker_is_replaced_and_its_work_done_again(long, tmp_path):
    half = f"grid.capacity={json.dumps(CAPACITIES[::2])}"
    command = ("sweep", "run", long / "long.toml", "--set", half, "--workers", 1)
    process = start(*command, *SLOWLY, "--out", tmp_path / "out")
    wait_for_parts(process, tmp_path / "out", 0)
    (worker,) = descendants(process.pid)
    os.kill(worker, signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert f"{7 * len(CAPACITIES) // 2}/{7 * len(CAPACITIES) // 2} replays" in said
    assert moereplay(*command, "--out", tmp_path / "whole")[0] == 0
    assert merged(tmp_path / "a", tmp_path / "out") == merged(tmp_path / "b", tmp_path / "whole")
