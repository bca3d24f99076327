"""`moereplay live`: a real model under one policy set; its cache, link and time simulated, or measured."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moereplay.commands import model_options
from moereplay.commands.model_options import NEW_TOKENS, WINDOW, Offloading, Placement, measured_on, real_transfers
from moereplay.commands.options import LiveSettings, PolicyFiles, check_events, grouped, option_fault
from moereplay.commands.progress import RequestMeter
from moereplay.commands.terminal import keeping, say, say_wrote, show, show_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moereplay.commands.options import Given
    from moereplay.simulator.config import ReplayConfig
    from moereplay.tracegen.checkpoint import Loaded
    from moereplay.tracegen.folder import Folder
    from moereplay.tracegen.live.requests import LiveRequest
    from moereplay.tracegen.live.run import Live, Prepared
    from moereplay.tracegen.live.tiers import Stored
    from moereplay.tracegen.plan import Decoding
    from moereplay.tracegen.prompts import Prompts
    from moereplay.traces.schema import Request, Trace

#: Options that mean something only beside one of the sources; None or False is "not given".
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
TIMES = ("ttft_mean_ms", "tpot_ms")  #: said to be SIMULATED or MEASURED
JUDGED = {
    "tokens": "tokens predicted",
    "perplexity_base": "perplexity, unmodified",
    "perplexity": "perplexity",
    "mean_kl": "KL, nats per token",
    "top1": "same likeliest token",
    "differing": "tokens with other logits",
}


class Tokens(NamedTuple):
    """What the model runs: one of --trace, --text and --prompts, with the options of each."""

    trace: Annotated[Path | None, typer.Option(help="Run a trace's tokens again, as they were recorded.")] = None
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
    """What is kept of the run beside its counters."""

    quality: Annotated[bool, typer.Option(help="Run the unmodified model beside it and compare.")] = True
    look_ahead: model_options.LookAhead = 0
    record_to: Annotated[Path | None, typer.Option("--record", help="Write the run as a trace, NAME.zarr.")] = None
    events: Annotated[Path | None, typer.Option(help="Event log (.parquet or .csv).")] = None


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
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Run a model under one policy set: what the policies decide is executed, capacity, link and time are SIMULATED.

    With --slow-tier experts are read from there into a cache of that capacity, and times are MEASURED.
    """
    from moereplay.tracegen.errors import require_torch
    from moereplay.tracegen.folder import check_look_ahead
    from moereplay.tracegen.precision import check_quantiser

    tokens = _checked(model, tokens)
    config = _config(settings)
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
        _write_events(kept.events, ran)
    if as_json:
        stored = [each._asdict() for each in ran.stored]
        show_json(ran.result.to_json() | {"quality": _quality(ran), "stored": stored})
    else:
        _report(ran, sum(map(len, ran.executed)))


def _checked(model: str, tokens: Tokens) -> Tokens:
    """The one source of tokens. Raises RecordError for none, several, or options of another source."""
    from moereplay.tracegen.errors import RecordError
    from moereplay.tracegen.folder import MINIATURE

    sources = [name for name in BESIDE if getattr(tokens, name)]
    if not sources and model == "miniature":
        tokens, sources = tokens._replace(prompts=[MINIATURE / "prompts.jsonl"]), ["prompts"]
    if len(sources) != 1:
        raise RecordError("what shall the model run? Give one of --trace NAME.zarr, --text FILE, --prompts FILE")
    for name in (name for other in BESIDE for name in BESIDE[other] if other not in sources):
        if getattr(tokens, name) not in (None, False):
            raise RecordError(f"--{name.replace('_', '-')} means nothing beside --{sources[0]}; leave one of them out")
    return tokens


def _config(settings: Given) -> ReplayConfig:
    """The one configuration that the options name."""
    from moereplay.simulator.errors import ConfigError
    from moereplay.sweeps.grid import expand

    fixed = settings.fixed()
    configs = list(settings.of_presets(fixed).values()) if settings.preset else expand(settings.lists(), fixed)
    if len(configs) > 1:
        raise ConfigError(f"a live run takes one configuration, these lists make {len(configs)}; name one value each")
    return configs[0]


class _Input(NamedTuple):
    """What a live run is given beside its settings, read and checked before torch is imported."""

    folder: Folder  #: of the model
    decoding: Decoding | None
    source: Trace | Prompts  #: of --trace, or of --text or --prompts


def _read(tokens: Tokens, folder: Folder) -> _Input:
    """What can be refused without the model is refused before it is loaded."""
    from moereplay.tracegen.folder import require_tokenizer

    read = _Input(folder, _decoding(tokens), _opened(tokens.trace) if tokens.trace else _texts(tokens))
    if not tokens.trace:
        require_tokenizer(folder)
    return read


def _check_outputs(config: ReplayConfig, kept: Outcome) -> None:
    """Raises what refuses a configuration, or an output, before anything is read."""
    from moereplay.results.outputs import check_output
    from moereplay.tracegen.live.requests import check_live
    from moereplay.tracegen.plan import refuse_taken

    check_live(config)
    if kept.record_to:
        refuse_taken(kept.record_to, resume=False, resumable=False)
    for path in filter(None, (kept.record_to, kept.events)):
        check_output(path)
    check_events(kept.events)


def _decoding(tokens: Tokens) -> Decoding | None:
    """How prompts are continued; None for teacher-forced text."""
    from pydantic import ValidationError

    from moereplay.tracegen.errors import RecordError
    from moereplay.tracegen.plan import Decoding

    if not tokens.prompts:
        return None
    new = tokens.max_new_tokens or NEW_TOKENS
    try:
        return Decoding(max_new_tokens=new, temperature=tokens.temperature or 0.0)
    except ValidationError as error:
        raise RecordError(option_fault(error)) from None


def _opened(path: Path) -> Trace:
    """The trace to run again. Raises RecordError if it holds no tokens."""
    from moereplay.tracegen.live.requests import requests_of
    from moereplay.traces.store import open_trace

    opened = open_trace(path)
    requests_of(opened, 1)
    return opened


def _texts(tokens: Tokens) -> Prompts:
    from moereplay.tracegen.prompts import read_prompts, read_texts

    if tokens.text:
        return read_texts(tokens.text)
    return read_prompts(tokens.prompts or (), tokens.field).chosen(limit=tokens.limit)


def _prepared(tokens: Tokens, config: ReplayConfig, read: _Input, loaded: Loaded, how: Mapping[str, Any]) -> Prepared:
    """The model, checked, with its requests; `how` are further arguments of `prepare`."""
    from moereplay.tracegen.live.run import (  # torch: after all that can be refused without it
        check_same_model,
        prepare,
        proven,
    )
    from moereplay.traces.schema import Trace

    modules = proven(loaded)
    if isinstance(read.source, Trace):
        check_same_model(read.source, loaded, modules)
    to_run, called = _to_run(tokens, read.source, loaded)
    return prepare(loaded, to_run, config, decoding=read.decoding, prompts=called, modules=modules, **how)


def _to_run(tokens: Tokens, source: Trace | Prompts, loaded: Loaded) -> tuple[list[LiveRequest], str]:
    """The requests, and what a trace calls them."""
    from moereplay.tracegen.live.requests import LiveRequest, requests_of
    from moereplay.tracegen.record import room_of
    from moereplay.tracegen.tokens import encode, windows
    from moereplay.traces.schema import Trace

    room, limit = room_of(loaded), tokens.limit
    if isinstance(source, Trace):
        return requests_of(source, limit), f"{source.header.provenance.prompts}; trace {source.digest}"
    if tokens.text:
        work = windows(source, loaded.tokenizer, room, tokens.window or WINDOW, limit)
    else:
        work = encode(source, loaded.tokenizer, room, tokens.max_new_tokens or NEW_TOKENS, tokens.chat, tokens.truncate)
    at_once = tokens.prompt_tokens or sys.maxsize
    return [LiveRequest(tuple(ids.tolist()), min(at_once, len(ids))) for ids in work.sequences], work.prompts


class _Pace:
    """Requests and tokens so far, shown after every pass."""

    def __init__(self, requests: int) -> None:
        self.requests, self.done, self.tokens = requests, 0, 0
        self.meter, self.began = RequestMeter(), time.monotonic()

    def passed(self, tokens: int) -> None:
        from moereplay.tracegen.record import Progress

        self.tokens += tokens
        self.meter.show(Progress(self.done, self.requests, 0, self.tokens, time.monotonic() - self.began))


def _run(ready: Prepared, kept: Outcome, run: Callable[..., Live]) -> Live:
    """The run. Rows are written request by request; the writer removes those of a run that does not end."""
    pace, out = _Pace(len(ready.to_run)), kept.record_to
    ran = _recorded(ready, kept, pace, out, run) if out else _kept(run, kept, pace, lambda request: None)
    seconds = time.monotonic() - pace.began
    say(f"ran {pace.tokens:,} tokens in {seconds:.1f} s, {pace.tokens / seconds:.1f} tokens/s")
    return ran


def _recorded(ready: Prepared, kept: Outcome, pace: _Pace, out: Path, run: Callable[..., Live]) -> Live:
    from moereplay.traces.writer import TraceWriter

    with TraceWriter.create(out, ready.header, ready.modules.bias, resumable=False) as writer:
        ran = _kept(run, kept, pace, writer.append)
        say_wrote(out, writer.finish())
    return ran


def _kept(run: Callable[..., Live], kept: Outcome, pace: _Pace, append: Callable[[Request], None]) -> Live:
    """Rows go to `append` and are not held in memory."""

    def keep(request: Request) -> None:
        append(request)
        pace.done += 1

    try:
        return run(kept.quality, log=bool(kept.events), progress=pace.passed, keep=keep)
    finally:
        pace.meter.close()


def _report(ran: Live, tokens: int) -> None:
    from moereplay.analysis.metrics import measured
    from moereplay.analysis.ranking import settings
    from moereplay.analysis.tables import counted, table
    from moereplay.results.files import to_frame

    row = measured(to_frame([ran.result], [None])).row(0, named=True)
    about = ran.result.about
    first = f"{about['label']}: {about['model']}, {counted(len(ran.executed), 'request')}, {counted(tokens, 'token')}"
    show(first, *measured_on(about), *settings([ran.result]), *map(_told, ran.stored), "")
    times = "MEASURED" if about["seconds"] == "measured" else "SIMULATED"
    shown = [(f"{times} {what}" if name in TIMES else what, row[name]) for name, what in SHOWN.items()]
    show(table([{"of the run": what, "": value} for what, value in shown]))
    if ran.quality:
        judged = [{"of its output": what, "": getattr(ran.quality.total, name)} for name, what in JUDGED.items()]
        show(table(judged))


def _told(stored: Stored) -> str:
    """How experts at few bits were stored, beside what the simulator charges for them."""
    return f"experts at {stored.bits:g} bits: {stored.quantiser}, {stored.bits_per_weight:.2f} bits per weight"


def _quality(ran: Live) -> dict[str, Any] | None:
    if ran.quality is None:
        return None
    return {"total": ran.quality.total.row(), "per_request": [score.row() for score in ran.quality.per_request]}


def _write_events(path: Path, ran: Live) -> None:
    from moereplay.results.files import write_events

    write_events(path, ran.result.events)
    say(f"wrote {path}")
