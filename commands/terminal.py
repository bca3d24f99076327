"""Output and Ctrl-C of a verb: results on stdout, remarks and progress on stderr, so that results can be piped."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from moereplay.traces.texts import counted, escaped, escaped_lines

if TYPE_CHECKING:
    from moereplay.analysis.figures.catalogue import Drawn
    from moereplay.sweeps.run import Progress as SweepProgress
    from moereplay.tracegen.tokens import Progress
    from moereplay.traces.schema import Trace
STDOUT = Path("-")  #: means standard output for verbs that write one text
INTERRUPTED = 130  #: exit code of a program that Ctrl-C ended, as shells report it
#: Time for threads to remove half-written files, or to finish a step.
SECONDS_TO_END = 0.3


# -- output


def show(*parts: str) -> None:
    """Print lines and tables to stdout; wider lines are folded."""
    from moereplay.analysis.tables import folded

    for line in (line for part in parts for line in part.split("\n")):
        print(folded(escaped(line)))


def show_json(document: object) -> None:
    """Print one JSON document to stdout."""
    from moereplay.traces.documents import json_text

    print(json_text(document, indent=1))


def say(line: str) -> None:
    """Print a remark to stderr, wrapped to the terminal or to COLUMNS; without a terminal in one line."""
    from moereplay.analysis.tables import folded, width_of

    folds = sys.stderr.isatty() or "COLUMNS" in os.environ
    lines = escaped_lines(line)
    print(folded(lines, width_of(sys.stderr)) if folds else lines, file=sys.stderr)


def rewrite(line: str, before: int = 0) -> int:
    """Replace the last line of stderr's terminal, `before` characters long. Return the length of the new one."""
    from moereplay.analysis.tables import width_of

    cut = escaped(line)[: width_of(sys.stderr) - 1]  # a full line would scroll
    print(f"\r{cut:{min(before, width_of(sys.stderr) - 1)}}", end="", file=sys.stderr, flush=True)
    return len(cut)


def mute() -> None:
    """Discard further output on stdout, after its reader has closed it or the disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def clock(seconds: float) -> str:
    """Format seconds as 1:02:03, rounded."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def say_wrote(path: Path, trace: Trace) -> None:
    """Print path, size and digest of a trace that was written."""
    size = f"{counted(trace.requests, 'request')}, {counted(trace.tokens, 'token')}"
    say(f"wrote {path}: {size}, digest {trace.digest[:12]}")


def say_made(path: Path, trace: Trace) -> None:
    """Print path, size and digests of a trace that was assembled from others."""
    from moereplay.traces.combine import content_digest

    say_wrote(path, trace)
    say(f"content digest {content_digest(trace)[:12]} (independent of how the trace was assembled)")


def say_left_out(drawn: Drawn) -> None:
    """Print one line per reason for leaving figures out, with their names."""
    for why in dict.fromkeys(drawn.left_out.values()):
        say(f"left out: {', '.join(name for name, reason in drawn.left_out.items() if reason == why)}: {why}")


def say_shared(shared: int, of: int, what: str) -> None:
    """Print how many replays were computed from another's decisions."""
    if shared:
        say(f"{shared:,} of {of:,} {what}: only times were computed, since platforms decide alike")


class _ToStderr(logging.Handler):
    """Prints log messages to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def say_when_compiling() -> None:
    """Print a line when the engine compiles something that is not in its cache, to explain the wait."""
    log = logging.getLogger("moereplay.simulator.compiled.engine")
    log.setLevel(logging.INFO)
    log.handlers = [_ToStderr()]


# -- Ctrl-C: the first ends the command with one line, the second ends the process at once


_interrupted = threading.Event()


def was_interrupted() -> bool:
    """Return whether Ctrl-C has raised KeyboardInterrupt, which a library may have converted to another error."""
    return _interrupted.is_set()


def _silence_others() -> None:
    """Discard what libraries in machine code, and abandoned threads, write about an interrupt to stderr."""
    sys.unraisablehook = threading.excepthook = lambda about: None
    with suppress(OSError, ValueError):  # there may be no stderr
        if sys.stderr.fileno() == 2:
            own = os.fdopen(os.dup(2), "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace")
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            sys.stderr = own


@contextmanager
def second_interrupt_ends() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first Ctrl-C in this block, and end the process at the second."""

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        _interrupted.set()
        _silence_others()
        raise KeyboardInterrupt

    _interrupted.clear()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, in the background of a script
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def keeping(kept: Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C in this block, end the verb with one line: the result of `kept`, which describes what was stored."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted: {kept()}")
        raise typer.Exit(INTERRUPTED) from None


def left_of(out: Path, done: str) -> str:
    """Describe what an interrupted trace has stored and how to resume; `done` is a participle such as recorded."""
    partial = out.with_name(f"{out.name}.partial")
    if not partial.exists():
        return f"nothing was {done}"
    return f"{done} requests are kept in {partial}; run the same command with --resume to continue"


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after Ctrl-C or SIGTERM. A second signal raises KeyboardInterrupt."""
    interrupted = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal interrupted
        if interrupted:
            signal.signal(number, signal.SIG_DFL)
            raise KeyboardInterrupt
        interrupted = True
        say("stopping: finishing replays in flight; press Ctrl-C again to end at once")

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(code: Any) -> NoReturn:
    """End the process even while a thread compiles, which cannot be interrupted."""
    logging.getLogger("asyncio").disabled = True  # it reports reads of zarr that an interrupt abandoned
    at_once = was_interrupted()  # machine code that an interrupt left in disorder may abort at the end of Python
    others: list[threading.Thread] = []
    if threading.active_count() > 1:
        from moereplay.simulator.threads import end_all

        sys.unraisablehook = lambda unraisable: None  # a thread may be ended inside a callback of the compiler
        ended = end_all(SECONDS_TO_END)
        others = [each for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
        at_once = at_once or not ended or bool(code and others)  # a library's thread may wait for a server
    if at_once:
        end_at_once(code)
    if not code and not others:
        end()
    sys.exit(code)


def end() -> NoReturn:
    """End the process after its exit handlers. Python would first free every module: a sixth of a short replay."""
    atexit._run_exitfuncs()
    end_at_once(0)


def end_at_once(code: Any) -> NoReturn:
    """End the process without waiting for threads."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    if was_interrupted():
        atexit._run_exitfuncs()
    os._exit(code if isinstance(code, int) else 1)


# -- progress: a bar or a rewritten line on a terminal, elsewhere a new line every ten seconds

SECONDS_BETWEEN_LINES = 10
SECONDS_BETWEEN_REWRITES = 0.2
SECONDS_TO_FIRST_REQUEST = 2  #: models are slow to start, so their first line comes early


class StatusLine:
    """The current state of long work, in one line."""

    def __init__(self, seconds_to_first: float = SECONDS_BETWEEN_LINES) -> None:
        """Start the meter; on a terminal the first line is due at once."""
        self._terminal = sys.stderr.isatty()
        self._due = time.monotonic() + (0 if self._terminal else seconds_to_first)
        self._wide = 0

    def show(self, status: Callable[[], str], last: bool = False) -> None:
        """Print `status()` if a line is due, or if it is the last one. Call this after every change."""
        if time.monotonic() < self._due and not last:
            return
        self._due = time.monotonic() + (SECONDS_BETWEEN_REWRITES if self._terminal else SECONDS_BETWEEN_LINES)
        if self._terminal:
            self._wide = rewrite(status(), self._wide)
        else:
            say(status())

    def close(self) -> None:
        """End a rewritten line, so that the next output starts a new one."""
        if self._wide:
            say("")
        self._wide = 0


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[..., None]]:
    """Yield a function to call after each piece of work, or with a number of pieces. Up to two pieces show nothing."""
    if total <= 2:
        yield lambda pieces=1: None
    elif sys.stderr.isatty():
        with _bar(total, what) as advance:
            yield advance
    else:
        yield _lines(total, what)


@contextmanager
def _bar(total: int, what: str) -> Iterator[Callable[..., None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from moereplay.analysis.tables import console

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda pieces=1: bar.advance(task, pieces)


def _lines(total: int, what: str) -> Callable[..., None]:
    done, line = 0, StatusLine()

    def advance(pieces: int = 1) -> None:
        nonlocal done
        done += pieces
        line.show(lambda: f"{done}/{total} {what}", last=done == total)

    return advance


@contextmanager
def searching(most: int, seconds: float | None) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of further replays."""
    begun, done, first, line = 0.0, 0, 0, StatusLine()

    def advance(replays: int) -> None:
        nonlocal begun, done, first
        if not done:  # the first replays include compilation, so they are left out of the rate
            begun, first = time.monotonic(), replays
        done += replays
        line.show(lambda: f"{done:,} of at most {most:,} replays{left()}")

    def left() -> str:
        spent = time.monotonic() - begun
        if done == first:
            return ""
        whole = spent * max(0, most - done) / (done - first)
        left = whole if seconds is None else min(whole, max(0.0, seconds - spent))
        return f", at most {left:.0f} s left" if left < 100 else f", at most {left / 60:.0f} min left"

    try:
        yield advance
    finally:
        line.close()


class RequestMeter(StatusLine):
    """Progress of recordings and live runs: requests done, tokens/s and time left."""

    def __init__(self) -> None:
        """Start the meter; the first line is due after two seconds."""
        super().__init__(SECONDS_TO_FIRST_REQUEST)

    def update(self, at: Progress) -> None:
        """Show the progress of a run, which may continue an earlier one."""
        if at.skipped and at.done == at.skipped:
            say(f"resuming after {at.skipped} of {at.total} requests")
        elif at.done > at.skipped:
            left = clock(at.seconds_left)
            self.show(lambda: f"{at.done}/{at.total} requests, {at.tokens_per_second:,.0f} tokens/s, {left} left")


class LiveMeter(RequestMeter):
    """Progress of a live run, which ends passes and requests."""

    def __init__(self, requests: int) -> None:
        """Start the clock of a run of `requests` requests."""
        super().__init__()
        self.requests, self.done, self.tokens = requests, 0, 0
        self.began = time.monotonic()

    def passed(self, tokens: int) -> None:
        """Count a pass and its tokens."""
        from moereplay.tracegen.tokens import Progress

        self.tokens += tokens
        self.update(Progress(self.done, self.requests, 0, self.tokens, time.monotonic() - self.began))


class QualityMeter(StatusLine):
    """Progress of `quality`, and a line for each job that ends: a task under a policy set."""

    def __init__(self, jobs: int) -> None:
        """Start the clock of `jobs` jobs."""
        super().__init__()
        self._jobs, self._ended, self._tokens = jobs, 0, 0
        self._began = time.monotonic()

    def passed(self, name: str, tokens: int) -> None:
        """Count a pass of a policy set."""
        self._tokens += tokens
        self.show(lambda: self._status(name))

    def _status(self, name: str) -> str:
        rate = self._tokens / (time.monotonic() - self._began)
        return f"{self._ended} of {self._jobs} done; {name}: {self._tokens:,} tokens, {rate:.1f} tokens/s"

    def done(self, task: str, name: str, before: bool) -> None:
        """Report a job that ended now, or in an earlier run."""
        self._ended += 1
        took = "kept from an earlier run" if before else f"{time.monotonic() - self._began:.0f} s"
        self.close()
        say(f"{self._ended} of {self._jobs}: {task}, {name}: {took}")
        self._began, self._tokens = time.monotonic(), 0


class SweepMeter(StatusLine):
    """Progress of a sweep: done of total, replays/s, time left and the best figures so far."""

    def update(self, at: SweepProgress) -> None:
        """Show the state of the sweep."""
        self.show(partial(sweep_status, at), last=at.done == at.total)


def sweep_status(at: SweepProgress) -> str:
    """Return a line such as 431/1,000 replays, 12.5/s, 0:00:46 left, best hit rate 71.2% (3f9a...)."""
    parts = [f"{at.done:,}/{at.total:,} replays"]
    if at.done:
        parts.append(f"{at.per_second:.3g}/s, {clock(at.seconds_left or 0)} left")
    if at.errors or at.given_up:
        parts.append(f"{len(at.errors) + len(at.given_up):,} failed")
    if "hit_rate" in at.best:
        value, identity = at.best["hit_rate"]
        parts.append(f"best hit rate {100 * value:.1f}% ({identity[:8]})")
    if "tpot_ms" in at.best:
        value, identity = at.best["tpot_ms"]
        parts.append(f"best TPOT {value:.3g} ms ({identity[:8]})")
    return ", ".join(parts)


def write_recording(out: Path, record: Callable[[Callable[[Progress], None]], Trace]) -> None:
    """Record with a meter, and print a summary. Raises RecordError, naming what was kept."""
    from moereplay.tracegen.errors import RecordError

    meter = RequestMeter()
    try:
        trace = record(meter.update)
    except RecordError as error:
        raise RecordError(f"{error}; {left_of(out, 'recorded')}") from error
    finally:
        meter.close()
    say_wrote(out, trace)
    say(f"mean nll {trace.read('nll').mean():.3f} nats per token")
