"""Run work in threads other than the main thread, so that Ctrl-C takes effect at once.

Python handles Ctrl-C between two instructions of its main thread. A replay in machine code is one instruction, and a
compilation a few long ones, so neither runs there: the main thread only waits. On an interrupt, or when no more
results are wanted, a flag that machine code reads at every step stops the work. A compilation reads no flag: its thread
is a daemon that does not keep the process from ending.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np

from moereplay.simulator.compiled.layout import STOP

SECONDS = 0.2  #: of a wait: a system that cannot interrupt one handles Ctrl-C after it
T = TypeVar("T")
R = TypeVar("R")
_here = threading.local()
_started: WeakSet[threading.Thread] = WeakSet()  #: those that have work


def stop_flag() -> np.ndarray:
    """Return (1,) `layout.STOP` of this thread's work; zero in threads that this module did not start."""
    return _here.flag if hasattr(_here, "flag") else np.zeros(1, STOP)


def check_stop() -> None:
    """Raises KeyboardInterrupt if this thread's work is to stop."""
    if stop_flag()["requested"][0]:
        raise KeyboardInterrupt


def run_interruptibly(work: Callable[[], R]) -> R:
    """Return the result of `work`. From the main thread, run it in a worker so that Ctrl-C interrupts the wait.

    Raises the error of `work`.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()  # the main thread handles Ctrl-C
    worker = _idle_worker()
    _started.add(worker)
    future = worker.ask(work)
    try:
        return _result(future)
    finally:
        if future.done():
            _started.discard(worker)
            _idle.append(worker)
        else:
            worker.end()


class Worker(threading.Thread):
    """A daemon thread that does one piece of work after another; starting a thread takes as long as a short replay."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._flag, self._asked = np.zeros(1, STOP), SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]()
        self.start()

    def ask(self, work: Callable[[], R]) -> Future[R]:
        """Submit `work`; return the future of its result."""
        future = Future[R]()
        self._asked.put((work, future))
        return future

    def end(self) -> None:
        """Stop the current work by the flag and end the thread."""
        self._flag["requested"] = 1
        self._asked.put(None)

    def run(self) -> None:
        """Work until the end is requested."""
        _here.flag = self._flag
        while asked := self._asked.get():
            _settle(*asked)
            del asked  # else it would keep its last result


#: Workers without work. Only the main thread takes one, so there is seldom more than one.
_idle: list[Worker] = []


def _idle_worker() -> Worker:
    while _idle:
        worker = _idle.pop()
        if worker.is_alive():  # it is not where this process was forked from the one that started it
            return worker
    return Worker()


def in_threads(work: Callable[[T], R], items: Sequence[T], threads: int) -> Iterator[R]:
    """Yield `work` of every item in order, `threads` at once. Raises the first error in that order.

    On exit the flag stops whatever is still running.
    """
    todo = deque((item, Future[R]()) for item in items)
    futures, flag = deque(future for _, future in todo), np.zeros(1, STOP)
    try:
        for _ in range(threads):
            thread = threading.Thread(target=_run, args=(work, todo, flag), daemon=True)
            _started.add(thread)
            thread.start()
        while futures:
            yield _result(futures.popleft())
    finally:
        flag["requested"] = 1


def end_all(seconds: float) -> bool:
    """Make every thread of this module end before the process does; return True if all have within `seconds`.

    Idle workers are daemons and end with the process. The flag stops machine code. Python code gets a SystemExit, so
    that it removes partial files.
    """
    deadline = time.monotonic() + seconds
    running = [thread for thread in _started if thread.is_alive()]
    for thread in running:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in running)


def _run(work: Callable[[Any], Any], todo: deque[tuple[Any, Future[Any]]], flag: np.ndarray) -> None:
    _here.flag = flag
    while not flag["requested"][0]:
        try:
            item, future = todo.popleft()
        except IndexError:
            return
        _settle(partial(work, item), future)


def _settle(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # raised again where the result is waited for
        future.set_exception(error)


def _result(future: Future[R]) -> R:
    while not wait([future], SECONDS).done:
        pass
    return future.result()
