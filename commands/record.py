"""`moereplay record`: run a real model on prompts and keep its routing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.interrupt import keeping, left_of
from commands.meter import Meter
from commands.options import NewTrace, complaint
from commands.terminal import say, say_wrote

if TYPE_CHECKING:
    from tracegen.checkpoint import Loaded
    from tracegen.folder import Folder
    from tracegen.plan import Plan
    from tracegen.tokens import Work

NEW_TOKENS, WINDOW = 64, 1024
#: Options that mean something only beside one of the three sources; None or False is "not given".
FOR_TEXT = ("window", "prompt_tokens")
FOR_PROMPTS = ("field", "chat", "truncate", "shuffle", "max_new_tokens", "temperature", "top_p", "top_k")

Model = Annotated[
    str, typer.Argument(help="Hugging Face id, local folder, or `miniature` (bundled).", show_default=False)
]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(help=".jsonl, .csv, .parquet (with --field) or .txt (one per line); .gz too; may be given again."),
]
Field = Annotated[str | None, typer.Option(help="What holds the prompt; dots reach inside, as in turns.0.")]
Text = Annotated[list[Path] | None, typer.Option(help="Text to read instead, cut into windows; may be given again.")]
Window = Annotated[int | None, typer.Option(min=2, help=f"Tokens of a --text window; default {WINDOW}.")]
PromptTokens = Annotated[
    int | None, typer.Option(min=1, help="Of a window: these in one pass, the rest one by one; default all in one.")
]
Dataset = Annotated[str | None, typer.Option(help="Hugging Face dataset instead, ID or ID:SPLIT (default test).")]
Chat = Annotated[bool, typer.Option("--chat", help="Each prompt as a user's message in the model's chat template.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut prompts that are too long; their end is kept.")]
Limit = Annotated[int | None, typer.Option(min=1, help="The first N requests only.")]
Shuffle = Annotated[bool, typer.Option("--shuffle", help="Prompts in an order drawn from --seed.")]
NewTokens = Annotated[int | None, typer.Option(min=1, help=f"At most so many per prompt; default {NEW_TOKENS}.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="Sample; default 0, greedy.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens with this probability together.")]
TopK = Annotated[int | None, typer.Option(min=0, help="Sample from the K likeliest tokens; 0 = all.")]
LookAhead = Annotated[int, typer.Option(min=0, help="Layers ahead whose gates are evaluated at every gate.")]
Logits = Annotated[bool, typer.Option("--logits/--no-logits", help="Router logits; policies that route need them.")]
Seed = Annotated[int, typer.Option(min=0, help="Of sampling and --shuffle.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
DeviceMap = Annotated[str | None, typer.Option(help="Spread over devices: auto, balanced, ...; needs accelerate.")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16.")]
Quantise = Annotated[str | None, typer.Option(help="bnb-8bit, bnb-4bit (not fused experts), fp8 (GPU).")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face id.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted recording, or begin.")]


def record(
    context: typer.Context,
    model: Model,
    out: NewTrace,
    prompts: Prompts = None,
    field: Field = None,
    text: Text = None,
    window: Window = None,
    prompt_tokens: PromptTokens = None,
    dataset: Dataset = None,
    chat: Chat = False,
    truncate: Truncate = False,
    limit: Limit = None,
    shuffle: Shuffle = False,
    max_new_tokens: NewTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    look_ahead: LookAhead = 2,
    logits: Logits = True,
    seed: Seed = 0,
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
    quantise: Quantise = None,
    revision: Revision = None,
    resume: Resume = False,
) -> None:
    """Record a model's routing, prompt by prompt, into a trace. Nothing of what the model computes is changed."""
    from tracegen.requirements import require_torch

    given = _checked(context.params)
    require_torch()
    with keeping(lambda: left_of(out, "recorded")):
        _record(given)


def _record(given: dict[str, Any]) -> None:
    """Everything that needs no torch is checked, then the model is loaded, then prompts are fitted to it."""
    from tracegen.errors import RecordError
    from tracegen.folder import require_tokenizer
    from tracegen.plan import refuse_taken

    out = given["out"]
    refuse_taken(out, given["resume"])
    plan, texts, folder = _plan(given), _texts(given), located_as(given)
    require_tokenizer(folder)
    loaded = load_from(folder, given)
    from tracegen.record import record as run  # torch: after all that can be refused without it

    work = _work(given, texts, loaded)
    say(f"recording {loaded.name} ({loaded.dtype}, {loaded.model.device}): {work.prompts}; {plan.words}")
    meter = Meter()
    try:
        trace = run(loaded, work, out, plan, given["resume"], meter.show)
    except RecordError as error:
        raise RecordError(f"{error}; {left_of(out, 'recorded')}") from error
    finally:
        meter.close()
    say_wrote(out, trace)
    say(f"mean nll {trace.read('nll').mean():.3f} nats per token")


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """The options, with one source of text. Raises RecordError for none, several, or options of another source."""
    from tracegen.errors import RecordError
    from tracegen.folder import MINIATURE

    sources = [name for name in ("prompts", "text", "dataset") if given[name]]
    if not sources and given["model"] == "miniature":
        return given | {"prompts": [MINIATURE / "prompts.jsonl"]}
    if len(sources) != 1:
        raise RecordError("what shall the model read? Give one of --prompts FILE, --text FILE, --dataset ID")
    foreign = FOR_PROMPTS if sources == ["text"] else FOR_TEXT
    for name in foreign:
        if given[name] not in (None, False):
            raise RecordError(f"--{name.replace('_', '-')} means nothing beside --{sources[0]}; leave one of them out")
    return given


def _plan(given: dict[str, Any]) -> Plan:
    from pydantic import ValidationError

    from tracegen.errors import RecordError
    from tracegen.plan import Decoding, Plan

    sampling = {name: given[name] for name in ("temperature", "top_p", "top_k") if given[name] is not None}
    if sampling.keys() - {"temperature"} and not sampling.get("temperature"):
        raise RecordError("--top-p and --top-k choose what to sample from; give a --temperature above 0 with them")
    if given["prompt_tokens"] and given["prompt_tokens"] > (given["window"] or WINDOW):
        raise RecordError(f"--prompt-tokens {given['prompt_tokens']} exceeds --window {given['window'] or WINDOW}")
    try:
        decoding = None if given["text"] else Decoding(max_new_tokens=given["max_new_tokens"] or NEW_TOKENS, **sampling)
    except ValidationError as error:
        raise RecordError(complaint(error)) from None
    named = ("prompt_tokens", "look_ahead", "logits", "seed")
    return Plan(decoding=decoding, **{name: given[name] for name in named})


def _texts(given: dict[str, Any]) -> Any:
    from tracegen import prompts

    if given["text"]:
        return prompts.read_texts(given["text"])
    if given["dataset"]:
        read = prompts.read_dataset(given["dataset"], given["field"])
    else:
        read = prompts.read_prompts(given["prompts"], given["field"])
    return read.chosen(given["seed"] if given["shuffle"] else None, given["limit"])


def located_as(given: dict[str, Any]) -> Folder:
    """The checkpoint of --model and its companions, checked as far as torch is not needed."""
    from tracegen.folder import located
    from tracegen.placement import check_placement

    check_placement(given["dtype"], given["device_map"], given["quantise"])
    return located(given["model"], given["revision"])


def load_from(folder: Folder, given: dict[str, Any]) -> Loaded:
    """Its model, as --device and its companions say."""
    say(f"loading {given['model']}")
    from tracegen.checkpoint import load  # torch takes seconds: the line above comes first

    named = ("device", "dtype", "device_map", "quantise")
    return load(folder, progress=sys.stderr.isatty(), **{name: given[name] for name in named})


def _work(given: dict[str, Any], texts: Any, loaded: Loaded) -> Work:
    from tracegen.record import room_of
    from tracegen.tokens import encode, windows

    if given["text"]:
        return windows(texts, loaded.tokenizer, room_of(loaded), given["window"] or WINDOW, given["limit"])
    new = given["max_new_tokens"] or NEW_TOKENS
    return encode(texts, loaded.tokenizer, room_of(loaded), new, given["chat"], given["truncate"])
