"""Sweeps on Ray and by submitit on this machine, and searches by optuna: the same rows as from a plain run.

These three are optional dependencies; where one is not installed, its tests have nothing to run.
"""

import json
import os
import re
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from moereplay.commands.sweep import sweep_run as sweep_run_verb
from moereplay.commands.sweep import tune as tune_verb
from moereplay.results.stored import load
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.clusters import (
    RayExecutor,
    Shards,
    _executor,
    last_line,
    limited,
    options_of,
    pack,
    place,
    run_shards,
)
from moereplay.sweeps.experiment.file import read
from moereplay.sweeps.jobs import Batch, compute, open_traces
from moereplay.sweeps.run import Stored, execute, planned
from moereplay.sweeps.store import Folder, Place
from moereplay.sweeps.tune import Search, check, tune
from moereplay.traces.store import open_trace
from tests.kit.command import in_python
from tests.kit.sweeping import experiment, merged, store_trace

sweep_run = in_python(sweep_run_verb)

TUNED = """
traces = ["tiny.zarr"]
[grid]
capacity = { low = 10, high = 90, suffix = "%" }
eviction = ["lru", "fifo", "least_stale", "lfu"]
prefetch = ["none", "top_k"]
[[exclude]]
eviction = "fifo"
"""


class Here:
    """An executor that runs every batch at once, in this process."""

    slots = room = 2

    def __init__(self, out: Place) -> None:
        self._out, self._waiting = out, []

    def submit(self, batch: Batch, alone: bool = False) -> None:
        self._waiting.append(batch)

    def collect(self, seconds: float) -> list[Stored]:
        waiting, self._waiting = self._waiting, []
        made = [(batch, compute(batch)) for batch in waiting]
        for _, each in made:
            self._out.store(each.part, {"sweep_version": 1})
        return [Stored(batch, each.headlines) for batch, each in made]

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An experiment and its results from this process."""
    folder = tmp_path_factory.mktemp("clusters")
    sweep = planned(experiment(folder))
    execute(sweep, sweep.jobs, Folder(folder / "out"), "reference", lambda out, about: Here(out))
    return folder


def test_a_packed_trace_is_the_trace_wherever_it_is_placed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    trace = open_trace(folder / "tiny.zarr")
    for _ in range(2):  # the second finds the first
        placed = place(pack(folder / "tiny.zarr"), "tiny.zarr", trace.digest)
    assert tmp_path in placed.parents
    assert open_trace(placed).digest == trace.digest
    assert [path.name for path in placed.parent.iterdir()] == ["tiny.zarr"]


def kill_one(killed: list[int], stop: threading.Event) -> None:
    """kill -9 the first Ray worker that is replaying for us."""
    while not stop.is_set() and not killed:
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if not killed and b"ray::_run" in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
                    killed.append(int(process.name))
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")  # Ray's own
def test_ray_gives_the_same_rows_though_a_worker_is_killed(tmp_path):
    pytest.importorskip("ray")
    store_trace(tmp_path / "tiny.zarr", prompt_tokens=20, decode_tokens=60)  # long enough to be caught at work
    sweep, killed, stop = planned(experiment(tmp_path)), [], threading.Event()
    execute(sweep, sweep.jobs, Folder(tmp_path / "here"), "reference", lambda out, about: Here(out))
    killer = threading.Thread(target=kill_one, args=(killed, stop))
    killer.start()
    try:
        out = Folder(tmp_path / "out")
        ended = execute(sweep, sweep.jobs, out, "reference", lambda out, about: RayExecutor("", 2, out, about))
    finally:
        stop.set()
        killer.join()
    assert len(killed) == 1
    assert (ended.done, ended.given_up, ended.errors) == (21, {}, {})
    assert merged(tmp_path / "a", tmp_path / "out") == merged(tmp_path / "b", tmp_path / "here")


@pytest.mark.slow
def test_submitit_sweeps_into_a_store_and_leaves_its_logs_beside_the_experiment(folder, tmp_path, monkeypatch, capsys):
    pytest.importorskip("submitit")
    pytest.importorskip("obstore")
    (tmp_path / "bucket").mkdir()
    url, options = (tmp_path / "bucket").as_uri(), ["cluster=local", "timeout_min=5"]
    sweep_run(experiment(tmp_path), url, workers=1, executor="slurm", nodes=2, slurm=options, engine="reference")
    said = capsys.readouterr().err
    shards = [int(many) for many in re.findall(r"shard \d/2: (\d+) replays", said)]
    assert len(shards) == 2 and all(shards) and sum(shards) == 21  # each of the sweep's replays once
    assert list((tmp_path / "slurm").iterdir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert merged(tmp_path / "a", url) == merged(tmp_path / "b", folder / "out")


def test_a_trace_behind_a_url_is_fetched_once_and_is_the_same(folder, tmp_path, monkeypatch):
    pytest.importorskip("obstore")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = (folder / "tiny.zarr").as_uri()
    sweep = planned(folder / "experiment.toml", [f'traces=["{url}"]'])
    assert tmp_path in sweep.jobs[0].trace.parents
    assert sweep.traces[0].digest == open_trace(folder / "tiny.zarr").digest
    fetched = (tmp_path / "moereplay" / "fetched").glob("*/*")
    (kept,) = fetched
    (kept / "more").write_text("still there, so nothing was fetched again")
    planned(folder / "experiment.toml", [f'traces=["{url}"]'])
    assert (kept / "more").exists()
    with pytest.raises(ConfigError, match=r"cannot fetch|nothing found"):
        planned(folder / "experiment.toml", [f'traces=["{url}-nope"]'])


@pytest.mark.long
def test_jobs_find_our_packages_in_a_folder_that_has_such_names(tmp_path, monkeypatch, capsys):
    """The recipe itself makes `results`; a policy file imports from moereplay in the job."""
    pytest.importorskip("submitit")
    for name in ("results", "traces", "analysis"):
        (tmp_path / name).mkdir()
    for name in ("policies.py", "signal.py", "random.py"):
        (tmp_path / name).write_text("raise SystemExit('a file of the user was imported')\n")
    (tmp_path / "mine.py").write_text(
        "from moereplay.contract import Eviction\n\n\ndef key(now, experts, copies, own, y):\n    return y\n\n\n"
        "POLICY = Eviction(name='jobs_own', summary='evict one', source='none', key=key)\n"
    )
    store_trace(tmp_path / "tiny.zarr")
    text = 'traces = ["tiny.zarr"]\npolicy_files = ["mine.py"]\n[grid]\neviction = ["jobs_own", "lru"]\n'
    (tmp_path / "e.toml").write_text(text + 'capacity = ["50%"]\n')
    monkeypatch.chdir(tmp_path)
    options = {"workers": 1, "engine": "reference"}
    slurm = ["cluster=local", "timeout_min=5"]
    sweep_run(tmp_path / "e.toml", "results", executor="slurm", nodes=1, slurm=slurm, **options)
    assert "3 replays, 0 error rows" in capsys.readouterr().err
    sweep_run(tmp_path / "e.toml", "more", **options)
    assert merged(tmp_path / "a", tmp_path / "results") == merged(tmp_path / "b", tmp_path / "more")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "failed with trace:\n----\nTraceback (most recent call last):\n  File x\nValueError: no\n\n--\nsee a.out",
            "ValueError: no",
        ),
        (
            "Traceback (most recent call last):\n  a\nx.y.KeyError: 1\nTraceback (most recent call last):\n  b\nExit\n",
            "Exit",
        ),
        ("Job has no output\n  - /logs/7_log.out\n -\n", "- /logs/7_log.out"),
        ("---\n - ", "no message"),
    ],
)
def test_a_failed_job_is_reported_by_its_exception(text, line):
    assert last_line(text) == line


def test_options_of_slurm_are_submitits():
    assert options_of(["timeout_min=60", "slurm_partition=cpu"]) == {"timeout_min": 60, "slurm_partition": "cpu"}
    with pytest.raises(ConfigError, match=r"--slurm.*timeout_min=60"):
        options_of(["60"])


def test_a_job_without_a_time_limit_gets_one_from_the_estimate():
    assert limited({}, lambda: 3600) == {"timeout_min": 190}  # 10 minutes, and three times an hour
    assert limited({"slurm_partition": "cpu"}, lambda: 0) == {"timeout_min": 10, "slurm_partition": "cpu"}
    for given in ({"timeout_min": 5}, {"slurm_time": 5}):
        assert limited(given, lambda: pytest.fail("estimated")) == given


class Job:
    """A job of submitit that ended so."""

    def __init__(self, error: str) -> None:
        self.job_id, self._error = "7", error

    def exception(self) -> Exception:
        return RuntimeError(self._error)


@pytest.mark.parametrize("error", ["Job not requeued because: timed-out and not checkpointable.", "state: TIMEOUT"])
def test_a_job_that_took_too_long_names_the_option_after_it_has_said_where_it_runs(error, tmp_path, monkeypatch):
    cluster = SimpleNamespace(cluster="local", map_array=lambda *given: [Job(error)])
    monkeypatch.setattr("moereplay.sweeps.clusters._executor", lambda *given: cluster)
    lines = run_shards(
        Shards(tmp_path / "e.toml", (), Folder(tmp_path), "reference", 3, 1, False, (), ()), {"timeout_min": 5}
    )
    assert "(no sbatch): the shards run here" in next(lines)  # before anything has ended
    with pytest.raises(ConfigError, match=r"a job may take 5 min: pass --slurm timeout_min=MINUTES"):
        next(lines)


def test_a_head_that_nobody_listens_at_is_refused_in_seconds(tmp_path):
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for address in (f"127.0.0.1:{port}", "127.0.0.1:99999", "127.0.0.1:head", f"ray://127.0.0.1:{port}"):
        began = time.monotonic()
        with pytest.raises(ConfigError, match="cannot reach a Ray cluster"):
            RayExecutor(address, 1, Folder(tmp_path), {})
        assert time.monotonic() - began < 30  # of which Ray's import takes the most


def test_a_users_setup_follows_ours(tmp_path, monkeypatch):
    submitit, given = pytest.importorskip("submitit"), {}
    monkeypatch.setattr(submitit.AutoExecutor, "update_parameters", lambda self, **options: given.update(options))
    shards = Shards(tmp_path / "e.toml", (), Folder(tmp_path), "reference", 3, 1, False, (), ())
    _executor(shards, {"cluster": "local", "slurm_setup": "module load python"})
    assert given["slurm_setup"][-1] == "module load python" and given["cpus_per_task"] == 3


def search(folder: Path, trials: int, sampler: str = "tpe", text: str = TUNED, *objectives: str) -> Search:
    file = experiment(folder, text, "tuned.toml")
    described = read(file)
    traces = open_traces(described.traces, folder, file)
    return Search(described, file, traces, objectives or ("tpot_ms", "capacity_gb"), trials, sampler, 3, "reference")


@pytest.mark.parametrize("sampler", ["tpe", "nsgaii", "random"])
def test_a_search_finds_what_nothing_beats_and_is_the_same_again(folder, tmp_path, sampler):
    pytest.importorskip("optuna")
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        found.append(tune(search(folder, 14, sampler), tmp_path / name, Here(Folder(tmp_path / name))))
    assert found[0] == found[1]
    pareto = [each.values for each in found[0]]
    assert pareto
    for one in pareto:
        assert not any(other != one and all(other[name] <= one[name] for name in one) for other in pareto), (
            "one of them is beaten"
        )
    assert all(each.settings["eviction"] != "fifo" for each in found[0])
    assert 0 < len(load(tmp_path / "a")) <= 14


def test_a_search_is_resumed_from_its_journal(folder, tmp_path):
    pytest.importorskip("optuna")
    counted = []
    for trials in (6, 10):
        tune(search(folder, trials), tmp_path, Here(Folder(tmp_path)), counted.append)
    assert (counted[0], sum(counted[:4])) == (0, 6)
    assert counted[4:] == [6, 2, 2]


def test_a_trial_fails_where_one_of_its_traces_lacks_an_objective(tmp_path):
    """Its mean over the other traces would be of another workload."""
    pytest.importorskip("optuna")
    store_trace(tmp_path / "prompts.zarr", decode_tokens=0)
    text = TUNED.replace('"tiny.zarr"', '"tiny.zarr", "prompts.zarr"')

    def found(objective: str) -> list:
        out = tmp_path / objective
        out.mkdir()
        return tune(search(tmp_path, 3, "random", text, objective), out, Here(Folder(out)))

    assert found("hit_rate")
    assert found("tpot_ms") == []


def test_a_grid_that_is_no_larger_than_the_search_is_better_enumerated(folder):
    with pytest.raises(ConfigError, match="the grid has 8 combinations, no more than 20 trials: enumerating"):
        check(search(folder, 20, "tpe", TUNED.replace('{ low = 10, high = 90, suffix = "%" }', '["20%"]')))


@pytest.mark.slow
def test_tune_prints_the_pareto_set(folder, tmp_path, capsys):
    pytest.importorskip("optuna")
    file = experiment(folder, TUNED, "tuned.toml")
    in_python(tune_verb)(file, str(tmp_path), objectives="tpot_ms,capacity_gb", trials=6, workers=2, as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows
    assert set(rows[0]) == {"tpot_ms", "capacity_gb", "capacity", "eviction", "prefetch"}
    assert [row["tpot_ms"] for row in rows] == sorted(row["tpot_ms"] for row in rows)


@pytest.mark.slow
def test_tune_says_what_knows_the_future(folder, tmp_path, capsys):
    pytest.importorskip("optuna")
    text = TUNED.partition("[[exclude]]")[0].replace('"lru", "fifo", "least_stale", "lfu"', '"belady"')
    file = experiment(folder, text, "foreseen.toml")
    in_python(tune_verb)(file, str(tmp_path), objectives="tpot_ms", trials=3, workers=2)
    assert "with knowledge of the future: 1 of these" in capsys.readouterr().out


def test_a_search_knows_its_words(folder):
    with pytest.raises(ConfigError, match=r"'tpot'.*tpot_ms"):
        check(search(folder, 5, "tpe", TUNED, "tpot"))
    with pytest.raises(ConfigError, match=r"'grid'.*tpe"):
        check(search(folder, 5, "grid"))
