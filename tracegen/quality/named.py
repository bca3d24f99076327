"""Parsing of `--tasks`, before torch is imported, which takes seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moereplay.sweeps.experiment.file import composed
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.folder import one_line
from moereplay.traces.files import install_command

PERPLEXITY = "perplexity:"
YAML = (".yaml", ".yml")


def named_tasks(text: str) -> list[str]:
    """Return the names of a comma list. Raises RecordError for none, two of one name, a missing file or no harness."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise RecordError("missing tasks: pass --tasks, for example perplexity:FILE,gsm8k")
    called = [called_of(name) for name in names]
    if twice := sorted({name for name in called if called.count(name) > 1}):
        raise RecordError(f"--tasks lists {twice[0]} twice; list each task once")
    for name in names:
        _check(name)
    return names


def called_of(name: str) -> str:
    """Return the name of a task in tables and files: a file's name without its folder."""
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
        raise RecordError(f"task {name}: {path} is a folder: expected a file, for example {example}")
    if not Path(path).is_file():
        raise RecordError(f"task {name}: missing file {path or 'name'}: expected for example {example}")


# -- A task's YAML file, as lm-evaluation-harness reads it, and the local files that its answers depend on.

#: What a task's examples come from.
SOURCES = {"dataset_path", "custom_dataset", "class"}


def check_task_file(path: str) -> None:
    """Raise RecordError naming the file if it is not a valid task for the harness; data and functions are unchecked."""
    document = _read(path, recursive=True)
    if isinstance(document.get("task"), list):  # by its path the harness reads no group
        raise RecordError(f"task {path}: the file holds a list of tasks, not a task; pass them one by one in --tasks")
    if "task" not in document:
        raise RecordError(f"task {path}: missing `task`: add one, such as task: mine")
    if not document.keys() & SOURCES:
        raise RecordError(f"task {path}: missing `dataset_path`: add one, such as dataset_path: json")


def content_of(path: str) -> str:
    """Return the sha256 of the file, the files it includes, its data and all Python files in its functions' folders.

    Raises RecordError.
    """
    found = hashlib.sha256()
    for each in _read_from(path):
        found.update(hashlib.sha256(Path(each).read_bytes()).digest())
    return found.hexdigest()


def _read_from(path: str) -> list[str]:
    """Return the file first, then the others, each once.

    A function may import modules from its folder, so these are included.
    """
    texts = list(_texts(_read(path, recursive=True)))
    modules = [Path(module) for module in map(_module_of, texts) if _is_file(module)]
    beside = [str(each) for module in modules for each in sorted(module.parent.glob("*.py"))]
    return list(dict.fromkeys([*_included(path), *sorted(filter(_is_file, texts)), *beside]))


def _included(path: str) -> Iterator[str]:
    """Yield the file and all files that it includes, relative to the including file."""
    yield path
    included = _read(path, recursive=False).get("include") or []
    for each in [included] if isinstance(included, str) else included:
        yield from _included(str(Path(path).parent / each))


def _texts(value: Any) -> Iterator[str]:
    """Yield the strings of a document."""
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(each)


def _is_file(text: str) -> bool:
    """Return whether a string is the path of a file. Prompts are too long or contain characters that no path has."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _module_of(function: str) -> str:
    """Return the file of `/folder/module.function`, the spelling of functions that the harness did not import."""
    folder, _, name = function.rpartition("/")
    return f"{folder}/{name.rpartition('.')[0].replace('.', '/')}.py"


def _read(path: str, recursive: bool) -> dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        composed(Path(path).read_bytes(), tags=False)  # no key twice, no endless aliases
        return load_yaml(path, resolve_func=False, recursive=recursive)
    except Exception as refused:  # no YAML, no mapping, a missing include, a cycle
        expected = "expected a task of lm-evaluation-harness in YAML"
        raise RecordError(f"task {path}: {one_line(refused)}; {expected}") from None
