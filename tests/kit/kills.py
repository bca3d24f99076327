"""Kill -9 at a chosen step: work in a forked process that ends before its n-th change to the files of a folder."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGES = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


def killed_at(step: int, folder: Path, work: Callable[[], object]) -> bool:
    """Do the work in a child; return whether it was killed before it had made so many changes below the folder.

    A file that was being opened to be written anew is left with one byte. What the work raises fails the test.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: threads do not survive a fork
        child = os.fork()
    if not child:
        _run(step, str(folder), work)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), "the work failed by itself"
    return status != 0


def _run(step: int, folder: str, work: Callable[[], object]) -> None:
    def count(event: str, about: tuple[Any, ...]) -> None:
        nonlocal step
        opens = event == "open" and about[2] & (os.O_WRONLY | os.O_RDWR)
        if not (opens or event in CHANGES) or not str(about[0]).startswith(folder):
            return
        step -= 1
        if step == -1:  # once: what is written here is counted too
            if opens and about[2] & (os.O_TRUNC | os.O_EXCL):
                os.write(os.open(about[0], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), b"{")
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(count)
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
