"""The command line in the process of the test: the same answers without a second of imports each."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from inspect import Parameter, signature
from io import StringIO
from pathlib import Path
from subprocess import CompletedProcess, run
from typing import Any

import pytest
import typer

from moereplay.command import application, main
from moereplay.commands import terminal

ROOT = Path(__file__).resolve().parents[2]


@cache
def command_line() -> Any:
    """The parser of all verbs: to make it takes longer than most commands, and it is the same each time."""
    return typer.main.get_command(application())


def moereplay_here(*arguments: object, cwd: Path | None = None) -> CompletedProcess[str]:
    """Run the command in a folder. What it does not expect is raised."""
    words, out, said, code = ["moereplay", *map(str, arguments)], StringIO(), StringIO(), 0
    parser = command_line()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(said):
        patch.setattr(typer.main, "get_command", lambda made: parser)
        patch.setattr(sys, "argv", words)
        patch.setattr(sys, "excepthook", sys.excepthook)  # it is set, and put back at the end
        patch.setattr(terminal, "end_at_once", sys.exit)  # a library's thread may still be ending
        patch.setattr(terminal, "end", sys.exit)
        patch.setenv("NO_COLOR", "1")
        patch.chdir(cwd or Path.cwd())
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return CompletedProcess(words, code, out.getvalue(), said.getvalue())


def moereplay_alone(*arguments: object, cwd: Path | None = None) -> CompletedProcess[str]:
    """Run the command as its own process, as a user does."""
    command = [sys.executable, "-W", "error", "-m", "moereplay", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    return run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=240, check=False)


def unfolded(text: str) -> str:
    """Return the output with folded lines joined."""
    return re.sub(r"\n +(?=\S)", " ", text)


def in_python(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb as a function of its options, with the command line's defaults; what it raises is raised."""
    options = [each for name, each in signature(verb).parameters.items() if name != "context"]
    defaults = {each.name: each.default for each in options if each.default is not Parameter.empty}

    def called(*given: Any, **named: Any) -> None:
        by_place = dict(zip((each.name for each in options), given, strict=False))
        verb(None, **defaults | by_place | named)

    return called
