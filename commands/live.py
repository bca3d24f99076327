"""`moereplay live`: run a model under one policy set, with a simulated or a real slow tier."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from pydantic import ValidationError

from moereplay.analysis.metrics import measured
from moereplay.analysis.ranking import settings
from moereplay.analysis.tables import table
from moereplay.commands import model_options
from moereplay.commands.model_options import NEW_TOKENS, WINDOW, Offloading, Placement, measured_on, real_transfers
from moereplay.commands.options import LiveSettings, PolicyFiles, check_events, grouped, option_fault
from moereplay.commands.terminal import LiveMeter, keeping, say, say_wrote, show, show_json
from moereplay.results.errors import check_output
from moereplay.results.files import to_frame, write_events
from moereplay.simulator.config import ReplayConfig
from moereplay.tracegen.errors import RecordError, require_torch
from moereplay.tracegen.folder import MINIATURE, Folder, check_look_ahead, require_tokenizer
from moereplay.tracegen.live.requests import LiveRequest, check_live, requests_of
from moereplay.tracegen.plan import Decoding, refuse_taken
from moereplay.tracegen.precision import check_quantiser
from moereplay.tracegen.prompts import Prompts, read_prompts, read_texts
from moereplay.tracegen.tokens import encode, windows
from moereplay.traces.schema import Request, Trace
from moereplay.traces.store import open_trace
from moereplay.traces.texts import counted
from moereplay.traces.writer import TraceWriter

if TYPE_CHECKING:
    from moereplay.tracegen.checkpoint import Loaded
    from moereplay.tracegen.live.run import Live, Prepared
#: Options that require one kind of input; None or False means that the option was not given.
BESIDE = {
    "trace": (),
    "text": ("window", "prompt_tokens"),
    "prompts": ("field", "chat", "truncate", "max_new_tokens", "temperature"),
}
SHOWN = {
    "hit_rate": "hit rate",
    "accesses": "accesses",
    "misses": "misses",
    "collisions": "collisions",
    "gb_moved": "GB moved",
    "ttft_mean_ms": "TTFT ms",
    "tpot_ms": "TPOT ms",
}
TIMES = ("ttft_mean_ms", "tpot_ms")  #: labelled SIMULATED or MEASURED
JUDGED = {
    "tokens": "tokens predicted",
    "perplexity_base": "perplexity, unmodified",
    "perplexity": "perplexity",
    "mean_kl": "KL, nats per token",
    "top1": "same likeliest token",
    "differing": "tokens with other logits",
}


class Tokens(NamedTuple):
    """Input of the model: one of --trace, --text and --prompts."""

    trace: Annotated[Path | None, typer.Option(help="Trace whose recorded tokens are run again.")] = None
    text: model_options.Text = None
    window: model_options.Window = None
    prompt_tokens: model_options.PromptTokens = None
    prompts: model_options.Prompts = None
    field: model_options.Field = None
    chat: model_options.Chat = False
    truncate: model_options.Truncate = False
    max_new_tokens: model_options.NewTokens = None
    temperature: model_options.Temperature = None
    limit: model_options.Limit = None


class Outcome(NamedTuple):
    """Outputs of the run in addition to its counters."""

    quality: Annotated[bool, typer.Option(help="Also run the unmodified model, and compare the output.")] = True
    look_ahead: model_options.LookAhead = 0
    record_to: Annotated[Path | None, typer.Option("--record", help="Trace to write of the run, NAME.zarr.")] = None
    events: Annotated[Path | None, typer.Option(help="Event log to write (.parquet or .csv).")] = None


@grouped
def live(
    model: model_options.Model,
    *,
    tokens: Tokens,
    settings: LiveSettings,
    policy_file: PolicyFiles = None,
    offloading: Offloading,
    kept: Outcome,
    placement: Placement,
    quantiser: model_options.Quantiser = "affine",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Run a model under one policy set and execute its decisions. Capacity, link and time are SIMULATED.

    With --slow-tier, experts are read from there into a cache of that capacity, and times are MEASURED.
    """
    tokens = _checked(model, tokens)
    config = settings.only("live")
    real = offloading.checked(config, settings, placement)
    require_torch()
    check_quantiser(quantiser)
    with keeping(lambda: "nothing was written"):
        _check_outputs(config, kept)
        read = _read(tokens, placement.located(model))
        check_look_ahead(read.folder, kept.look_ahead)
        loaded = placement.loaded(model, read.folder)
        ready = _prepared(tokens, config, read, loaded, {"lookahead": kept.look_ahead, "quantiser": quantiser})
        with real_transfers(ready, real) as transfers:
            ran = _run(ready, kept, partial(ready.run, transfers=transfers, eager=offloading.eager))
    if kept.events:
        write_events(kept.events, ran.result.events)
        say(f"wrote {kept.events}")
    if as_json:
        judged = ran.quality
        rows = judged and {"total": judged.total.row(), "per_request": [score.row() for score in judged.per_request]}
        show_json(ran.result.to_json() | {"quality": rows, "stored": [expert._asdict() for expert in ran.stored]})
    else:
        _report(ran, sum(map(len, ran.executed)))


def _checked(model: str, tokens: Tokens) -> Tokens:
    """Return the only input. Raises RecordError for none, several, or options of another input."""
    sources = [name for name in BESIDE if getattr(tokens, name)]
    if not sources and model == "miniature":
        tokens, sources = tokens._replace(prompts=[MINIATURE / "prompts.jsonl"]), ["prompts"]
    if len(sources) != 1:
        raise RecordError("expected exactly one input: pass one of --trace, --text, --prompts")
    for name in (name for other in BESIDE for name in BESIDE[other] if other not in sources):
        if getattr(tokens, name) not in (None, False):
            raise RecordError(f"--{name.replace('_', '-')} cannot be combined with --{sources[0]}")
    return tokens


class _Input(NamedTuple):
    """Input of a live run, read and checked before torch is imported."""

    folder: Folder  #: of the model
    decoding: Decoding | None
    source: Trace | Prompts  #: from --trace, or from --text or --prompts


def _read(tokens: Tokens, folder: Folder) -> _Input:
    """Read the input, so that errors are raised before the model is loaded."""
    decoding = _decoding(tokens)
    if tokens.trace:
        opened = open_trace(tokens.trace)
        requests_of(opened, 1)  # raises RecordError if it has no tokens
        return _Input(folder, decoding, opened)
    read = _Input(folder, decoding, _texts(tokens))
    require_tokenizer(folder)
    return read


def _check_outputs(config: ReplayConfig, kept: Outcome) -> None:
    """Raises errors of the configuration and of outputs before anything is read."""
    check_live(config)
    if kept.record_to:
        refuse_taken(kept.record_to, resume=False, resumable=False)
    for path in filter(None, (kept.record_to, kept.events)):
        check_output(path)
    check_events(kept.events)


def _decoding(tokens: Tokens) -> Decoding | None:
    """Return the decoding of prompts, None for teacher-forced text."""
    if not tokens.prompts:
        return None
    new = tokens.max_new_tokens or NEW_TOKENS
    try:
        return Decoding(max_new_tokens=new, temperature=tokens.temperature or 0.0)
    except ValidationError as error:
        raise RecordError(option_fault(error)) from None


def _texts(tokens: Tokens) -> Prompts:
    if tokens.text:
        return read_texts(tokens.text)
    return read_prompts(tokens.prompts or (), tokens.field).chosen(limit=tokens.limit)


def _prepared(tokens: Tokens, config: ReplayConfig, read: _Input, loaded: Loaded, how: Mapping[str, Any]) -> Prepared:
    """Check the model and prepare its requests; `how` are further arguments of `prepare`."""
    from moereplay.tracegen.live.run import check_same_model, prepare, proven

    modules = proven(loaded)
    if isinstance(read.source, Trace):
        check_same_model(read.source, loaded, modules)
    to_run, prompts = _to_run(tokens, read.source, loaded)
    return prepare(loaded, to_run, config, decoding=read.decoding, prompts=prompts, modules=modules, **how)


def _to_run(tokens: Tokens, source: Trace | Prompts, loaded: Loaded) -> tuple[list[LiveRequest], str]:
    """Return the requests, and their description for a trace."""
    from moereplay.tracegen.record import room_of

    room, limit = room_of(loaded), tokens.limit
    if isinstance(source, Trace):
        return requests_of(source, limit), f"{source.header.provenance.prompts}; trace {source.digest}"
    if tokens.text:
        work = windows(source, loaded.tokenizer, room, tokens.window or WINDOW, limit)
    else:
        work = encode(source, loaded.tokenizer, room, tokens.max_new_tokens or NEW_TOKENS, tokens.chat, tokens.truncate)
    at_once = tokens.prompt_tokens or sys.maxsize
    return [LiveRequest(tuple(ids.tolist()), min(at_once, len(ids))) for ids in work.sequences], work.prompts


def _run(ready: Prepared, kept: Outcome, run: Callable[..., Live]) -> Live:
    """Run the requests. With --record rows are written request by request; an unfinished trace is removed."""
    meter, out = LiveMeter(len(ready.to_run)), kept.record_to
    if out:
        with TraceWriter.create(out, ready.header, ready.modules.bias, resumable=False) as writer:
            ran = _metered(run, kept, meter, writer.append)
            say_wrote(out, writer.finish())
    else:
        ran = _metered(run, kept, meter, lambda request: None)
    seconds = time.monotonic() - meter.began
    say(f"ran {counted(meter.tokens, 'token')} in {seconds:.1f} s, {meter.tokens / seconds:.1f} tokens/s")
    return ran


def _metered(run: Callable[..., Live], kept: Outcome, meter: LiveMeter, append: Callable[[Request], None]) -> Live:
    """Pass each request's rows to `append` when it ends, so that they do not stay in memory."""

    def keep(request: Request) -> None:
        append(request)
        meter.done += 1

    try:
        return run(kept.quality, log=bool(kept.events), progress=meter.passed, keep=keep)
    finally:
        meter.close()


def _report(ran: Live, tokens: int) -> None:
    row = measured(to_frame([ran.result], [None])).row(0, named=True)
    about = ran.result.about
    first = f"{about['label']}: {about['model']}, {counted(len(ran.executed), 'request')}, {counted(tokens, 'token')}"
    storage = [  # of experts at few bits: the simulator's bits, and the bits as stored
        f"experts at {expert.bits:g} bits: {expert.quantiser}, {expert.bits_per_weight:.2f} bits per weight"
        for expert in ran.stored
    ]
    show(first, *measured_on(about), *settings([ran.result]), *storage, "")
    times = "MEASURED" if about["seconds"] == "measured" else "SIMULATED"
    shown = [(f"{times} {what}" if name in TIMES else what, row[name]) for name, what in SHOWN.items()]
    show(table([{"of the run": what, "": value} for what, value in shown]))
    if ran.quality:
        judged = [{"of its output": what, "": getattr(ran.quality.total, name)} for name, what in JUDGED.items()]
        show(table(judged))
