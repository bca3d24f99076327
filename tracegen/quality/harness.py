"""Tasks that a model answers under policies: perplexity of a text, and lm-evaluation-harness by name or YAML file."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from math import exp, inf, isfinite, log
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

from moereplay.results.result import Row
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.folder import one_line
from moereplay.tracegen.live.quality import LARGEST_EXPONENT
from moereplay.tracegen.prompts import Prompts, read_texts
from moereplay.tracegen.quality.named import PERPLEXITY, YAML, called_of, check_task_file, content_of
from moereplay.tracegen.quality.session import Session
from moereplay.tracegen.quality.texts import TeacherForced
from moereplay.tracegen.record import room_of
from moereplay.tracegen.tokens import check_chat, windows
from moereplay.traces.texts import nearest


class Measure(NamedTuple):
    """A figure of a task."""

    name: str
    value: float
    higher_is_better: bool


class Example(NamedTuple):
    """One measure of one example; equal `example` and `prompt_sha256` of two sets are a pair."""

    example: str
    prompt_sha256: str
    measure: str
    value: float
    weight: float = 1.0  #: in the mean over examples


class Answers(NamedTuple):
    """Answers of one task under one policy set."""

    measures: list[Measure]
    examples: list[Example]

    def row(self) -> Row:
        """Return the answers as `results.quality` stores them."""
        return {
            "measures": [measure._asdict() for measure in self.measures],
            "examples": [example._asdict() for example in self.examples],
        }


def sha256_of(text: str) -> str:
    """Return the sha256 of a prompt: results store digests, not prompts."""
    return hashlib.sha256(text.encode()).hexdigest()


# -- Tasks of lm-evaluation-harness.

#: Measures that follow from log-likelihoods, with what a mean is divided by: an example has nats, or bits.
NATS = {"perplexity": 1.0, "word_perplexity": 1.0, "byte_perplexity": 1.0, "bits_per_byte": log(2)}


@dataclass(frozen=True)
class HarnessTask:
    """One task or group, its first `limit` examples."""

    spec: str  #: its name, or the path of a YAML file
    limit: int | None
    seed: int
    shots: int | None  #: examples before each question; None: as the task says
    chat: bool
    compared = False

    @classmethod
    def of(cls, spec: str, limit: int | None, seed: int, shots: int | None, chat: bool) -> HarnessTask:
        """Raises RecordError for a name unknown to the harness, a list of tasks, or a file without a task."""
        check = check_task_file if spec.endswith(YAML) else _check_name
        with _quiet():
            check(spec)
        return cls(spec, limit, seed, shots, chat)

    @property
    def name(self) -> str:
        """Name in tables and files."""
        return called_of(self.spec)

    @property
    def definition(self) -> list[object]:
        """Inputs besides the model that determine the answers."""
        settings = [self.limit, self.seed, self.shots, self.chat]
        return ["lm-eval", version("lm_eval"), self.name, _content(self.spec), *settings]

    def answers(self, session: Session) -> Answers:
        """Ask every example. Raises RecordError naming the task if it cannot be had, or fails."""
        check_chat(session.subject.loaded.tokenizer, self.chat)
        with _quiet(session):
            try:
                found = self._evaluated(session)
            except RecordError:
                raise
            except Exception as refused:  # tasks are foreign data and foreign code: it can be anything
                raise RecordError(f"task {self.spec}: {one_line(refused)}") from refused
        measures = self._measures(found)
        if not measures:
            tasks = ", ".join(found["samples"])
            raise RecordError(f"task {self.spec} has no numeric score of its own; it consists of {tasks}")
        return Answers(measures, [example for name in found["samples"] for example in _examples(name, found)])

    def _evaluated(self, session: Session) -> Any:
        from lm_eval import evaluator  # takes seconds, and is needed only for tasks of the harness

        from moereplay.tracegen.quality.interface import UnderPolicies

        seeds = dict.fromkeys(
            ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), self.seed
        )
        evaluate: Any = evaluator.simple_evaluate  # its decorator hides its arguments from type checkers
        return evaluate(
            UnderPolicies(session, 1, self.seed),
            tasks=[self.spec],
            num_fewshot=self.shots,
            limit=self.limit,
            bootstrap_iters=0,
            apply_chat_template=self.chat,
            task_manager=known_tasks(),
            **seeds,
        )

    def _measures(self, found: Mapping[str, Any]) -> list[Measure]:
        """Return the measures of the group if one was named, else of the single task."""
        (asked, *_) = found.get("groups") or found["results"]
        better = found["higher_is_better"].get(asked) or {}
        figures = found["results"][asked]
        return [
            Measure(_called(key), float(value), bool(better.get(key.partition(",")[0], True)))
            for key, value in figures.items()
            if "," in key and "_stderr" not in key and isinstance(value, int | float) and isfinite(value)
        ]


@cache
def known_tasks() -> Any:
    """Return the harness's index of its tasks, a `TaskManager`: made once, it takes seconds."""
    with _quiet():
        from lm_eval.tasks import TaskManager

        return TaskManager()


def _check_name(name: str) -> None:
    """Raises RecordError for a name that the harness does not know, or that is a list of tasks without a figure."""
    known = known_tasks()
    if name not in known.all_tasks:
        near = nearest(name, known.all_tasks)
        meant = f"did you mean {near}?" if near else f"`lm-eval ls tasks` lists {len(known.all_tasks):,}"
        raise RecordError(f"unknown task {name!r}: {meant}")
    if name in known.all_tags:
        tasks = ", ".join(sorted(known.task_index[name].tags or ()))
        raise RecordError(
            f"{name} is a list of tasks without a score of its own; pass the tasks that you want: {tasks}"
        )


def _called(key: str) -> str:
    """Return `exact_match` for `exact_match,none`; another filter stays in the name."""
    metric, _, filtered = key.partition(",")
    return metric if filtered == "none" else f"{metric},{filtered}"


def _examples(task: str, found: Mapping[str, Any]) -> Iterator[Example]:
    """Yield the examples of measures that are means over examples or over their words."""
    for sample in found["samples"][task]:
        prompt = sha256_of(repr(sample["arguments"]))
        for metric in sample["metrics"]:
            called, mean = _called(f"{metric},{sample['filter']}"), _mean(metric, sample[metric])
            if mean is not None:
                yield Example(f"{task}/{sample['doc_id']}", prompt, called, *mean)


def _mean(metric: str, value: Any) -> tuple[float, float] | None:
    """Return an example's value and weight.

    The value of a perplexity is a log-likelihood, or one with a number of words: nats per word.
    """
    if metric in NATS:
        likelihood, words = value if isinstance(value, tuple | list) else (value, 1)
        return -likelihood / words / NATS[metric], float(words)
    return (float(value), 1.0) if isinstance(value, bool | int | float) and isfinite(value) else None


def _content(spec: str) -> str:
    """Return sha256 of a task's own file and of the local files that it names; empty of a known task."""
    if not spec.endswith(YAML):
        return ""
    with _quiet():
        return content_of(spec)


@contextlib.contextmanager
def _quiet(session: Session | None = None) -> Iterator[None]:
    """Suppress remarks and bars of the harness; the progress of a session is shown as before."""
    before, shown = logging.root.manager.disable, sys.stderr
    ours = session.progress if session else None
    if session and ours:
        session.progress = lambda tokens: _aloud(shown, ours, tokens)
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _aloud(shown: TextIO, progress: Callable[[int], None], tokens: int) -> None:
    with contextlib.redirect_stderr(shown):
        progress(tokens)


# -- The tasks that `--tasks` names, in their order.


class Task(Protocol):
    """A task for a model."""

    @property
    def compared(self) -> bool:
        """True if the unmodified model reads the same texts alongside."""
        ...

    @property
    def name(self) -> str:
        """Name in tables and files."""
        ...

    @property
    def definition(self) -> list[object]:
        """Inputs besides the model that determine the answers."""
        ...

    def answers(self, session: Session) -> Answers:
        """Ask everything."""
        ...


class Asking(NamedTuple):
    """Options of tasks."""

    limit: int | None = None  #: examples, or windows, of each
    seed: int = 0
    window: int = 512  #: tokens of a window of a perplexity
    shots: int | None = None
    chat: bool = False


def tasks_of(names: Sequence[str], how: Asking) -> list[Task]:
    """Return the tasks of these names. Raises RecordError for an unknown task or an unreadable file."""
    return [_task(name, how) for name in names]


def _task(name: str, how: Asking) -> Task:
    if name.startswith(PERPLEXITY):
        return Perplexity.of(Path(name.removeprefix(PERPLEXITY)), how.window, how.limit)
    return HarnessTask.of(name, how.limit, how.seed, how.shots, how.chat)


# -- The task `perplexity:FILE`: windows of a text, token by token, compared with the unmodified model.


@dataclass(frozen=True)
class Perplexity:
    """A text file in windows of `window` tokens, the first `limit` of them."""

    path: Path
    texts: Prompts
    window: int
    limit: int | None

    @classmethod
    def of(cls, path: Path, window: int, limit: int | None) -> Perplexity:
        """Raises RecordError if the file cannot be read."""
        return cls(path, read_texts([path]), window, limit)

    compared = True  #: with the unmodified model, token by token

    @property
    def name(self) -> str:
        """Name in tables and files."""
        return f"{PERPLEXITY}{self.path.name}"

    @property
    def definition(self) -> list[object]:
        """Inputs besides the model that determine the answers."""
        return ["perplexity", self.texts.sha256, self.window, self.limit]

    def answers(self, session: Session) -> Answers:
        """Read every window. Raises RecordError for a text shorter than one."""
        loaded = session.subject.loaded
        work = windows(self.texts, loaded.tokenizer, room_of(loaded), self.window, self.limit)
        texts = [TeacherForced(ids.tolist(), prompt=1, scored=1) for ids in work.sequences]
        session.read(texts)
        examples = [example for number, text in enumerate(texts) for example in _window_examples(number, text)]
        return Answers(_window_measures(texts), examples)


def _window_examples(number: int, text: TeacherForced) -> list[Example]:
    tokens, of = len(text.ids) - 1, (str(number), sha256_of(str(list(text.ids))))
    values = {"nll": -text.logprob / tokens, "kl": text.compared.kl / tokens, "top1": _agreed(text) / tokens}
    return [Example(*of, name, value, tokens) for name, value in values.items()]


def _window_measures(texts: list[TeacherForced]) -> list[Measure]:
    tokens = sum(len(text.ids) - 1 for text in texts)
    nll = -sum(text.logprob for text in texts) / tokens
    kl, agreed = sum(text.compared.kl for text in texts), sum(map(_agreed, texts))
    return [
        Measure("nll", nll, False),
        Measure("perplexity", exp(nll) if nll < LARGEST_EXPONENT else inf, False),
        Measure("kl", kl / tokens, False),
        Measure("top1", agreed / tokens, True),
    ]


def _agreed(text: TeacherForced) -> int:
    """Count the agreeing tokens; all of them for the unmodified model."""
    return text.compared.agreed if text.compared.tokens else len(text.ids) - 1
