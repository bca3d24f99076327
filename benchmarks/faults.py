"""Plants one-line faults (faults.toml) in a copy of the tree, one by one, and says which the named tests find.

Tests run in plain Python: a fault in the compiled engine would otherwise be compiled for half a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_suffix(".toml")
PASSED, FAILED = 0, 1  #: pytest's exit codes


class Fault(NamedTuple):
    """A line that is wrong, and the test files that should fail for it."""

    room: str
    what: str
    file: str
    old: str
    new: str
    tests: list[str]

    def planted(self, text: str) -> str:
        """Return a file's text with the fault. Raises ValueError unless the old text stands in it once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times {self.old!r}: expected once")
        return text.replace(self.old, self.new)


def faults() -> list[Fault]:
    """Return the faults of the list."""
    return [Fault(**each) for each in tomllib.loads(FAULTS.read_text())["faults"]]


def copied(tree: Path, into: Path) -> None:
    """Copy the files that git tracks, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(tree / name):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / name, into / name, follow_symlinks=False)  # folders are linked into the package


def tested(copy: Path, *arguments: str, seconds: int | None = None, share: float = 1) -> int:
    """Return pytest's exit code in a copy; that of SIGXCPU if it takes more CPU time than so many seconds.

    `share` of the cases of each search are tried.
    """
    settings = {
        "PYTHONPATH": str(copy),
        "NUMBA_DISABLE_JIT": "1",
        "OMP_NUM_THREADS": "1",
        "MOEREPLAY_SHARE": f"{share}",
    }
    settings |= {"XDG_CACHE_HOME": str(copy / ".cache")}
    command = [sys.executable, "-m", "pytest", "-m", "not long and not longest", *arguments]
    limit = seconds and partial(resource.setrlimit, resource.RLIMIT_CPU, (seconds, seconds + 5))
    options = {"cwd": copy, "env": os.environ | settings, "preexec_fn": limit or None}
    return subprocess.run(command, capture_output=True, check=False, **options).returncode


def verdict(copy: Path, fault: Fault) -> str:
    """Plant a fault in a copy and test that; what fails must pass when the fault is out again."""
    path, failed = copy / fault.file, copy / ".pytest_cache/v/cache/lastfailed"
    right = path.read_text()
    try:
        wrong = fault.planted(right)
    except ValueError as absent:
        return f"not planted: {absent}"
    failed.unlink(missing_ok=True)
    path.write_text(wrong)
    code = tested(copy, "-x", *(name for name in fault.tests if (copy / name).exists()))
    path.write_text(right)
    if code != FAILED:
        return "NOT FOUND" if code == PASSED else f"not tested: pytest ended with {code}"
    (test,) = json.loads(failed.read_text())
    if tested(copy, "--lf", "--lfnf=none", test.partition("::")[0]) != PASSED:
        return f"not tested: without the fault {test} fails as well"
    return f"found by {test}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line per fault; exit with 1 unless all are found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout whose code and tests are used")
    parser.add_argument("--only", default="", help="only faults whose room, file or words contain this text")
    asked = parser.parse_args(arguments)
    chosen = [each for each in faults() if asked.only in f"{each.room} {each.file} {each.what}"]
    with TemporaryDirectory() as folder:
        copy = Path(folder)
        copied(asked.tree, copy)
        found = 0
        for each in chosen:
            said = verdict(copy, each)
            found += said.startswith("found")
            print(f"{each.room}: {each.what}: {said}", flush=True)
    print(f"{found} of {len(chosen)} faults found")
    sys.exit(found < len(chosen))


if __name__ == "__main__":
    main()
