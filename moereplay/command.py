"""The command `moereplay`: the verbs of `commands/`, their help, and how each of them reports an error."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from math import isfinite
from traceback import walk_tb
from typing import Annotated, Any


def _end_at_once(number: int, frame: Any) -> None:
    os.write(2, b"interrupted: nothing was written\n")
    os._exit(130)


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """End the process at the first Ctrl-C in this block: modules being imported lose or convert an exception."""
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not heeds or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


#: OpenBLAS's threads wait for work asleep: awake, they take 60 ms of CPU on two cores when numpy is imported.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
#: Pydantic reads the entry points of every installed distribution in search of plug-ins, which no model of ours needs.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")

with _ending_at_once():
    import typer
    from typer.core import TyperCommand, TyperGroup

    from moereplay import commands
    from moereplay.commands.terminal import INTERRUPTED, leave, mute, say, second_interrupt_ends, was_interrupted

#: Errors of a full disk, a quota, or a limit on file sizes.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Thresholds of the cycle collector: traversing imported modules would take a seventh of a short replay.
SELDOM = (100_000, 50, 100)
LONGEST = 1000  #: characters of a message
COMPLETE = "interrupted: files that were written are complete"
COMPLETES = "_MOEREPLAY_COMPLETE"  #: in the environment while a shell completes a line


def _not_loaded() -> None:
    """Stand for a verb that the line does not name, of which help and completion need the name and the line."""


def application(names: Sequence[str] = commands.NAMES) -> typer.Typer:
    """Return the command with these verbs, some of them in groups; without names, with a stand-in for every verb."""
    app = typer.Typer(cls=ByPurpose, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(options)
    every = {name: line for verbs in commands.VERBS.values() for name, line in verbs.items()}
    lines = {name: line for name, line in every.items() if name in names or not names}
    typed_first = {name.partition("_")[0] for name in lines}
    groups = {
        name: typer.Typer(cls=Subcommands, help=f"{about}.", no_args_is_help=True, add_completion=False)
        for name, (_, about) in commands.GROUPS.items()
        if name in typed_first
    }
    for name, group in groups.items():
        app.add_typer(group, name=name)
    for name, line in lines.items():
        file = f"moereplay.commands.{commands.file_of(name)}"
        verb = getattr(import_module(file), name) if name in names else _not_loaded
        group, _, rest = name.partition("_")
        where, typed = (groups[group], rest) if group in groups else (app, group)
        where.command(typed, cls=Verb, short_help=line)(verb)
    return app


def _meant(line: Sequence[str]) -> tuple[str, ...]:
    """Return the verbs that a command line can mean by its first two words, or all where a shell completes it."""
    if COMPLETES in os.environ:
        return commands.NAMES
    of_first = [name for name in commands.NAMES if name.partition("_")[0] in line[:1]]
    return tuple(name for name in of_first if name.partition("_")[2] in line[1:2]) or tuple(of_first)


#: Options that name a file or a folder to write.
WRITTEN = ("out", "events", "record_to")
#: `platforms`, and subcommands of `calibrate`, whose `--out -` is standard output.
TO_STDOUT = ("logs", "folder", "machine", "platforms")


class Verb(TyperCommand):
    """A verb that checks numbers and outputs, and whose help shows many options under headings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments. Raises BadParameter for infinities, NaN (which passes every range), and `-` as output."""
        self._check_once(ctx, list(args))
        ctx.allow_extra_args = True
        if (left := super().parse_args(ctx, args)) and not ctx.resilient_parsing:
            raise _usage_error(f"unexpected argument {' '.join(left)}: remove it", ctx)
        param: Any
        for param in self.params:
            value = ctx.params.get(param.name)
            if isinstance(value, float) and not isfinite(value):
                raise typer.BadParameter(f"expected a finite number (got {value})", ctx, param)
            if param.name in WRITTEN and str(value) == "-" and ctx.info_name not in TO_STDOUT:
                raise typer.BadParameter(
                    "expected a file or folder (got -); this verb writes no file to standard output", ctx, param
                )
        return left

    def _check_once(self, ctx: Any, args: list[str]) -> None:
        """Raises BadParameter for a setting of a replay that is given twice: the first would be ignored."""
        if ctx.resilient_parsing:
            return
        from moereplay.results.settings import NAMES

        typed = Counter(self.make_parser(ctx).parse_args(args=args)[2])
        param: Any
        for param, times in typed.items():
            if times > 1 and param.name in NAMES:
                raise typer.BadParameter(
                    f"expected once (given {times} times); separate several values by commas, where it takes them",
                    ctx,
                    param,
                )

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options by heading."""
        from moereplay.commands.options import HEADINGS, heading_of, with_default

        sections: dict[str, list[tuple[str, str]]] = {}
        params: list[Any] = [param for param in self.get_params(ctx) if param.get_help_record(ctx)]
        options = [param for param in params if param.param_type_name == "option"]
        for param in params:
            heading = "Arguments" if param not in options else heading_of(param.name, len(options))
            words, text = param.get_help_record(ctx)
            sections.setdefault(heading, []).append((words, with_default(text)))
        for heading in ("Arguments", *HEADINGS):
            if heading in sections:
                with formatter.section(heading):
                    formatter.write_dl(sections[heading])


class UsageError(Exception):
    """A line that cannot be parsed, in the words of this program."""


class FileEndedError(Exception):
    """Carries an EOFError past typer, which would print "Aborted!" in its place."""


def _usage_error(message: str, context: Any) -> UsageError:
    """Return an error that ends with the help to read: that of the verb, where it is known."""
    verb = context.command_path.partition("moereplay ")[2].split() if context else []
    return UsageError(f"{message}; see `{' '.join(['moereplay', *verb])} --help`")


def _did_you_mean(names: Sequence[str]) -> str:
    return f": did you mean {'one of ' if len(names) > 1 else ''}{', '.join(names)}?" if names else ""


def _in_plain_words(error: Any) -> str:
    """Return what an error of typer says, from its attributes: its sentences lack the value, and may change."""
    param, option = getattr(error, "param", None), getattr(error, "option_name", None)
    if hasattr(error, "possibilities"):
        return f"unknown option {option}{_did_you_mean(sorted(error.possibilities or ()))}"
    if option is not None and error.message.endswith("requires an argument."):
        return f"missing value of {option}: pass {option} VALUE"
    if param is None:
        return error.format_message()
    name = param.get_error_hint().partition(" ")[0].strip("'")
    if not hasattr(error, "param_type"):
        return f"invalid {name}: {error.message}"
    if param.param_type_name == "argument":
        return f"missing argument {name}: pass it after the command"
    return f"missing {name}: pass {name} VALUE"


@contextmanager
def _usage_in_plain_words() -> Iterator[None]:
    """Raises UsageError in place of typer's errors, which have three lines, other words, and not the value."""
    try:
        yield
    except EOFError as ended:
        raise FileEndedError from ended
    except Exception as error:
        if not hasattr(error, "format_message") or "\n" in error.format_message():  # pyright: ignore
            raise  # another error, or the help that a group without a verb prints
        cause: Any = error.__cause__
        if hasattr(cause, "errors"):
            from moereplay.traces.documents import words

            fault, option = cause.errors()[0], getattr(getattr(error, "param", None), "opts", ["value"])[-1]
            message = f"invalid {option} {fault['input']}: {words(fault).partition(' (got ')[0]}"
        else:
            message = _in_plain_words(error)
        raise _usage_error(message, getattr(error, "ctx", None)) from None


class Group(TyperGroup):
    """Verbs below one word, or all of them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb that is typed. Raises UsageError for another word, with the verbs that resemble it."""
        if args[0] not in self.commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = _did_you_mean(get_close_matches(args[0], self.commands))
            raise _usage_error(f"unknown command {args[0]}{near}", ctx)
        return super().resolve_command(ctx, args)


class Subcommands(Group):
    """A verb with subcommands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept `calibrate` as it was typed before it had subcommands, and print the new spelling."""
        if self.name == "calibrate" and args and args[0] not in (*self.commands, "--help"):
            from moereplay.commands.calibrate import older_use

            use = older_use(args)
            say(f"note: the new spelling is: moereplay calibrate {use} ...")
            args = [use, *args]
        return super().parse_args(ctx, args)


class ByPurpose(Group):
    """The command itself, whose `--help` lists verbs under headings."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse the options before the verb."""
        with _usage_in_plain_words():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb that is typed."""
        with _usage_in_plain_words():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section per heading."""
        for heading, lines in commands.listed().items():
            with formatter.section(heading):
                formatter.write_dl(lines)


def _say_version(wanted: bool) -> None:
    if not wanted:
        return
    from moereplay import __version__
    from moereplay.simulator.config import SEMANTICS_VERSION

    print(f"moereplay {__version__}, semantics {SEMANTICS_VERSION}")
    raise typer.Exit


def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (anywhere on the line).")] = False,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Ask no server for models or data sets, as HF_HUB_OFFLINE=1 (anywhere)."),
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_say_version,
            is_eager=True,
            help="Print the versions of the package and of its semantics.",
        ),
    ] = False,
) -> None:
    """Replay the expert routing of Mixture-of-Experts models against modelled caches, links and policies.

    First try: moereplay replay miniature --passes token
    """


def _user_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that a user can cause, imported only after an error."""
    from moereplay.policies.contract import PolicyError
    from moereplay.results.errors import ResultError
    from moereplay.simulator.errors import ConfigError
    from moereplay.tracegen.errors import RecordError
    from moereplay.traces.schema import TraceError

    return TraceError, PolicyError, ConfigError, ResultError, RecordError


def _message(error: BaseException) -> str | None:
    """Return the message for an error that the user can correct; None for a bug of this program."""
    from moereplay.policies.files import blamed

    if isinstance(error, (UsageError, *_user_errors())):
        return str(error)
    in_their_policy = blamed(error)
    if in_their_policy is None and isinstance(error, EOFError) and (file := _bytecode(error)):
        return f"{file} is cut off, as on a full disk: remove this file of Python's cache and run it again"
    if in_their_policy is None and isinstance(error, OSError) and error.errno in FULL:
        return f"cannot write {error.filename or 'the output'}: {error.strerror}; free disk space and run it again"
    if in_their_policy is None and isinstance(error, MemoryError):
        return "out of memory: use a smaller input, or a machine with more memory"
    if in_their_policy is None and isinstance(error, OSError):  # a file that may not be read or written
        return f"{error.filename or 'a file'}: {error.strerror or error}; check the path and its permissions"
    return in_their_policy


def _bytecode(error: BaseException) -> str | None:
    """Return the compiled module in whose bytes an import has failed: Python keeps what a full disk has cut off."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_locals.get("bytecode_path") if frame.f_code.co_name == "_compile_bytecode" else None


def _line(text: str) -> str:
    """Return a message as one printable line, shortened in the middle: it may quote untrusted text."""
    from moereplay.traces.texts import escaped

    line = escaped(text)
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"


def _unexpected(kind: type[BaseException], error: BaseException, _: object) -> None:
    said = _line(f"{kind.__name__}: {error}")
    say(f"moereplay: unexpected {said}; this is a bug: run again with --debug and report it")


def main() -> None:
    """Run a verb. Errors that the user can correct print one line and exit with 2; tracebacks require --debug."""
    gc.set_threshold(*SELDOM)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may hold bytes that cannot be encoded
    debug = "--debug" in sys.argv
    if "--offline" in sys.argv:
        os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub and worker processes read it too
    sys.argv[:] = [typed for typed in sys.argv if typed not in ("--debug", "--offline")]
    if not debug:
        sys.excepthook = _unexpected
    try:
        with _ending_at_once():
            verbs = typer.main.get_command(application(_meant(sys.argv[1:])))
        with second_interrupt_ends():
            verbs()  # an app would install an excepthook of its own
    except SystemExit as end:  # typer has printed its message, except for Ctrl-C
        if end.code == INTERRUPTED and isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):
            say(COMPLETE)
        leave(_flushed(end.code))
    except FileEndedError as carrier:
        _end(carrier.__cause__ or carrier, debug)
    except BaseException as error:
        _end(error, debug)


def _end(error: BaseException, debug: bool) -> None:
    """End with the line of an error, or raise it: a bug, or any error with `--debug`."""
    if isinstance(error, KeyboardInterrupt) or was_interrupted():  # as libraries convert it: polars, C extensions
        say(COMPLETE)
        leave(INTERRUPTED)
    if isinstance(error, BrokenPipeError):  # the reader of a pipe has closed it
        mute()
        return
    message = None if debug and not isinstance(error, UsageError) else _message(error)
    if message is None:
        raise error
    say(f"moereplay: {_line(message)}")
    leave(_flushed(2))


def _flushed(code: Any) -> Any:
    """Flush stdout; return the exit code, or 2 if that fails. Python's own message would have two lines."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        mute()
    except OSError as error:
        mute()
        if code != 2:
            say(f"moereplay: {_message(error)}")
        return 2
    return code
