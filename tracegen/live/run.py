"""The real model under a policy set: the reference engine fed by its gates; capacity, link and time are simulated.

    to_run = requests_of(trace)                      # or your own texts and prompts
    live = run(loaded, to_run, config)               # live.result, live.quality, live.executed
    replay(live.trace(), config)                   # makes the same decisions: the closed loop

Text that is given goes through the model as given (teacher-forced): the prompt in one pass, then one token per pass on
the key-value cache. With `decoding`, the prompt is continued under the policies. Beside the modified model the
unmodified one reads the same tokens, with a cache of its own, for `quality`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from moereplay.results.result import Result
from moereplay.simulator.config import KINDS, Origin, ReplayConfig
from moereplay.simulator.reference.engine import FinishedRun
from moereplay.simulator.replay import Plan, plan_for, report, report_measured
from moereplay.tracegen.capture import check
from moereplay.tracegen.checkpoint import Loaded
from moereplay.tracegen.decoding import Sampler, endings, seed_of
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.experts import Stored, check_computable, implemented, said, tiers_of
from moereplay.tracegen.live.offloaded import Transfers
from moereplay.tracegen.live.quality import Quality, Readers
from moereplay.tracegen.live.requests import CAPABILITIES, LiveRequest, check_live, requests_of
from moereplay.tracegen.live.source import Emulation, changes_experts, depth_needed, rounding
from moereplay.tracegen.modules import MoeModules, discover
from moereplay.tracegen.plan import Decoding
from moereplay.tracegen.plan import Plan as Recording
from moereplay.tracegen.precision import DEFAULT, check_quantiser
from moereplay.tracegen.record import header_of, room_of
from moereplay.tracegen.tokens import Room, Work
from moereplay.traces.documents import canonical_digest
from moereplay.traces.schema import Header, Request, Trace, memory_trace

__all__ = ["Live", "LiveRequest", "Prepared", "check_same_model", "prepare", "proven", "requests_of", "run"]


@dataclass(frozen=True)
class Live:
    """Outcome of a live run."""

    result: Result  #: label "LIVE, emulated" or "LIVE, measured"; rows, counters and events as of a replay
    quality: Quality | None
    header: Header  #: of the trace that the run is
    router_bias: np.ndarray | None  #: (L, E)
    requests: tuple[Request, ...]  #: the model's own choice and logits, after the policies' earlier changes
    executed: tuple[np.ndarray, ...]  #: per request (T, L, k) int16: what each token ran, -1 dropped
    stored: tuple[Stored, ...] = ()  #: of every width at which experts ran with restored weights

    def trace(self) -> Trace:
        """Return the run as a trace in memory."""
        return memory_trace(self.header, list(self.requests), self.router_bias)


def proven(loaded: Loaded) -> MoeModules:
    """Return the model's modules, after the self-check. Raises RecordError."""
    modules = discover(loaded.model)
    check(modules)
    return modules


def check_same_model(trace: Trace, loaded: Loaded, modules: MoeModules) -> None:
    """Raises RecordError unless the trace may have been recorded from this very model."""
    name, ours, theirs = trace.path or "this trace", modules.geometry, trace.geometry
    for what in ("layers", "experts", "k", "router"):
        if getattr(ours, what) != getattr(theirs, what):
            found = f"{what} {getattr(theirs, what)}, {loaded.name} has {getattr(ours, what)}"
            raise RecordError(f"{name} belongs to another model: {found}")
    provenance = trace.header.provenance
    if provenance.source_sha256 not in ("", loaded.weights_sha256):
        was = f"was recorded from other weights ({provenance.model}) than those of {loaded.name}"
        raise RecordError(f"{name} {was}; pass the checkpoint that it was recorded from")


def run(
    loaded: Loaded,
    to_run: Sequence[LiveRequest],
    config: ReplayConfig,
    *,
    decoding: Decoding | None = None,
    lookahead: int = 0,
    modules: MoeModules | None = None,
    quantiser: str = DEFAULT,
    quality: bool = True,
    log: bool = False,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Live:
    """Call `prepare`, then `Prepared.run`."""
    how: dict[str, Any] = {"decoding": decoding, "lookahead": lookahead, "modules": modules, "quantiser": quantiser}
    ready = prepare(loaded, to_run, config, **how)
    return ready.run(quality=quality, log=log, progress=progress)


def prepare(
    loaded: Loaded,
    to_run: Sequence[LiveRequest],
    config: ReplayConfig,
    *,
    decoding: Decoding | None = None,
    lookahead: int = 0,
    prompts: str = "",
    modules: MoeModules | None = None,
    quantiser: str = DEFAULT,
) -> Prepared:
    """Check everything that can be checked before the model runs.

    `decoding` continues every prompt, seeded by the configuration's seed. `lookahead` gates are recorded, or as many
    as the prefetch policy needs. `prompts` is the name of the requests in a trace. `modules` is the model's, `proven`.
    `quantiser` stores the experts that policies want at few bits (`tracegen.precision`).
    Raises ConfigError or PolicyError for what cannot run live, RecordError for what the model or the quantiser cannot.
    """
    check_live(config)
    check_quantiser(quantiser)
    modules = modules or proven(loaded)
    _check_requests(to_run, room_of(loaded), decoding)
    plan = plan_for(_origin(loaded, modules, to_run, decoding), config)
    if changes_experts(plan, modules.geometry.expert_bits):
        check_computable([site.experts for site in modules.sites])
    depth = max(lookahead, depth_needed(plan))
    header = header_of(
        loaded, modules, Work((), prompts), Recording(decoding=decoding, look_ahead=depth, seed=config.seed)
    )
    stored = said(quantiser, rounding(plan, modules.geometry.expert_bits))
    noted = _noted(header, plan, stored)
    return Prepared(loaded, tuple(to_run), decoding, modules, plan, noted, quantiser, stored)


@dataclass(frozen=True)
class Prepared:
    """A live run that can begin."""

    loaded: Loaded
    to_run: tuple[LiveRequest, ...]
    decoding: Decoding | None
    modules: MoeModules
    plan: Plan
    header: Header  #: of the trace that the run will be
    quantiser: str = DEFAULT
    stored: str = ""  #: how experts at few bits are stored, in words; empty where none are

    def run(
        self,
        quality: bool = True,
        log: bool = False,
        progress: Callable[[int], None] = lambda tokens: None,
        keep: Callable[[Request], None] | None = None,
        transfers: Transfers | None = None,
        eager: bool = False,
    ) -> Live:
        """Run every request; the same model and arguments give the same result, but for times with `transfers`.

        `progress` is called with the tokens of every pass. With `keep`, rows go there as requests end and are not kept
        here. With `transfers`, of this run, experts are read for real and times are measured. Both models then compute
        their experts one by one, as they do if `eager`.
        Raises RecordError if its logits are not finite, or a pass skips a gate that the probe run saw, ConfigError
        where a transfer fails.
        """
        # other functions for experts round differently, and later gates may then choose differently
        one_by_one = eager or transfers is not None
        with implemented(self.loaded.model, "eager") if one_by_one else nullcontext():
            tiers = tiers_of(self.modules, self.quantiser, self.loaded.weights_sha256)
            emulation = Emulation(self.modules, self.plan, log, self.header.lookahead_depth, transfers, tiers)
            readers = Readers(self.loaded.model, emulation, quality)
            requests, executed, scores = [], [], []
            for number, given in enumerate(self.to_run):
                try:
                    ids = self._follow(number, given, readers, progress)
                except torch.cuda.OutOfMemoryError:
                    fix = "give shorter requests, --device-map auto, or --no-quality"
                    raise RecordError(f"request {number} ran out of GPU memory; {fix}") from None
                rows, ran = emulation.take()
                nll, score = readers.take()
                request = Request(rows.chosen, given.prompt_length, rows.weights, rows.logits, rows.lookahead, ids, nll)
                (keep or requests.append)(request)
                executed.append(ran)
                scores.append(score)
            result = self._reported(emulation.close(), transfers)
            judged = Quality(tuple(scores)) if quality else None
            ran_as = tuple(requests), tuple(executed), tiers.stored()
            return Live(result, judged, self.header, self.modules.bias, *ran_as)

    def _reported(self, ran: FinishedRun, transfers: Transfers | None) -> Result:
        if transfers is None:
            return report(ran, self.plan)
        measured = report_measured(ran, self.plan)
        return replace(measured, about=measured.about | dict(transfers.about))

    def _follow(self, number: int, given: LiveRequest, readers: Readers, progress: Callable[[int], None]) -> np.ndarray:
        """Run the given tokens of a request and continue it; return the tokens (T,) that went through the model."""
        readers.begin(number)
        ids = list(given.token_ids)
        for start, stop in _passes(given):
            ahead = readers.read(ids[start:stop], stop <= given.prompt_length)
            progress(stop - start)
        if self.decoding is None:
            return np.array(ids, np.int32)
        drawer = Sampler(self.decoding, seed_of(self.plan.config.seed, number), ahead.device)
        ends = endings(self.loaded.model)
        for _ in range(self.decoding.max_new_tokens - 1):  # the last new token does not go through the model
            token = drawer.pick(ahead)
            if token in ends:
                break
            ids.append(token)
            ahead = readers.read([token], prefill=False)
            progress(1)
        return np.array(ids, np.int32)


def _passes(given: LiveRequest) -> Iterator[tuple[int, int]]:
    """Yield the tokens [start, stop) of each pass over the given tokens."""
    if given.prompt_length:
        yield 0, given.prompt_length
    for start in range(given.prompt_length, len(given.token_ids)):
        yield start, start + 1


def _check_requests(to_run: Sequence[LiveRequest], room: Room, decoding: Decoding | None) -> None:
    if not to_run:
        raise RecordError("no request to run; raise --limit")
    new = decoding.max_new_tokens if decoding else 1  # the last one does not go through the model
    for number, (ids, prompt_length) in enumerate(to_run):
        tokens = len(ids) + new - 1
        if not ids or not 0 <= prompt_length <= len(ids):
            raise RecordError(
                f"request {number}: {prompt_length} prompt tokens of {len(ids)}: expected 1 token or more"
            )
        if room.context is not None and tokens > room.context:
            fix = "give shorter requests or fewer --max-new-tokens"
            raise RecordError(f"request {number}: {tokens} tokens exceed the model's context of {room.context}; {fix}")
        if not 0 <= min(ids) <= max(ids) < room.vocabulary:
            wrong = max(ids) if min(ids) >= 0 else min(ids)
            raise RecordError(
                f"request {number} has token {wrong}; the vocabulary has {room.vocabulary}: another model's"
            )


def _origin(loaded: Loaded, modules: MoeModules, to_run: Sequence[LiveRequest], decoding: Decoding | None) -> Origin:
    """Return the identity of a live run.

    A live run has every capability but the future; its digest names weights, precision and tokens.
    """
    settings = decoding.model_dump(mode="json") if decoding else None
    document = [loaded.weights_sha256, loaded.dtype, [list(given) for given in to_run], settings]
    return Origin(
        geometry=modules.geometry,
        capabilities=CAPABILITIES,
        lookahead_depth=modules.geometry.layers,
        digest=f"live-{canonical_digest(document)}",
        model=loaded.name,
        live=True,
    )


def _noted(header: Header, plan: Plan, stored: str) -> Header:
    """Return a recording's header with notes on changed routing and on the storage of experts."""
    policies = ", ".join(f"{kind} {getattr(plan.chosen, kind).text(full=True)}" for kind in KINDS)
    note = f"recorded live under {policies}, capacity {plan.config.capacity}, {plan.config.contract}"
    notes = (f"{note}, {stored}" if stored else note,)
    return header.model_copy(update={"provenance": header.provenance.model_copy(update={"notes": notes})})
