"""Commands that pages show: found in their Markdown, run in the test's process, or parsed by the real command line."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from moereplay.command import application
from tests.kit.command import moereplay_here
from tests.kit.recordings import ROOT

PAGES = (
    *("README.md", "CONTRIBUTING.md"),
    *sorted(str(page.relative_to(ROOT)) for rooms in ("docs/**/*.md", "contrib/*/*.md") for page in ROOT.glob(rooms)),
)
#: What an indented line begins with if it is a command and not a part of a file.
PROGRAMS = ("moereplay ", "make ", "python", "pip ", ".venv/bin/")
FENCE = re.compile(r"\s*```([\w{}-]*)$")
NOT_SHARED = ("runs", ".venv", ".git")


class Command(NamedTuple):
    """As it is typed; `words` are those of `moereplay`, empty of another program."""

    text: str
    words: Sequence[str] = ()
    into: str | None = None  #: the file that takes what it prints


class Shown(NamedTuple):
    """The output that a page shows after commands, without its `...`."""

    lines: list[str]


def items(page: str) -> list[Command | Shown]:
    """The commands of a page, and what it shows of their output, in order."""
    return [each for kind, lines in blocks((ROOT / page).read_text("utf-8")) for each in READERS[kind](lines)]


def blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Fenced blocks that hold commands or output, and lines that are indented as code, each with its kind."""
    kind, lines = "", []
    for line in text.splitlines():
        fence = FENCE.match(line)
        if fence and kind:
            yield kind, lines
        if fence:
            kind, lines = ("" if kind else fence[1] or "plain"), []
        elif kind:
            lines.append(line)
        elif line.startswith("    ") and line.strip().startswith(PROGRAMS):
            yield "sh", [line.strip()]


def _typed(lines: list[str]) -> list[Command | Shown]:
    """Split a ```sh block into commands; lines continued by a backslash and here-documents are one command."""
    found, taken = [], iter(lines)
    for line in taken:
        text = line
        while text.endswith("\\"):
            text = text[:-1] + next(taken).strip()
        here = re.search(r"<<'(\w+)'$", text)
        while here and not text.endswith(f"\n{here[1]}"):
            text += "\n" + next(taken)
        found += [_command(text)] if text.strip() and not text.startswith(("#", "--")) else []
    return found


def _command(text: str) -> Command:
    if not text.startswith("moereplay "):
        return Command(text)
    words = shlex.split(text, comments=True)
    into = words.index(">") if ">" in words else len(words)
    return Command(shlex.join(words).replace("'>'", ">"), words[:into], "".join(words[into + 1 :]) or None)


def _session(lines: list[str]) -> list[Command | Shown]:
    """Split a ```console block into commands after a `$` and their output."""
    typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [*_typed(typed), *_printed([line for line in lines if not line.startswith("$ ")])]


def _printed(lines: list[str]) -> list[Command | Shown]:
    return [Shown([line for line in map(plain, lines) if line not in ("", "...")])]


#: By the word after the fence; other blocks are files, code and tables.
READERS: dict[str, Callable[[list[str]], list[Command | Shown]]] = {
    **dict.fromkeys(("plain", "python", "toml", "yaml", "{eval-rst}", "sql", "json", "bibtex"), lambda lines: []),
    "sh": _typed,
    "console": _session,
    "text": _printed,
}


def plain(line: str) -> str:
    """With single spaces: columns are as wide as the longest name. Rules are left out."""
    return " ".join(line.replace("─", "").split())


def home(folder: Path) -> Path:
    """A folder that looks like the repository's, where what commands write is the test's own."""
    folder.mkdir()
    for each in ROOT.iterdir():
        if each.name not in NOT_SHARED and not each.name.startswith("."):
            (folder / each.name).symlink_to(each)
    return folder


def parse(command: Command, cwd: Path) -> None:
    """Let the real command line read the words: verb, options and their values. The verb itself does nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        _idle_verbs()(list(command.words[1:]), standalone_mode=False)


@cache
def _idle_verbs() -> Any:
    return _idle(typer.main.get_command(application()))


def _idle(group: Any) -> Any:
    """With verbs that take their options and return."""
    for each in group.commands.values():
        if hasattr(each, "commands"):
            _idle(each)
        else:
            each.callback = lambda **_: None
    return group


def run(command: Command, cwd: Path) -> tuple[str, Path]:
    """Run a command; return its output and the folder of the next one. A non-zero exit code is an error."""
    if not command.words:
        return _in_shell(command.text.replace(".venv/bin/python", sys.executable), cwd)
    ended = moereplay_here(*command.words[1:], cwd=cwd)
    assert ended.returncode == 0, f"{command.text}: {ended.stderr}"
    if command.into:
        (cwd / command.into).write_text(ended.stdout, "utf-8")
    return ended.stdout, cwd


def _in_shell(text: str, cwd: Path) -> tuple[str, Path]:
    active = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    script = ["bash", "-ec", f"{text}\npwd"]
    ended = subprocess.run(script, cwd=cwd, env=active, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{text}: {ended.stderr}"
    *printed, now = ended.stdout.splitlines()
    return "\n".join(printed), Path(now)
