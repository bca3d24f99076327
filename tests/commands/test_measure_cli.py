"""`moereplay measure`: its document, its folder, its errors of one line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

import pytest

from tests.kit.command import moereplay_here as moereplay
from tests.kit.offloading import trace_of
from tests.kit.stored import written

SMALL = ("--tokens", 4, "--calibration-tokens", 2, "--capacity", "50%", "--slow-tier", "pinned")


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    """Twelve tokens of tiny experts."""
    return written(tmp_path_factory.mktemp("trace") / "tiny.zarr", trace_of(12, 0))


@pytest.mark.long
def test_the_document_has_runs_beside_their_replays(trace):
    ended = moereplay("measure", trace, *SMALL, "--prefetch", "none,top_k", "--throttle", "2MB/s,none", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found.keys() == {"device", "platform", "runs", "summary"}
    assert len(found["runs"]) == 2 * 2 * 2
    run = found["runs"][0]
    assert run["measured"].keys() == run["simulated"].keys() == run["closure"].keys()
    parts = {"dense_ms", "expert_ms", "stall_ms"}
    assert {"ttft_ms", "tpot_ms", *parts, "bytes_per_token", "hits", "late", "misses"} == run["measured"].keys()
    for side in ("measured", "closure"):
        assert sum(run[side][name] for name in parts) == pytest.approx(fmean(run["per_token"][f"{side}_ms"]), rel=1e-3)
    assert run["agreement"].keys() == {"accesses", "same", "first_divergence"}
    assert [len(each) for each in run["per_token"].values()] == [4, 4, 4]
    assert "platform" not in run["config"] and run["slow_tier"] == "memory"
    for kind in ("throttled", "raw"):
        of = found["summary"][kind]
        assert of.keys() == {"runs", "bias", "mape", "worst", "r", "repeat_spread"} and of["runs"] == 4
    assert found["summary"]["closure"].keys() == {"mape", "worst"}
    slow = [run for run in found["runs"] if run["throttle_bytes_per_s"] and run["config"]["prefetch"] == "none"]
    assert slow and all(abs(run["closure"]["tpot_ms"] / run["measured"]["tpot_ms"] - 1) < 0.2 for run in slow)
    assert {run["config"]["prefetch"]: run["decisions"] for run in found["runs"]} == {
        "none": "compiled",
        "top_k": "compiled",
    }
    assert found["summary"]["gate_ms"].keys() == {"compiled"}
    assert found["summary"]["repeat_spread"] > 0
    quiet = [each for each in found["runs"] if each["config"]["prefetch"] == "none"]
    assert all(each["agreement"]["same"] == each["agreement"]["accesses"] for each in quiet)


@pytest.mark.slow
def test_a_folder_has_document_platforms_and_figure(trace, tmp_path):
    out = tmp_path / "measured"
    ended = moereplay("measure", trace, *SMALL, "--slow-tier", f"disk:{tmp_path}:buffered", "--out", out)
    assert ended.returncode == 0, ended.stderr
    names = {path.name for path in out.iterdir()}
    assert names == {"measured.json", "measured.png", "measured.svg", "platform-0-0.toml", "platform-1-0.toml"}
    assert "raw: 2 runs, TPOT of the replay: bias" in ended.stdout and "closure, measured durations" in ended.stdout
    assert "error: simulated / measured - 1" in ended.stdout and "alike: accesses" in ended.stdout
    assert max(map(len, ended.stdout.splitlines())) <= 80
    label = json.loads((out / "measured.json").read_text())["runs"][0]["slow_tier"]
    assert label == "disk, buffered: the page cache answers too"
    again = moereplay("plot", out, "--out", tmp_path / "again")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again" / "measured.png").read_bytes() == (out / "measured.png").read_bytes()
    shown = moereplay("replay", trace, "--platform", out / "platform-0-0.toml", "--capacity", "50%").stdout
    assert "calibrated" in shown
    (out / "measured.json").write_text('{"runs": [{}]}')
    broken = moereplay("plot", out)
    assert broken.returncode == 2 and "invalid measurement" in broken.stderr


@pytest.mark.long
def test_a_killed_measurement_keeps_the_repeats_that_were_complete(trace, tmp_path):
    """kill -9 while the second repeat runs: the document of the first is whole, and the experts' file can be used."""
    out, words = tmp_path / "out", ["measure", trace, *SMALL, "--throttle", "1MB/s", "--repeat", "60"]
    disk = ("--slow-tier", f"disk:{tmp_path}:buffered")
    command = [sys.executable, "-m", "moereplay", *map(str, words), *disk, "--out", str(out)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not (out / "measured.json").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
    runs = json.loads((out / "measured.json").read_text())["runs"]
    assert 1 <= len(runs) < 60 and [run["repeat"] for run in runs] == list(range(len(runs)))
    assert moereplay("plot", out).returncode == 0
    again = moereplay("measure", trace, *SMALL, *disk, "--repeat", 1, "--out", out)
    assert again.returncode == 0, again.stderr
