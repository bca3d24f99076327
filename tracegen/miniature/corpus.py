"""The text the miniature learns from: the standard library of the Python that runs this, its docstrings included."""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Absent from some systems' packages, generated, or another library's: leaving them out keeps machines alike.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"})
_HELD_OUT_OF = 30  # one file in thirty is never trained on


def sources() -> list[Path]:
    """The library's source files, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(file for file in root.rglob("*.py") if not _LEFT_OUT & set(file.relative_to(root).parts))


def split() -> tuple[list[str], list[str]]:
    """The texts to train on and the texts held out, one of each file; the file's name alone decides which."""
    train: list[str] = []
    held_out: list[str] = []
    root = Path(sysconfig.get_path("stdlib"))
    for file in sources():
        place = held_out if _held_out(file.relative_to(root)) else train
        place.append(file.read_text(encoding="utf-8", errors="replace"))
    return train, held_out


def digest(texts: list[str]) -> str:
    """SHA-256 over the texts in order: which corpus this was."""
    whole = hashlib.sha256()
    for text in texts:
        whole.update(text.encode())
    return whole.hexdigest()


def lines(texts: list[str]) -> Iterator[str]:
    """Every line with its end, for the tokenizer's training."""
    for text in texts:
        yield from text.splitlines(keepends=True)


def _held_out(name: Path) -> bool:
    """Whether this file is kept for evaluation: stable when files are added or removed beside it."""
    return hashlib.sha256(name.as_posix().encode()).digest()[0] % _HELD_OUT_OF == 0
