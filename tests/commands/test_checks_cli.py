"""`--every N` of `sweep run` and `tune`: what is checked, refused and shown. No test asserts how close times are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moereplay.simulator.calibration import Calibration
from moereplay.simulator.platform import Link, Measured, Platform
from moereplay.simulator.platforms import as_toml
from moereplay.tracegen.offload.memory import described
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded
from tests.kit.every import every
from tests.kit.offloading import trace_of
from tests.kit.stored import written
from tests.kit.sweeping import ROOT, merged

EXPERIMENT = """
traces = ["tiny.zarr"]
[base]
platform = "{platform}"
[grid]
miss = ["substitute", "fetch"]
eviction = ["lru", "lfu"]
capacity = ["40%", "60%"]
"""
HERE = {"device": described("cpu"), "slow_tier": "pinned"}
CHECK = ("--every", 3, "--slow-tier", "pinned", "--check-tokens", 4)
LIVE = """
traces = ["mini.zarr"]
[base]
capacity = "25%"
[grid]
eviction = ["belady", "lru"]
"""


def platform(path: Path, **calibration: object) -> Path:
    """This machine's, as far as its file says."""
    compute = Measured(dense_ns=50_000, expert_ns=50_000, expert_ns_per_token=1_000)
    about = Calibration.model_validate(HERE | calibration)
    machine = Platform(name="here", links=(Link(bytes_per_s=1e9),), compute=compute, calibration=about)
    path.write_text(as_toml(machine))
    return path


def experiment(folder: Path, **calibration: object) -> Path:
    """Eight configurations, all of which can be measured."""
    if not (folder / "tiny.zarr").exists():
        written(folder / "tiny.zarr", trace_of(12, 0))
    file = folder / "experiment.toml"
    file.write_text(EXPERIMENT.format(platform=platform(folder / "here.toml", **calibration)))
    return file


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    """A sweep of eight configurations, three of them checked."""
    folder = tmp_path_factory.mktemp("sweep")
    ended = moereplay("sweep", "run", experiment(folder), "--out", folder / "out", "--workers", 1, *CHECK)
    assert ended.returncode == 0, ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("checked: "))
    assert line.startswith(f"checked: 3 of 8 configurations measured on {described('cpu')} (pinned; 4 tokens of 2 ")
    assert re.search(r"replayed TPOT [+-][\d.]+% \(mean\), mean \|error\| [\d.]+%, worst", line)
    return folder


def checks(out: Path) -> dict[str, dict]:
    return {path.name: json.loads(path.read_text()) for path in sorted((out / "checks").iterdir())}


@pytest.mark.slow
def test_the_same_configurations_are_checked_each_time_and_none_twice(sweep, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in (sweep / "out" / "checks").iterdir()}
    again = moereplay("sweep", "run", sweep / "experiment.toml", "--out", sweep / "out", "--workers", 1, *CHECK)
    assert again.returncode == 0 and "checked: 3 of 8" in again.stderr and "experts: " not in again.stderr
    assert {path: path.stat().st_mtime_ns for path in (sweep / "out" / "checks").iterdir()} == before
    other = moereplay("sweep", "run", sweep / "experiment.toml", "--out", tmp_path / "out", "--workers", 1, *CHECK)
    assert other.returncode == 0 and checks(tmp_path / "out").keys() == checks(sweep / "out").keys()


@pytest.mark.slow
def test_a_sweep_without_checks_has_the_same_parts_and_no_figure_of_checks(sweep, tmp_path):
    plain = moereplay("sweep", "run", sweep / "experiment.toml", "--out", tmp_path / "out", "--workers", 1)
    assert plain.returncode == 0 and not (tmp_path / "out" / "checks").exists()
    assert merged(tmp_path / "a", sweep / "out") == merged(tmp_path / "b", tmp_path / "out")
    refused = moereplay("plot", tmp_path / "out", "--figure", "checks")
    assert refused.returncode == 2 and "none of these configurations was checked" in refused.stderr
    assert "checked" not in moereplay("sweep", "show", tmp_path / "out").stdout


def test_a_check_has_both_sides_of_the_same_tokens(sweep):
    for check in checks(sweep / "out").values():
        part = {"throttle_bytes_per_s": None, "layers": 2, "requests": 1, "prompt": 0, "tokens": 4}
        assert check["how"] == HERE | part | {"way": "measured", "model": ""}
        assert check["checked"].keys() == check["replayed"].keys()
        assert check["checked"]["hit_rate"] == check["replayed"]["hit_rate"]  # lru and lfu without prefetch
        assert check["checked"]["bytes_per_token"] == check["replayed"]["bytes_per_token"]


def test_show_prints_the_error_and_columns_where_something_was_checked(sweep):
    shown = moereplay("sweep", "show", sweep / "out").stdout
    assert "checked: 3 of 8 configurations measured on" in unfolded(shown) and "checked  error" in shown
    rows = [json.loads(line) for line in moereplay("sweep", "show", sweep / "out", "--json").stdout.splitlines()]
    assert [row["check"] for row in rows].count("measured") == 3 and len(rows) == 8
    assert all((row["check"] is None) == (row["check_tpot_ms"] is None) == (row["check_error"] is None) for row in rows)
    header = moereplay("sweep", "show", sweep / "out", "--csv").stdout.splitlines()[0]
    assert header.endswith("check,check_tpot_ms,check_replay_tpot_ms,check_error,check_hit_rate_error")
    grouped = moereplay("sweep", "show", sweep / "out", "--group-by", "eviction")
    assert "checked: 3 of 8" in grouped.stdout and "checked  error" not in grouped.stdout
    some = moereplay("sweep", "show", sweep / "out", "--where", "eviction=lru").stdout
    assert re.search(r"checked: \d of 4 configurations", some)


@pytest.mark.slow
def test_plot_draws_the_checks(sweep, tmp_path):
    drawn = moereplay("plot", sweep / "out", "--out", tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    assert {"checks.png", "checks.svg", "tpot_by_capacity.png", "hit_rate_by_capacity.png"} <= {
        path.name for path in tmp_path.iterdir()
    }
    svg = (tmp_path / "tpot_by_capacity.svg").read_text()
    assert svg.count("<!-- checked -->") == 1 and "Ringed: 3" in svg
    assert "left out: ttft_by_capacity: no TTFT: no request has a prompt" in drawn.stderr
    alone = moereplay("plot", sweep / "out", "--out", tmp_path / "one", "--figure", "checks")
    assert alone.returncode == 0 and len(list((tmp_path / "one").iterdir())) == 3


@pytest.mark.slow
def test_a_shard_checks_its_own_share(sweep, tmp_path):
    for part in ("1/2", "2/2"):
        words = ("--out", tmp_path / "out", "--workers", 1, "--shard", part, *CHECK[2:], "--every", 2)
        ended = moereplay("sweep", "run", sweep / "experiment.toml", *words)
        assert ended.returncode == 0, ended.stderr
    assert len(checks(tmp_path / "out")) >= 4


# ---------------------------------------------------------------- what is refused, before anything runs


WRONG = {
    ("--check-tokens", 4): "--check-tokens requires --every N",
    (*CHECK, "--throttle", "1MB/s,none"): "invalid --throttle '1MB/s,none'",
    (*CHECK, "--check-tokens", 400): "a check runs 400 tokens, and the first request of ",
    ("--every", 2, "--slow-tier", "disk:x"): "was calibrated with slow tier pinned, and checks would use disk",
    (*CHECK, "--throttle", "1MB/s"): "was calibrated with throttle none, and checks would have 1MB/s",
    (*CHECK, "--set", "base.platform='a100-5gbps'"): "platform a100-5gbps has no [calibration]",
    (*CHECK, "--set", 'grid."platform.link.bytes_per_s"=[1e9]'): "link.bytes_per_s=1000000000 has no [calibration]",
    ("--every", 2, "--live", "miniature"): "has no token ids",
}


@every("words, said", WRONG.items(), apart=True)
def test_what_is_wrong_is_said_before_anything_runs(sweep, tmp_path, words, said):
    ended = moereplay("sweep", "run", sweep / "experiment.toml", "--out", tmp_path / "out", *words)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr
    assert said in ended.stderr and not (tmp_path / "out").exists()


def test_checks_in_a_bucket_are_refused(sweep):
    ended = moereplay("sweep", "run", sweep / "experiment.toml", "--out", "file:///nowhere/at/all", *CHECK)
    assert ended.returncode == 2 and "--every requires a folder, not --out file://" in ended.stderr


def test_another_machines_calibration_is_refused_with_the_command_that_makes_this_ones(tmp_path):
    file = experiment(tmp_path, device="an abacus, 7 rows")
    ended = moereplay("sweep", "run", file, "--out", tmp_path / "out", *CHECK, "--layers", 2)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert f"was calibrated on 'an abacus, 7 rows', and this machine is {described('cpu')!r}" in ended.stderr
    command = "moereplay calibrate machine --slow-tier pinned --device cpu --model MODEL --layers 2 --out here.toml"
    assert command in ended.stderr and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_throttled_platform_is_checked_with_its_throttle(tmp_path):
    file = experiment(tmp_path, throttle_bytes_per_s=2e6)
    words = ("--every", 8, *CHECK[2:], "--out", tmp_path / "out", "--workers", 1)
    assert "throttle 2MB/s, and checks would have none" in moereplay("sweep", "run", file, *words).stderr
    ended = moereplay("sweep", "run", file, *words, "--throttle", "2MB/s")
    assert ended.returncode == 0 and "(pinned, throttled to 2 MB/s; 4 tokens" in ended.stderr, ended.stderr


# ---------------------------------------------------------------- skipped, live, interrupted, searched


@pytest.mark.slow
def test_configurations_that_no_real_run_has_are_skipped_by_name(tmp_path):
    file = experiment(tmp_path)
    some = ("--set", 'grid.miss=["lowest_bit:bits=8/3", "fetch"]', "--workers", 1)
    ended = moereplay("sweep", "run", file, "--out", tmp_path / "out", *CHECK, *some)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"not checked: .*lowest_bit.*: measure .* 2, 4 or 8 bits.*these have 3 bits", ended.stderr)
    assert all(check["config"]["miss"] == "fetch" for check in checks(tmp_path / "out").values())


@pytest.mark.slow
def test_live_checks_skip_what_reads_the_future(tmp_path):
    # Recorded here: the bundled recording's near ties fall otherwise in the arithmetic of another processor.
    text = ("--text", ROOT / "tracegen" / "miniature" / "heldout.txt", "--window", 16, "--limit", 1)
    recorded = moereplay("record", "miniature", *text, "--prompt-tokens", 8, "--out", tmp_path / "mini.zarr")
    assert recorded.returncode == 0, recorded.stderr
    file = tmp_path / "live.toml"
    file.write_text(LIVE)
    words = ("--out", tmp_path / "out", "--workers", 1, "--every", 1, "--live", "miniature", "--device", "cpu")
    ended = moereplay("sweep", "run", file, *words)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"not checked: .*eviction=belady\): eviction belady needs the future", ended.stderr)
    assert "checked: 1 of 2 configurations run live, miniature on" in ended.stderr
    (check,) = checks(tmp_path / "out").values()
    assert check["config"]["eviction"] == "lru" and check["checked"]["hit_rate"] == check["replayed"]["hit_rate"]
    assert "run live" in moereplay("sweep", "show", tmp_path / "out").stdout


@pytest.mark.long
def test_a_killed_run_keeps_the_checks_that_were_complete(tmp_path):
    """kill -9 while a check runs; the same command makes only those that are missing."""
    file, out = experiment(tmp_path), tmp_path / "out"
    slow = ("--every", 1, "--slow-tier", "pinned", "--check-tokens", 12)
    command = ["sweep", "run", file, "--out", out, "--workers", 1, *slow]
    with subprocess.Popen(
        [sys.executable, "-m", "moereplay", *map(str, command)], stderr=subprocess.DEVNULL, cwd=tmp_path
    ) as process:
        deadline = time.monotonic() + 120
        while not list(out.glob("checks/*.json")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
    before = checks_whole(out)
    ended = moereplay(*command)
    assert ended.returncode == 0 and "checked: 8 of 8" in ended.stderr, ended.stderr
    assert before.items() <= checks(out).items() and len(checks(out)) == 8


def checks_whole(out: Path) -> dict[str, dict]:
    """Without what the killed process was writing."""
    return {path.name: json.loads(path.read_text()) for path in (out / "checks").glob("*.json")}


@pytest.mark.long
def test_a_search_checks_its_pareto_set_and_some_others(tmp_path):
    pytest.importorskip("optuna")
    file = experiment(tmp_path)
    space = ("--set", 'grid.capacity={low = 40, high = 80, suffix = "%"}', "--set", 'grid.miss=["fetch"]')
    words = ("--objectives", "hit_rate,capacity_gb", "--trials", 6, "--workers", 1, *space, *CHECK)
    ended = moereplay("tune", file, "--out", tmp_path / "out", *words, "--json")
    assert ended.returncode == 0, ended.stderr
    front = {row["capacity"] for row in map(json.loads, ended.stdout.splitlines())}
    found = checks(tmp_path / "out").values()
    assert front <= {check["config"]["capacity"] for check in found}
    assert re.search(r"checked: \d of \d configurations measured", ended.stderr)
    refused = moereplay("tune", file, "--out", tmp_path / "two", *words, "--set", "base.platform='phone-ufs4'")
    assert refused.returncode == 2 and "platform phone-ufs4 has no [calibration]" in refused.stderr
