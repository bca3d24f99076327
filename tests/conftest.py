"""Fixtures of both engines' tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from moereplay.simulator.compiled import engine as compiled
from moereplay.simulator.jit.marks import IS_PYTHON
from tests.kit import recordings
from tests.kit.every import forget_policies
from tests.kit.installed import installed  # noqa: F401  a fixture

# Commands that tests start read bytecode, whatever the environment says: without it an import takes longer than a test.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(tempfile.gettempdir()) / f"moereplay-bytecode-{os.getuid()}"))
if sys.dont_write_bytecode:  # nor does collecting compile every test anew
    sys.dont_write_bytecode, sys.pycache_prefix = False, os.environ["PYTHONPYCACHEPREFIX"]
# What the tests derive from their traces goes with them.
DERIVED = tempfile.TemporaryDirectory(prefix="moereplay-derived-")
os.environ["MOEREPLAY_DERIVED"] = DERIVED.name
# A remark is one line where no terminal says otherwise.
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")  # readline, which pytest imports, sets it behind Python's back
# A worker per core computes already: threads of torch would wait for each other, at ten times the processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C takes effect. The kernels are compiled side by side before there are workers, which would each do it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a script, and inherited so
    is_worker = hasattr(config, "workerinput")
    if getattr(config.option, "numprocesses", None) and not is_worker and not IS_PYTHON:
        with ProcessPoolExecutor(len(compiled.POINTERS)) as processes:
            list(processes.map(make, compiled.POINTERS))


#: Modules at the last freeze.
imported = [0]


def pytest_unconfigure() -> None:
    """Remove what was derived."""
    DERIVED.cleanup()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Recordings of other people need not be there. Objects of imports are left out of later garbage collections.

    Measured runs collect garbage before they begin, which takes a third of a second where torch is imported.
    """
    recordings.skip_without(item)
    if len(sys.modules) > imported[0] + 300:
        imported[0] = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the skipped checks at the end."""
    for line in recordings.summary(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(line)


def make(kernel: Callable) -> None:
    """Compile a kernel, unless that is on disk."""
    compiled.machine_code(kernel)


@pytest.fixture(autouse=True)
def catalogue_as_shipped() -> Iterator[None]:
    """The user's own policies of a test leave with it."""
    yield
    forget_policies()


#: A command that starts jobs on a cluster sets these for its process, which is that of the tests here.
WHERE_PYTHON_LOOKS = {name: os.environ.get(name) for name in ("PYTHONSAFEPATH", "PYTHONPATH")}


def pytest_runtest_teardown() -> None:
    """Each test begins with the paths that the first one had."""
    for name, value in WHERE_PYTHON_LOOKS.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
