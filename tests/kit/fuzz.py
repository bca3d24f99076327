"""`python -m tests.kit.fuzz FOLDER [--every N] [--only TEXT] [--cheap]`: the command beside hostile files and options.

Every case runs in a process forked from one that has imported everything, with a clock and a memory limit.
A line of JSON says how each ended, and what is wrong with that.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.kit.fuzz_cases import Case, cases
from tests.kit.fuzz_materials import CHECKPOINT, make

SECONDS = 60
MOST_BYTES = 2 << 30
MOST_LINES, LONGEST_LINE = 6, 1100
#: What a user must never read.
NEVER = ("this is a bug", "Traceback", "errors.pydantic.dev", "Warning:")
WARMING = ("numpy", "polars", "zarr", "pydantic", "yaml", "matplotlib.pyplot", "optuna", "moereplay.simulator.replay")
WARMING += (
    "moereplay.simulator.compiled.engine",
    "moereplay.sweeps.tune",
    "moereplay.traces.store",
    "moereplay.traces.writer",
    "moereplay.analysis.figures.catalogue",
)
WITH_TORCH = (
    "torch",
    "transformers",
    "moereplay.tracegen.checkpoint",
    "moereplay.tracegen.live.run",
    "moereplay.tracegen.record",
)


class Ending(NamedTuple):
    """How a case ended."""

    name: str
    code: int  #: of the exit; negative for a signal
    seconds: float
    bytes: int  #: most memory that it held
    said: str
    wrong: list[str]


def main() -> None:
    """Run the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--only", default="", help="a regular expression")
    parser.add_argument("--cheap", action="store_true", help="without what takes time to make")
    asked = parser.parse_args()
    known = [case for case in cases() if not (asked.cheap and case.needs)]
    chosen = [case for case in known if re.search(asked.only, case.name)][:: asked.every]
    for ending in run(asked.folder, chosen):
        print(json.dumps(ending._asdict()), flush=True)


def run(folder: Path, chosen: Iterable[Case]) -> Iterator[Ending]:
    """Each case in a folder of its own, which is removed. The materials must be what they were in the end."""
    chosen, materials = list(chosen), folder / "materials"
    needed = {case.needs for case in chosen}
    _warm(CHECKPOINT in needed)
    _in_child(lambda: make(materials, needed))
    before, root = _digests(materials), set(Path("/").iterdir())
    for case in chosen:
        yield _ran(case, materials, folder / "case")
    assert _digests(materials) == before, "a case changed what others read"
    assert set(Path("/").iterdir()) <= root, "a case wrote outside its folder"


def _warm(torch: bool) -> None:
    """Import what verbs import; nothing is opened, as threads do not survive a fork."""
    import typer

    from tests.kit.command import command_line

    parser = command_line()
    typer.main.get_command = lambda typer_instance: parser
    for module in (*WARMING, *(WITH_TORCH if torch else ())):
        import_module(module)
    from moereplay.simulator.replay import replay
    from tests.kit.flips import CONFIG, drawn

    replay(drawn(), CONFIG)  # loads the machine code


def _in_child(work: Callable[[], None]) -> None:
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, "the materials cannot be made"


def _ran(case: Case, materials: Path, folder: Path) -> Ending:
    folder.mkdir(parents=True)
    case.build(materials, folder, Random(case.name))
    before, began = _digests(folder), time.monotonic()
    child = os.fork()
    if child == 0:
        _become(case.words, folder)
    _, status, used = os.wait4(child, 0)
    seconds, code = time.monotonic() - began, os.waitstatus_to_exitcode(status)
    said, out = ((folder.parent / name).read_text(errors="replace") for name in ("err", "out"))
    wrong = list(_complaints(case, code, said, used.ru_maxrss * 1024))
    wrong += _left(folder, before, code)
    wrong += case.judge(materials, code, out) if case.judge else []
    shutil.rmtree(folder)
    return Ending(case.name, code, round(seconds, 2), used.ru_maxrss * 1024, said[-3000:], wrong)


def _become(words: tuple[str, ...], folder: Path) -> None:
    """The command; never returns."""
    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder.parent / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + 2 * MOST_BYTES, size + 2 * MOST_BYTES))
    signal.alarm(SECONDS)
    os.chdir(folder)
    sys.argv = ["moereplay", *words]
    code = 1
    try:
        from moereplay.command import main as command

        command()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _complaints(case: Case, code: int, said: str, size: int) -> Iterator[str]:
    lines = [line for line in said.splitlines() if not line.startswith(("note:", "wrote", "moereplay: invalid --"))]
    if code not in (0, 2, *case.codes):
        yield f"exit code {code}"
    yield from (f"says {word!r}" for word in NEVER if word in said)
    if code and not said.strip():
        yield "says nothing"
    if code and (len(lines) > MOST_LINES or max(map(len, lines), default=0) > LONGEST_LINE):
        yield f"says {len(lines)} lines, the longest of {max(map(len, lines))} characters"
    if size > MOST_BYTES:
        yield f"held {size:,} bytes"


def _left(folder: Path, before: dict[str, str], code: int) -> Iterator[str]:
    """Sources are what they were, and nothing half made is left."""
    after = _digests(folder)
    for name, digest in before.items():
        if name.startswith("in/") and after.get(name) != digest:
            yield f"changed {name}"
    for name in after.keys() - before.keys():
        hidden = any(part.startswith(".") or part.endswith(".tmp") for part in Path(name).parts)
        if (hidden or (code and ".partial" in name)) and not name.endswith(".lock"):
            yield f"left {name}"


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.stat().st_size < MOST_BYTES
    }


if __name__ == "__main__":
    main()
