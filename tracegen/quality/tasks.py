"""The tasks that `--tasks` names, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from moereplay.tracegen.quality.answers import Answers
from moereplay.tracegen.quality.harness import HarnessTask
from moereplay.tracegen.quality.named import PERPLEXITY
from moereplay.tracegen.quality.perplexity import Perplexity
from moereplay.tracegen.quality.session import Session


class Task(Protocol):
    """Something that a model is asked."""

    @property
    def compared(self) -> bool:
        """Whether the unmodified model reads the same beside."""
        ...

    @property
    def name(self) -> str:
        """In tables and files."""
        ...

    @property
    def definition(self) -> list[object]:
        """Everything that its answers depend on beside the model."""
        ...

    def answers(self, session: Session) -> Answers:
        """Ask everything."""
        ...


class Asking(NamedTuple):
    """How tasks are asked."""

    limit: int | None = None  #: examples, or windows, of each
    seed: int = 0
    window: int = 512  #: tokens of a window of a perplexity
    shots: int | None = None
    chat: bool = False


def tasks_of(names: Sequence[str], how: Asking) -> list[Task]:
    """Of `named_tasks`. Raises RecordError for a task that the harness does not know, or an unreadable file."""
    return [_task(name, how) for name in names]


def _task(name: str, how: Asking) -> Task:
    if name.startswith(PERPLEXITY):
        return Perplexity.of(Path(name.removeprefix(PERPLEXITY)), how.window, how.limit)
    return HarnessTask.of(name, how.limit, how.seed, how.shots, how.chat)
