"""The part of `moereplay record` that runs a GGUF file in llama.cpp instead of a checkpoint in torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moereplay.commands.terminal import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from moereplay.commands.model_options import Placement
    from moereplay.tracegen.llama.record import Running
    from moereplay.tracegen.plan import Plan
    from moereplay.tracegen.tokens import Work


class Llama(NamedTuple):
    """How llama.cpp is run, for a GGUF file."""

    llama_lib: Annotated[
        Path | None, typer.Option(help="With a GGUF file: your own libllama.so (default: that of the package).")
    ] = None
    threads: Annotated[
        int | None, typer.Option(min=1, max=512, help="With a GGUF file: threads (default: all processors).")
    ] = None


def refuse_without_gguf(llama: Llama) -> None:
    """Raises RecordError for options of llama.cpp with a model that does not run in it."""
    from moereplay.tracegen.errors import RecordError

    for name, value in llama._asdict().items():
        if value is not None:
            raise RecordError(f"--{name.replace('_', '-')} requires a GGUF file as MODEL")


def refuse_foreign(placement: Placement, look_ahead: int | None) -> None:
    """Raises RecordError for options that mean nothing in llama.cpp; `look_ahead` is None if it was not typed."""
    from moereplay.tracegen.errors import RecordError
    from moereplay.tracegen.llama.record import NO_LOOK_AHEAD

    if placement.device not in ("auto", "cpu"):
        raise RecordError(f"--device {placement.device}: a GGUF file is recorded on the CPU; omit --device")
    if placement.dtype not in ("auto", "float32"):
        fix = "auto for llama.cpp's defaults, float32 for keys and values in float32 without flash attention"
        raise RecordError(f"--dtype {placement.dtype}: a GGUF file fixes its weights: expected {fix}")
    for name in ("device_map", "quantise", "revision"):
        if getattr(placement, name) is not None:
            raise RecordError(f"--{name.replace('_', '-')} cannot be combined with a GGUF file")
    if look_ahead:
        raise RecordError(f"--look-ahead {look_ahead}: {NO_LOOK_AHEAD}; record the model's checkpoint for it")


def run(
    model: str,
    llama: Llama,
    exact: bool,
    work_of: Callable[[Any, Any], Work],
    out: Path,
    plan: Plan,
    resume: bool,
) -> None:
    """Record the GGUF file; `work_of` makes the input from its tokenizer and its limits."""
    from moereplay.tracegen.llama.binding import library_file
    from moereplay.tracegen.llama.file import opened
    from moereplay.tracegen.llama.process import Engine
    from moereplay.tracegen.llama.record import Way, loaded, processors

    file, way = opened(model), Way(llama.threads or processors(), exact)
    with Engine(library_file(llama.llama_lib)) as engine:
        say(f"loading {model}")
        running = loaded(engine, file)
        work = work_of(running.tokenizer, running.room)
        _record(running, work, out, plan, way, resume)


def _record(running: Running, work: Work, out: Path, plan: Plan, way: Any, resume: bool) -> None:
    from moereplay.commands.progress import write_recording
    from moereplay.tracegen.llama.record import NO_LOOK_AHEAD, record

    known = running.file.known
    say(f"recording {known.name} ({known.published.format}, llama.cpp, {way.words}): {work.prompts}; {plan.words}")
    say(f"without look-ahead: {NO_LOOK_AHEAD}, so prefetch policies that need it cannot be replayed")
    write_recording(out, lambda progress: record(running, work, out, plan, way, resume, progress))
