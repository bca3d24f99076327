"""`moereplay record`: run a model on prompts and store its routing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from pydantic import ValidationError

from moereplay.commands import model_options, options
from moereplay.commands.model_options import NEW_TOKENS, WINDOW, Placement
from moereplay.commands.options import NewTrace, Typed, grouped, option_fault, stored
from moereplay.commands.terminal import keeping, left_of, say, write_recording
from moereplay.results.errors import check_output
from moereplay.tracegen import prompts
from moereplay.tracegen.errors import RecordError, require_torch
from moereplay.tracegen.folder import MINIATURE, check_look_ahead, require_tokenizer
from moereplay.tracegen.llama.binding import library_file
from moereplay.tracegen.llama.process import Engine
from moereplay.tracegen.llama.record import NO_LOOK_AHEAD, Way, is_named, loaded, opened, processors
from moereplay.tracegen.llama.record import record as record_gguf
from moereplay.tracegen.plan import Decoding, Plan, drafting_of, refuse_taken
from moereplay.tracegen.tokens import Room, Work, encode, windows

if TYPE_CHECKING:
    pass
#: Options that require one kind of input; None or False means that the option was not given.
FOR_TEXT = ("window", "prompt_tokens")
FOR_PROMPTS = ("field", "chat", "truncate", "shuffle", "max_new_tokens", "temperature", "top_p", "top_k")
FOR_PROMPTS += ("draft_model", "draft_tokens")
Model = Annotated[
    str,
    typer.Argument(help="Hugging Face id, local folder, GGUF file, or `miniature` (bundled).", show_default=False),
]
Dataset = Annotated[
    str | None, typer.Option(help="Hugging Face dataset instead of prompts: ID, or ID:SPLIT (default split: test).")
]


class Source(NamedTuple):
    """Input of the model."""

    prompts: model_options.Prompts = None
    field: model_options.Field = None
    text: model_options.Text = None
    window: model_options.Window = None
    prompt_tokens: model_options.PromptTokens = None
    dataset: Dataset = None
    chat: model_options.Chat = False
    truncate: model_options.Truncate = False
    limit: model_options.Limit = None
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Shuffle the prompts by --seed.")] = False


class Sampling(NamedTuple):
    """Decoding of prompts."""

    max_new_tokens: model_options.NewTokens = None
    temperature: model_options.Temperature = None
    top_p: Annotated[
        float | None,
        typer.Option(help="With --temperature: sample from the most likely tokens of this total probability."),
    ] = None
    top_k: Annotated[
        int | None, typer.Option(min=0, help="With --temperature: sample from the K most likely tokens; 0 for all.")
    ] = None
    draft_model: Annotated[
        str | None,
        typer.Option(help="Verify drafts and record them: a small model with the same tokens, or ngram[:N]."),
    ] = None
    draft_tokens: Annotated[
        int | None, typer.Option(min=1, help="With --draft-model: drafts per pass (default: 3).")
    ] = None


class Kept(NamedTuple):
    """Contents of the trace in addition to the chosen experts, and the seed."""

    look_ahead: model_options.LookAhead = 2
    logits: Annotated[
        bool, typer.Option("--logits/--no-logits", help="Store router logits, which routing policies require.")
    ] = True
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling and of --shuffle.")] = 0
    dense: options.Dense = ""
    dense_bits: options.DenseBits = ""
    matrices: options.Matrices = ""


@grouped
def record(
    model: Model,
    *,
    out: NewTrace,
    source: Source,
    sampling: Sampling,
    kept: Kept,
    placement: Placement,
    llama_lib: Annotated[
        Path | None, typer.Option(help="With a GGUF file: your own libllama.so (default: that of the package).")
    ] = None,
    typed: Typed,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted recording, or start one.")] = False,
) -> None:
    """Record a model's routing into a trace, prompt by prompt. The model's output does not change."""
    source = _checked(model, source, sampling)
    if is_named(model):
        kept = kept._replace(look_ahead=kept.look_ahead if "look_ahead" in typed else 0)
        _refuse_foreign(placement, sampling, kept.look_ahead)
        with keeping(lambda: left_of(out, "recorded")):
            refuse_taken(out, resume)
            check_output(out)
            plan, texts = _plan(source, sampling, kept), _texts(source, kept.seed)
            work_of = partial(_work, source, sampling, texts)
            _run_gguf(model, llama_lib, placement, work_of, out, plan, resume)
        return
    if llama_lib is not None:
        raise RecordError("--llama-lib requires a GGUF file as MODEL")
    require_torch()
    with keeping(lambda: left_of(out, "recorded")):  # check everything that needs no torch before loading the model
        refuse_taken(out, resume)
        check_output(out)
        plan, texts, folder = _plan(source, sampling, kept), _texts(source, kept.seed), placement.located(model)
        require_tokenizer(folder)
        check_look_ahead(folder, kept.look_ahead, Kept().look_ahead)
        drafts = None
        if plan.drafting and not plan.drafting.is_ngram:
            name, alone = plan.drafting.model, placement._replace(revision=None, quantise=None)
            drafts = alone.loaded(name, alone.located(name))
        loaded = placement.loaded(model, folder)  # last, as it decides the number of threads
        from moereplay.tracegen.record import record as run
        from moereplay.tracegen.record import room_of

        work = _work(source, sampling, texts, loaded.tokenizer, room_of(loaded))
        say(f"recording {loaded.name} ({loaded.dtype}, {loaded.model.device}): {work.prompts}; {plan.words}")
        write_recording(out, lambda progress: run(loaded, work, out, plan, resume, progress, drafts))


def _checked(model: str, source: Source, sampling: Sampling) -> Source:
    """Return the only input. Raises RecordError for none, several, or options of another input."""
    sources = [name for name in ("prompts", "text", "dataset") if getattr(source, name)]
    if not sources and model == "miniature":
        source, sources = source._replace(prompts=[MINIATURE / "prompts.jsonl"]), ["prompts"]
    if len(sources) != 1:
        raise RecordError("expected exactly one input: pass one of --prompts, --text, --dataset")
    given = source._asdict() | sampling._asdict()
    foreign = FOR_PROMPTS if sources == ["text"] else FOR_TEXT
    for name in foreign:
        if given[name] not in (None, False):
            raise RecordError(f"--{name.replace('_', '-')} cannot be combined with --{sources[0]}")
    return source


def _plan(source: Source, sampling: Sampling, kept: Kept) -> Plan:
    drawn = {name: value for name, value in sampling._asdict().items() if value is not None}
    drafts, many = drawn.pop("draft_model", None), drawn.pop("draft_tokens", None)
    if many and not drafts:
        raise RecordError("--draft-tokens requires --draft-model")
    drafting = drafting_of(drafts, many) if drafts else None
    new = drawn.pop("max_new_tokens", NEW_TOKENS)
    if drawn.keys() - {"temperature"} and not sampling.temperature:
        raise RecordError("--top-p and --top-k require --temperature above 0")
    window = source.window or WINDOW
    if source.prompt_tokens and source.prompt_tokens > window:
        raise RecordError(f"--prompt-tokens {source.prompt_tokens} exceeds --window {window}")
    try:
        decoding = None if source.text else Decoding(max_new_tokens=new, **drawn)
    except ValidationError as error:
        raise RecordError(option_fault(error)) from None
    others = {name: value for name, value in kept._asdict().items() if name not in ("dense", "dense_bits", "matrices")}
    weights = stored("", kept.dense, kept.dense_bits, kept.matrices)
    others |= {name: weights[name] for name in ("dense_bytes", "dense_bits", "matrices")}
    return Plan(drafting=drafting, decoding=decoding, prompt_tokens=source.prompt_tokens, **others)


def _texts(source: Source, seed: int) -> Any:
    if source.text:
        return prompts.read_texts(source.text)
    if source.dataset:
        read = prompts.read_dataset(source.dataset, source.field)
    else:
        read = prompts.read_prompts(source.prompts or (), source.field)
    return read.chosen(seed if source.shuffle else None, source.limit)


def _work(source: Source, sampling: Sampling, texts: Any, tokenizer: Any, room: Room) -> Work:
    if source.text:
        return windows(texts, tokenizer, room, source.window or WINDOW, source.limit)
    new = sampling.max_new_tokens or NEW_TOKENS
    return encode(texts, tokenizer, room, new, source.chat, source.truncate)


# -- A GGUF file runs in llama.cpp instead of a checkpoint in torch


def _refuse_foreign(placement: Placement, sampling: Sampling, look_ahead: int | None) -> None:
    """Raises RecordError for options that mean nothing in llama.cpp; `look_ahead` is None if it was not typed."""
    if sampling.draft_model:
        raise RecordError("--draft-model cannot be combined with a GGUF file; record the model's checkpoint")
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


def _run_gguf(
    model: str,
    llama_lib: Path | None,
    placement: Placement,
    work_of: Callable[[Any, Any], Work],
    out: Path,
    plan: Plan,
    resume: bool,
) -> None:
    """Record the GGUF file; `work_of` makes the input from its tokenizer and its limits."""
    file, way = opened(model), Way(placement.threads or processors(), placement.dtype == "float32")
    with Engine(library_file(llama_lib)) as engine:
        say(f"loading {model}")
        running = loaded(engine, file)
        work = work_of(running.tokenizer, running.room)
        engine_words = f"{file.known.published.format}, llama.cpp, {way.words}"
        say(f"recording {file.known.name} ({engine_words}): {work.prompts}; {plan.words}")
        say(f"without look-ahead: {NO_LOOK_AHEAD}, so prefetch policies that need it cannot be replayed")
        write_recording(out, lambda progress: record_gguf(running, work, out, plan, way, resume, progress))
