"""What `--tasks` names, checked before torch is imported, which takes seconds."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from moereplay.tracegen.errors import RecordError
from moereplay.traces.installation import install_command

PERPLEXITY = "perplexity:"
YAML = (".yaml", ".yml")


def named_tasks(text: str) -> list[str]:
    """The names of a comma list. Raises RecordError for none, two of one name, a missing file or no harness."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise RecordError("--tasks names nothing; expected for example perplexity:FILE,gsm8k")
    called = [called_of(name) for name in names]
    if twice := sorted({name for name in called if called.count(name) > 1}):
        raise RecordError(f"--tasks has two tasks called {twice[0]}; name each once")
    for name in names:
        _check(name)
    return names


def called_of(name: str) -> str:
    """How a task is called in tables and files: a file by its name alone."""
    if name.startswith(PERPLEXITY):
        return PERPLEXITY + Path(name.removeprefix(PERPLEXITY)).name
    return Path(name).stem if name.endswith(YAML) else name


def _check(name: str) -> None:
    if name.startswith(PERPLEXITY):
        _check_file(name, name.removeprefix(PERPLEXITY), f"{PERPLEXITY}book.txt")
        return
    if not find_spec("lm_eval"):
        raise RecordError(f"task {name} needs lm-evaluation-harness: {install_command('quality')}")
    if name.endswith(YAML):
        _check_file(name, name, "task.yaml")


def _check_file(name: str, path: str, example: str) -> None:
    if Path(path).is_dir() and path:
        raise RecordError(f"task {name}: {path} is a folder; expected a file, for example {example}")
    if not Path(path).is_file():
        raise RecordError(f"task {name}: there is no file {path or 'named'}; expected for example {example}")
