"""Nothing that only Unix has is needed to import, replay and sweep; tried here by taking it away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moereplay.sweeps import store as folder
from moereplay.traces import files
from tests.kit.sweeping import ROOT, experiment, store_trace

#: What Windows lacks, and what macOS lacks.
MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
NAMES = {
    "os": ("fchmod", "fork", "geteuid", "getuid", "killpg", "sched_getaffinity", "umask"),
    "signal": ("pthread_sigmask",),  # but SIGKILL, which Python itself ends processes with here
}
IMPORT_ALL_AND_REPLAY = f"""
import importlib, os, signal, sys
from pathlib import Path
import multiprocessing.popen_spawn_posix, subprocess
for name in {MODULES}: sys.modules[name] = None
for name in {NAMES["os"]}: delattr(os, name)
for name in {NAMES["signal"]}: delattr(signal, name)

if __name__ == "__main__":
    for package in ("", "analysis", "commands", "policies", "results", "simulator", "traces"):
        for path in sorted(Path({str(ROOT)!r}, "moereplay", package).rglob("*.py")):
            importlib.import_module(".".join(path.relative_to({str(ROOT)!r}).with_suffix("").parts).removesuffix(".__init__"))
    from moereplay.command import main
    sys.argv = ["moereplay", *sys.argv[1:]]
    main()
"""


def without_unix(tmp_path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command on such a machine. Its workers import the same file first."""
    (tmp_path / "windows.py").write_text(IMPORT_ALL_AND_REPLAY)
    command = [sys.executable, str(tmp_path / "windows.py"), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)


@pytest.mark.parametrize("engine", ["compiled", "reference"])
def test_everything_is_imported_and_a_grid_is_replayed(engine, tmp_path):
    trace, arguments = store_trace(tmp_path / "tiny.zarr"), ("--capacity", "40%,60%", "--workers", 2)
    ran = without_unix(tmp_path, "replay", trace, *arguments, "--engine", engine, "--out", tmp_path / "out")
    assert ran.returncode == 0, ran.stderr
    assert len(list((tmp_path / "out").glob("part-*"))) == 2


@pytest.mark.long
def test_a_sweep_is_run(tmp_path):
    arguments = ("--workers", 2, "--engine", "reference", "--out", tmp_path / "out")
    ran = without_unix(tmp_path, "sweep", "run", experiment(tmp_path), *arguments)
    assert ran.returncode == 0, ran.stderr
    assert list((tmp_path / "out").glob("part-*"))


def test_on_windows_no_folder_is_opened_and_no_process_is_asked_for(tmp_path, monkeypatch):
    """There the one is refused, and the other ends the process."""

    def refused(*given: object) -> None:
        raise PermissionError

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "open", refused)
    monkeypatch.setattr(os, "kill", refused)
    folder.Folder(tmp_path).keep("part-a", {"a": b"a"})
    assert (tmp_path / "part-a" / "a").read_bytes() == b"a"
    assert not files.is_abandoned(files.scratch_name())
