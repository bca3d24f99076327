"""`moereplay live`: a real model under one policy set, its cache, link and time simulated."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from commands import options, record
from commands.interrupt import keeping
from commands.meter import Meter
from commands.terminal import say, say_wrote, show

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulator.config import ReplayConfig
    from tracegen.checkpoint import Loaded
    from tracegen.folder import Folder
    from tracegen.live.requests import Ask
    from tracegen.live.run import Live, Prepared
    from tracegen.plan import Decoding
    from tracegen.prompts import Prompts
    from traces.schema import Request, Trace

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
    "ttft_mean_ms": "SIMULATED TTFT ms",
    "tpot_ms": "SIMULATED TPOT ms",
}
JUDGED = {
    "tokens": "tokens predicted",
    "perplexity_base": "perplexity, unmodified",
    "perplexity": "perplexity",
    "mean_kl": "KL, nats per token",
    "top1": "same likeliest token",
}


def live(
    context: typer.Context,  # settings are read from here, by name
    model: record.Model,
    trace: Annotated[Path | None, typer.Option(help="Run a trace's tokens again, as they were recorded.")] = None,
    text: record.Text = None,
    window: record.Window = None,
    prompt_tokens: record.PromptTokens = None,
    prompts: record.Prompts = None,
    field: record.Field = None,
    chat: record.Chat = False,
    truncate: record.Truncate = False,
    max_new_tokens: record.NewTokens = None,
    temperature: record.Temperature = None,
    limit: record.Limit = None,
    preset: options.Presets = "",
    capacity: options.Capacity = "5%",
    eviction: options.Lists = "lru",
    prefetch: options.Lists = "none",
    miss: options.Lists = "fetch",
    routing: options.Lists = "standard",
    platform: options.Platform = "a100-5gbps",
    contract: options.Contract = "atomic",
    scope: options.Scope = "global",
    reset: options.Reset = "never",
    prefetch_at: options.PrefetchAt = "gate",
    prefetch_admission: options.PrefetchAdmission = "evict",
    warm: options.Warm = None,
    profile: options.Profile = None,
    seed: Annotated[int, typer.Option(min=0, help="For policies that draw, and for sampling.")] = 0,
    policy_file: options.PolicyFiles = None,
    quality: Annotated[bool, typer.Option(help="Run the unmodified model beside it and compare.")] = True,
    look_ahead: record.LookAhead = 0,
    record_to: Annotated[Path | None, typer.Option("--record", help="Write the run as a trace, NAME.zarr.")] = None,
    events: Annotated[Path | None, typer.Option(help="Event log (.parquet or .csv).")] = None,
    device: record.Device = "auto",
    device_map: record.DeviceMap = None,
    dtype: record.Dtype = "auto",
    quantise: record.Quantise = None,
    revision: record.Revision = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Run a model under one policy set: what the policies decide is executed, capacity, link and time are SIMULATED."""
    from tracegen.requirements import require_torch

    given = _checked(context.params)
    config = _config(context, preset, warm, profile, seed)
    require_torch()
    with keeping(lambda: "nothing was written"):
        ran = _run(_prepared(given, config, _read(given, config)), given)
    if events:
        _write_events(events, ran)
    if as_json:
        print(json.dumps(ran.result.to_json() | {"quality": _quality(ran)}, indent=1))
    else:
        _report(ran, sum(map(len, ran.executed)))


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """The options, with one source of tokens. Raises RecordError for none, several, or options of another source."""
    from tracegen.errors import RecordError
    from tracegen.folder import MINIATURE

    sources = [name for name in BESIDE if given[name]]
    if not sources and given["model"] == "miniature":
        given, sources = given | {"prompts": [MINIATURE / "prompts.jsonl"]}, ["prompts"]
    if len(sources) != 1:
        raise RecordError("what shall the model run? Give one of --trace NAME.zarr, --text FILE, --prompts FILE")
    for name in (name for other in BESIDE for name in BESIDE[other] if other not in sources):
        if given[name] not in (None, False):
            raise RecordError(f"--{name.replace('_', '-')} means nothing beside --{sources[0]}; leave one of them out")
    return given


def _config(context: typer.Context, preset: str, warm: Path | None, profile: Path | None, seed: int) -> ReplayConfig:
    """The one configuration that the options name."""
    from simulator.errors import ConfigError
    from sweeps.grid import expand

    named = {"warm": options.named_experts("--warm", warm), "profile": options.named_experts("--profile", profile)}
    fixed = {"seed": seed} | named
    if preset:
        configs = list(options.preset_configs(context, preset, fixed).values())
    else:
        configs = expand(options.grid(context), fixed)
    if len(configs) > 1:
        raise ConfigError(f"a live run takes one configuration, these lists make {len(configs)}; name one value each")
    return configs[0]


class _Input(NamedTuple):
    """What a live run is given beside its settings, read and checked before torch is imported."""

    folder: Folder  #: of the model
    decoding: Decoding | None
    source: Trace | Prompts  #: of --trace, or of --text or --prompts


def _read(given: dict[str, Any], config: ReplayConfig) -> _Input:
    """What can be refused without the model is refused before it is loaded."""
    from results.outputs import check_output
    from tracegen.folder import require_tokenizer
    from tracegen.live.requests import check_live
    from tracegen.plan import refuse_taken

    check_live(config)
    if given["record_to"]:
        refuse_taken(given["record_to"], resume=False)
    for path in filter(None, (given["record_to"], given["events"])):
        check_output(path)
    read = _Input(record.located_as(given), _decoding(given), _opened(given) if given["trace"] else _texts(given))
    if not given["trace"]:
        require_tokenizer(read.folder)
    return read


def _decoding(given: dict[str, Any]) -> Decoding | None:
    """How prompts are continued; None for teacher-forced text."""
    from pydantic import ValidationError

    from tracegen.errors import RecordError
    from tracegen.plan import Decoding

    if not given["prompts"]:
        return None
    new = given["max_new_tokens"] or record.NEW_TOKENS
    try:
        return Decoding(max_new_tokens=new, temperature=given["temperature"] or 0.0)
    except ValidationError as error:
        raise RecordError(options.complaint(error)) from None


def _opened(given: dict[str, Any]) -> Trace:
    """The trace to run again. Raises RecordError if it holds no tokens."""
    from tracegen.live.requests import requests_of
    from traces.store import open_trace

    opened = open_trace(given["trace"])
    requests_of(opened, 1)
    return opened


def _texts(given: dict[str, Any]) -> Prompts:
    from tracegen.prompts import read_prompts, read_texts

    if given["text"]:
        return read_texts(given["text"])
    return read_prompts(given["prompts"], given["field"]).chosen(limit=given["limit"])


def _prepared(given: dict[str, Any], config: ReplayConfig, read: _Input) -> Prepared:
    """The model, loaded and checked, with its requests."""
    loaded = record.load_from(read.folder, given)
    from tracegen.live.run import check_same_model, prepare, proven  # torch: after all that can be refused without it
    from traces.schema import Trace

    modules = proven(loaded)
    if isinstance(read.source, Trace):
        check_same_model(read.source, loaded, modules)
    asks, called = _asks(given, read.source, loaded)
    decoding, ahead = read.decoding, given["look_ahead"]
    return prepare(loaded, asks, config, decoding=decoding, lookahead=ahead, prompts=called, modules=modules)


def _asks(given: dict[str, Any], source: Trace | Prompts, loaded: Loaded) -> tuple[list[Ask], str]:
    """The requests, and what a trace calls them."""
    from tracegen.live.requests import Ask, requests_of
    from tracegen.record import room_of
    from tracegen.tokens import encode, windows
    from traces.schema import Trace

    room, limit = room_of(loaded), given["limit"]
    if isinstance(source, Trace):
        return requests_of(source, limit), f"{source.header.provenance.prompts}; trace {source.digest}"
    if given["text"]:
        work = windows(source, loaded.tokenizer, room, given["window"] or record.WINDOW, limit)
    else:
        new = given["max_new_tokens"] or record.NEW_TOKENS
        work = encode(source, loaded.tokenizer, room, new, given["chat"], given["truncate"])
    at_once = given["prompt_tokens"] or sys.maxsize
    return [Ask(tuple(ids.tolist()), min(at_once, len(ids))) for ids in work.sequences], work.prompts


class _Pace:
    """Requests and tokens so far, shown after every pass."""

    def __init__(self, requests: int) -> None:
        self.requests, self.done, self.tokens = requests, 0, 0
        self.meter, self.began = Meter(), time.monotonic()

    def passed(self, tokens: int) -> None:
        from tracegen.record import Progress

        self.tokens += tokens
        self.meter.show(Progress(self.done, self.requests, 0, self.tokens, time.monotonic() - self.began))


def _run(ready: Prepared, given: dict[str, Any]) -> Live:
    """The run. Rows are written request by request; an interrupted run removes them, as it cannot be resumed."""
    from tracegen.plan import partial_of

    pace, out = _Pace(len(ready.asks)), given["record_to"]
    try:
        ran = _recorded(ready, given, pace, out) if out else _kept(ready, given, pace, lambda request: None)
    except BaseException:
        if out:
            shutil.rmtree(partial_of(out), ignore_errors=True)
        raise
    seconds = time.monotonic() - pace.began
    say(f"ran {pace.tokens:,} tokens in {seconds:.1f} s, {pace.tokens / seconds:.1f} tokens/s")
    return ran


def _recorded(ready: Prepared, given: dict[str, Any], pace: _Pace, out: Path) -> Live:
    from traces.writer import TraceWriter

    with TraceWriter.create(out, ready.header, ready.modules.bias) as writer:
        ran = _kept(ready, given, pace, writer.append)
        say_wrote(out, writer.finish())
    return ran


def _kept(ready: Prepared, given: dict[str, Any], pace: _Pace, append: Callable[[Request], None]) -> Live:
    """Rows go to `append` and are not held in memory."""

    def keep(request: Request) -> None:
        append(request)
        pace.done += 1

    try:
        return ready.run(given["quality"], log=bool(given["events"]), progress=pace.passed, keep=keep)
    finally:
        pace.meter.close()


def _report(ran: Live, tokens: int) -> None:
    from analysis.heading import settings
    from analysis.metrics import measured
    from analysis.tables import table
    from results.write import to_frame

    row = measured(to_frame([ran.result], [None])).row(0, named=True)
    first = (
        f"{ran.result.about['label']}: {ran.result.about['model']}, {len(ran.executed):,} requests, {tokens:,} tokens"
    )
    show(first, *settings([ran.result]), "")
    show(table([{heading: row[name] for name, heading in SHOWN.items()}]))
    if ran.quality:
        show(table([{heading: getattr(ran.quality.total, name) for name, heading in JUDGED.items()}]))


def _quality(ran: Live) -> dict[str, Any] | None:
    if ran.quality is None:
        return None
    return {"total": ran.quality.total.row(), "per_request": [score.row() for score in ran.quality.per_request]}


def _write_events(path: Path, ran: Live) -> None:
    from results.write import write_events

    write_events(path, ran.result.events)
    say(f"wrote {path}")
