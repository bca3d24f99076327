"""Policies of the user's own in experiments: every way of running a sweep takes them, its results need them no more."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moereplay import policies
from moereplay.commands.report import plot as plot_verb
from moereplay.commands.sweep import sweep_run as sweep_run_verb
from moereplay.commands.sweep_results import sweep_show as sweep_show_verb
from moereplay.policies import files
from moereplay.policies.contract import PolicyError
from moereplay.results.stored import load
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps import clusters
from moereplay.sweeps.clusters import _run
from moereplay.sweeps.experiment.file import read
from moereplay.sweeps.jobs import Batch, Computed, compute, open_traces, shard
from moereplay.sweeps.run import Sweep, execute, left_to_do, planned
from moereplay.sweeps.store import Folder
from moereplay.sweeps.tune import Search, tune
from tests.kit.command import in_python, moereplay_here
from tests.kit.every import every
from tests.kit.sweeping import experiment, merged
from tests.policies.test_own_policies import NEWEST
from tests.sweeps.test_clusters import Here

plot, sweep_run, sweep_show = map(in_python, (plot_verb, sweep_run_verb, sweep_show_verb))

EXPERIMENT = """
traces = ["tiny.zarr"]
policy_files = ["mine/newest.py"]
[grid]
capacity = ["40%", "60%"]
eviction = ["lru", "newest"]
"""
COMPARED = "eviction=newest"


def beginning(folder: Path, text: str = EXPERIMENT, policy: str = NEWEST) -> Path:
    """The experiment beside its trace and the policy's file."""
    (folder / "mine").mkdir(exist_ok=True)
    (folder / "mine" / "newest.py").write_text(policy)
    return experiment(folder, text)


def forget() -> None:
    """As a process that has taken no file."""
    for given in policies.REGISTERED.values():
        given.clear()


class Elsewhere(Here):
    """Every batch runs as in a process of its own: nothing is known there but what came with the batch."""

    def collect(self, seconds: float) -> list:
        known = {kind: dict(given) for kind, given in policies.REGISTERED.items()}
        self._waiting = [pickle.loads(pickle.dumps(batch)) for batch in self._waiting]
        forget()
        try:
            return super().collect(seconds)
        finally:
            for kind, given in known.items():
                policies.REGISTERED[kind] |= given


def run_elsewhere(sweep: Sweep, out: Path, part: tuple[int, int] = (1, 1)) -> dict:
    """Errors of a run on the reference engine."""
    jobs = left_to_do(sweep, Folder(out), shard(sweep.jobs, part))
    return execute(sweep, jobs, Folder(out), "reference", lambda place, about: Elsewhere(place)).errors


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with its results in `out`, by worker processes; the policy's file is gone since."""
    folder = tmp_path_factory.mktemp("policy-files")
    sweep_run(beginning(folder), str(folder / "out"), workers=1, engine="reference")
    forget()
    shutil.rmtree(folder / "mine")
    return folder


@pytest.fixture
def command() -> Callable[..., tuple[int, str]]:
    """Runs the command line in this process: exit code, and everything that it says."""

    def run(*arguments: object) -> tuple[int, str]:
        ended = moereplay_here(*arguments)
        return ended.returncode, ended.stdout + ended.stderr

    return run


# -- ways of running ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_worker_processes_take_the_files_of_an_experiment(whole: Path) -> None:
    rows = load(whole / "out")["config"].struct
    version = hashlib.sha256(NEWEST.encode()).hexdigest()[:12]
    assert sorted(rows.field("eviction")) == ["lru", "lru", f"newest@{version}", f"newest@{version}"]


def test_results_are_shown_drawn_and_merged_without_the_file(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not (whole / "mine").exists() and not policies.REGISTERED["eviction"]
    sweep_show(str(whole / "out"))
    assert sum(line.startswith("newest@") for line in capsys.readouterr().out.splitlines()) == 2
    plot(str(whole / "out"), out=tmp_path / "figures", figure="misses")
    assert (tmp_path / "figures" / "misses.png").exists()
    assert set(merged(tmp_path / "merged", whole / "out")) == {
        *("bounds.parquet", "configurations.parquet", "layers.parquet"),
        *("request_layers.parquet", "requests.parquet"),
    }


def test_shards_that_know_nothing_but_their_batches_give_the_same_rows(whole: Path, tmp_path: Path) -> None:
    sweep = planned(beginning(tmp_path))
    for index in (1, 2):
        assert run_elsewhere(sweep, tmp_path / "out", (index, 2)) == {}
    assert merged(tmp_path / "a", tmp_path / "out") == merged(tmp_path / "b", whole / "out")


def test_a_task_of_ray_takes_the_files_that_come_with_its_batch(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    sweep = planned(beginning(tmp_path))
    batch = Batch(0, tuple(sweep.jobs), "reference", False, tuple(files.registered()))
    forget()
    made: Computed = _run(batch, {})  # what a worker of the cluster calls
    assert [headline.error for headline in made.headlines] == [None] * len(sweep.jobs)


@pytest.mark.slow
def test_shards_on_nodes_run_the_version_that_was_submitted(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue may be hours long; in the meantime the file is edited."""
    file = beginning(tmp_path)
    planned(file)
    told = (
        file,
        (),
        Folder(tmp_path / "out"),
        "reference",
        1,
        1,
        False,
        tuple(files.registered()),
        ("moereplay", "sweep"),
    )
    shards = pickle.loads(pickle.dumps(clusters.Shards(*told)))
    forget()
    files._contents.clear()
    beginning(tmp_path, policy=NEWEST.replace("return -", "return "))
    about: list[dict] = []

    def here(workers: int, nogil: bool, out: Folder, provenance: dict) -> Elsewhere:
        about.append(provenance)
        return Elsewhere(out)

    monkeypatch.setattr(clusters, "LocalExecutor", here)
    assert clusters.run_shard(shards, 1) == "shard 1/1: 6 replays, 0 error rows"
    assert merged(tmp_path / "a", tmp_path / "out") == merged(tmp_path / "b", whole / "out")
    assert about[0]["command"] == ["moereplay", "sweep"]
    assert [each["source"] for each in about[0]["policy_files"]] == [NEWEST]


def test_a_sweep_is_resumed_and_another_version_is_other_work(whole: Path, tmp_path: Path) -> None:
    left = []
    for policy in (NEWEST, NEWEST + "# another version\n"):
        sweep = planned(beginning(tmp_path, policy=policy))
        left.append([job.config.eviction for job in left_to_do(sweep, Folder(whole / "out"), sweep.jobs)])
        forget()
    assert left == [[], ["newest", "newest"]]


def test_a_search_takes_them_and_another_version_is_another_search(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    text = EXPERIMENT.replace('["40%", "60%"]', '{ low = 30, high = 90, suffix = "%" }')
    counted: list[list[int]] = []
    for policy in (NEWEST, NEWEST, NEWEST + "# another version\n"):
        file = beginning(tmp_path, text, policy)
        described = read(file)
        traces = open_traces(described.traces, tmp_path, file)
        search = Search(described, file, traces, ("gb_moved", "capacity_gb"), 6, "random", 3, "reference")
        counted.append([])
        tune(search, tmp_path, Elsewhere(Folder(tmp_path)), counted[-1].append)
        forget()
    assert [sum(each) for each in counted] == [6, 6, 6]
    assert [each[0] for each in counted] == [0, 6, 0]  # trials that were done before
    evictions = set(load(tmp_path)["config"].struct.field("eviction"))
    assert sum(name.startswith("newest@") for name in evictions) == 2


# -- the option ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [("sweep", "run"), ("tune",)])
def test_sweep_run_and_tune_have_the_option(verb: tuple[str, ...], tmp_path: Path, command: Callable) -> None:
    file = beginning(tmp_path, EXPERIMENT.replace("policy_files", "# "))
    dry = ("--dry-run", "--engine", "reference", "--workers", 1) if "sweep" in verb else ()
    code, said = command(*verb, file, "--out", tmp_path / "out", *dry)
    assert (code, "unknown eviction policy 'newest'" in said) == (2, True)
    given = ("--policy-file", tmp_path / "mine" / "newest.py")
    code, said = command(*verb, file, "--out", tmp_path / "out", *dry, *given)
    done = (0, "replays      6 to run") if dry else (2, "the grid has 4 combinations, no more than 200 trials")
    assert (code, done[1] in said) == (done[0], True), said


def test_set_names_files_relative_to_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = beginning(tmp_path, EXPERIMENT.replace("policy_files", "# "))
    monkeypatch.chdir("/")
    assert len(planned(file, ['policy_files=["mine/newest.py"]']).jobs) == 6


# -- what is wrong ------------------------------------------------------------------------------------------


@every(
    "change, policy, said",
    [
        (("newest.py", "oldest.py"), NEWEST, "experiment.toml: policy_files: {}/mine/oldest.py: No such file or dir"),
        (("mine/newest.py", "mine"), NEWEST, "experiment.toml: policy_files: {}/mine: Is a directory; check the path"),
        (('"newest"', '"newset"'), NEWEST, "[grid] eviction: unknown eviction policy 'newset': did you mean newest?"),
        (("", ""), NEWEST.replace("y):", "y)"), "{}/mine/newest.py:6: SyntaxError: expected ':': def key("),
        (("", ""), NEWEST.replace('"newest"', '"lru"'), "newest.py:11: eviction policy 'lru' exists already"),
        (('["mine/newest.py"]', '"mine/newest.py"'), NEWEST, "policy_files: expected a list (got 'mine/newest.py')"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_before_anything_runs(
    change: tuple[str, str], policy: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, PolicyError)) as refused:
        planned(beginning(tmp_path, EXPERIMENT.replace(*change) if change[0] else EXPERIMENT, policy))
    assert said.format(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_hook_that_fails_in_a_worker_is_an_error_row_with_its_line(tmp_path: Path) -> None:
    sweep = planned(beginning(tmp_path, policy=NEWEST.replace("last_use", "last_us")))
    reasons = run_elsewhere(sweep, tmp_path / "out").values()
    assert len(reasons) == 2
    for reason in reasons:
        assert reason.startswith(
            f"{tmp_path}/mine/newest.py:8: unknown column 'last_us': did you mean last_use?: return -experts"
        )


def test_a_file_that_a_worker_cannot_run_is_an_error_row_not_the_end(tmp_path: Path) -> None:
    sweep = planned(beginning(tmp_path))
    batch = Batch(0, tuple(sweep.jobs), "reference", False, (("newest.py", b"import nowhere_to_be_found\n"),))
    forget()
    errors = [headline.error or "" for headline in compute(batch).headlines]
    assert all(error.startswith("newest.py:1: ModuleNotFoundError: ") for error in errors) and len(errors) == 6


def test_threads_of_a_worker_add_a_file_once() -> None:
    for _ in range(20):
        forget()
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: files.register_all([("newest.py", NEWEST.encode())]), range(16)))
        assert list(policies.REGISTERED["eviction"]) == ["newest"]


# -- provenance ------------------------------------------------------------------------------------------


def test_parts_hold_the_source_of_the_users_policies(whole: Path) -> None:
    for part in (whole / "out").glob("part-*"):
        (found,) = json.loads((part / "provenance.json").read_text())["policy_files"]
        assert found["source"] == NEWEST
        assert found["sha256"] == hashlib.sha256(NEWEST.encode()).hexdigest()
        assert found["path"].endswith("mine/newest.py")
