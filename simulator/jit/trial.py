"""Test whether the installed Numba has the private parts on which `internals` and `calls` depend.

The test program (`canary`) runs in a separate process, because a wrong assumption may abort the process. It runs once
for each state of this folder and each version, and its verdict is kept next to the machine code. If it fails, `plain`
is used. MOEREPLAY_JIT=plain selects that; MOEREPLAY_JIT=internals skips the test.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from moereplay.simulator.jit.machine_code import versions
from moereplay.traces.files import private_folder

LOG = logging.getLogger(__name__)
SECONDS = 120  #: time limit on a busy machine
PASSED = "passed"
RUN = "from moereplay.simulator.jit.canary import main; main()"


@cache
def is_sound() -> bool:
    """Return whether the compiled engine may use Numba's private parts."""
    asked = os.environ.get("MOEREPLAY_JIT", "")
    if asked in ("plain", "internals"):
        return asked == "internals"
    path = private_folder(f"canary-{_state()}") / "verdict"
    try:
        verdict = path.read_text(encoding="utf-8")
    except OSError:
        verdict = _tried()
        path.write_text(verdict, encoding="utf-8")
    if verdict != PASSED:
        LOG.warning(
            "private parts of this version of Numba differ (%s): every process compiles again; results are the same",
            verdict.strip().splitlines()[-1] if verdict.strip() else "the test program failed without a message",
        )
    return verdict == PASSED


def _state() -> str:
    hasher = sha256("\0".join(versions()).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        hasher.update(path.read_bytes())
    return hasher.hexdigest()[:20]


def _tried() -> str:
    """Run the test program in a separate process; return `passed` or its error."""
    with started(RUN) as child:
        try:
            out, errors = child.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            return f"the test program took more than {SECONDS} s"
    if child.returncode == 0 and out.strip() == PASSED:
        return PASSED
    return errors or out or f"the test program exited with {child.returncode}"


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program in another Python process that compiles: with this one's packages, through private parts."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "NUMBA_DISABLE_JIT": "0"}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, env=environment | {"MOEREPLAY_JIT": "internals"}, text=True, **pipes)
