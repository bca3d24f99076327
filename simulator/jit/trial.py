"""Whether the installed Numba has below its public names what `internals` and `calls` take for granted.

A small program (`canary`) goes through all of it, in a process of its own, as a wrong assumption may end the process.
It runs once for each state of this folder and each version; its verdict is kept beside the machine code. Where it
fails, `plain` is used. MOEREPLAY_JIT=plain asks for that, =internals for the other without a trial.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path

from moereplay.simulator.jit.machine_code import versions
from moereplay.traces.files import private_folder

LOG = logging.getLogger(__name__)
SECONDS = 120  #: that the trial may take on a busy machine
PASSED = "passed"
RUN = "from moereplay.simulator.jit.canary import main; main()"


@cache
def is_sound() -> bool:
    """Whether the compiled engine may go below Numba's public names."""
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
            "this version of Numba differs inside (%s): replays compile anew in every process, with the same results",
            verdict.strip().splitlines()[-1] if verdict.strip() else "the trial ended without a word",
        )
    return verdict == PASSED


def _state() -> str:
    hasher = sha256("\0".join(versions()).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        hasher.update(path.read_bytes())
    return hasher.hexdigest()[:20]


def _tried() -> str:
    """Run the trial in a process of its own: `passed`, or what went wrong."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "NUMBA_DISABLE_JIT": "0"}
    command = [sys.executable, "-c", RUN]
    try:
        ended = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"the trial took more than {SECONDS} s"
    if ended.returncode == 0 and ended.stdout.strip() == PASSED:
        return PASSED
    return ended.stderr or ended.stdout or f"the trial ended with {ended.returncode}"
