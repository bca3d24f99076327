"""Run Python work in processes: results in order, and no process outlives the one that started it."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection as connections
from multiprocessing import get_context, parent_process
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from moereplay.simulator.errors import ConfigError

HOME = Path(__file__).resolve().parents[1]  #: parent folder of this program's packages
SECONDS = 0.2  #: longest wait: where waits cannot be interrupted, Ctrl-C is handled after one
T = TypeVar("T")
R = TypeVar("R")


class Worker(NamedTuple):
    """A process, and this end of its connection."""

    process: SpawnProcess
    connection: connections.Connection


def find_own_packages() -> dict[str, str]:
    """Set and return an environment in which child Python processes find this program's packages.

    Children start in the user's folder, which may contain a `results/` or a `signal.py`; PYTHONSAFEPATH prevents
    Python from importing them. PYTHONPATH names the folder of the packages if they are not installed.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if HOME.name not in ("site-packages", "dist-packages") and str(HOME) not in paths:
        paths.insert(0, str(HOME))
    found = {"PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})
    os.environ.update(found)
    return found


@contextmanager
def restored_environment(*names: str) -> Iterator[None]:
    """Restore these environment variables afterwards: processes that start inside have what is set there."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def started(work: Callable[..., None], *arguments: Any) -> Worker:
    """Start a process that runs `work(connection, *arguments)` and never gets Ctrl-C; its parent decides when it ends.

    A terminal sends the signal to every process of a command, even to one that is still importing.
    """
    ours, theirs = get_context("spawn").Pipe()  # spawn, not fork: polars and zarr run threads
    process = get_context("spawn").Process(target=work, args=(theirs, *arguments), daemon=True)
    try:
        with _without_interrupts(), restored_environment("PYTHONSAFEPATH", "PYTHONPATH"):
            find_own_packages()
            process.start()
    except BaseException:
        if process.pid is not None:
            process.kill()
        raise
    theirs.close()  # so that its death closes our end
    return Worker(process, ours)


def in_processes(
    work: Callable[[T], R], items: Sequence[T], processes: int, prepare: Callable[[], None] | None = None
) -> Iterator[R]:
    """Yield `work(item)` for every item, in order, from several processes, each of which first runs `prepare`.

    Arguments and results must be picklable. Raises the error of the first item that failed, and ConfigError if a
    process dies. The processes end when the iterator ends, fails or is closed.
    """
    workers: list[Worker] = []
    try:
        for _ in range(processes):
            workers.append(started(_serve, prepare, work))
        yield from _in_order(workers, items)
    finally:
        for process, _ in workers:
            process.kill()
        for process, _ in workers:
            process.join()


class _Answer(NamedTuple):
    result: Any
    error: Exception | None


def _in_order(workers: Sequence[Worker], items: Sequence[Any]) -> Iterator[Any]:
    todo, answers = iter(enumerate(items)), {}
    busy: dict[Any, tuple[Worker, int]] = {}

    def hand_out(worker: Worker) -> None:
        for at, item in todo:
            with suppress(OSError):  # it died; reading its result reports that
                worker.connection.send(item)
            busy[worker.connection] = worker, at
            return

    for worker in workers:
        hand_out(worker)
    for wanted in range(len(items)):
        while wanted not in answers:
            for ready in connections.wait(list(busy), SECONDS):
                worker, at = busy.pop(ready)
                answers[at] = _received(worker)
                hand_out(worker)
        answer = answers.pop(wanted)
        if answer.error is not None:
            raise answer.error
        yield answer.result


def _received(worker: Worker) -> _Answer:
    try:
        return worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join()
        raise ConfigError(f"a worker ended ({ending(worker.process)}); check memory, or lower --workers") from None


def ending(process: SpawnProcess) -> str:
    """Describe how a process ended."""
    code = process.exitcode or 0
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _serve(connection: connections.Connection, prepare: Callable[[], None] | None, work: Callable[[Any], Any]) -> None:
    """Serve requests until the parent is gone, even if it dies while `work` is busy."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if prepare is not None:
        prepare()
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        try:
            answer = _Answer(work(item), None)
        except Exception as error:
            error.add_note(f"in a worker process:\n{traceback.format_exc()}")  # --debug shows it
            answer = _Answer(None, error)
        connection.send(answer)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Start processes that never get Ctrl-C; this process handles it after the start."""
    with _deferred(), _blocked():
        yield


@contextmanager
def _deferred() -> Iterator[None]:
    """Defer SIGINT while a worker starts, so that an interrupt cannot leave it half initialized (main thread only)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *arguments: caught.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught and callable(before):
            before(*caught[0])


@contextmanager
def _blocked() -> Iterator[None]:
    """Block SIGINT, which a process that starts inside inherits, on systems that have signal masks."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # else it starts with the process, and unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
