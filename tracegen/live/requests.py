"""Requests of a live run, and configurations that no live run allows; checked before torch is imported."""

from __future__ import annotations

import sys
from typing import NamedTuple

from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platforms import platform
from moereplay.tracegen.errors import RecordError
from moereplay.traces.drafts import OFF
from moereplay.traces.schema import Trace

CAPABILITIES = frozenset({"ids", "weights", "logits", "lookahead"})  #: what a live model provides: all but the future


class LiveRequest(NamedTuple):
    """One request: tokens to run, the first `prompt_length` in one pass, the rest one by one."""

    token_ids: tuple[int, ...]
    prompt_length: int


def requests_of(trace: Trace, limit: int | None = None) -> list[LiveRequest]:
    """Return the requests of a trace (the first `limit`), to run again. Raises RecordError if it holds no token ids."""
    if "token_ids" not in trace.arrays:
        why = f"{trace.path or 'this trace'} has no token ids, so its text cannot be run"
        raise RecordError(f"{why}; record one with `moereplay record`, or run a text: moereplay live MODEL --text FILE")
    to_run = []
    for number in range(trace.requests if limit is None else min(limit, trace.requests)):
        first, last = (int(offset) for offset in trace.request_offsets[number : number + 2])
        ids = trace.read("token_ids", first, last).tolist()
        to_run.append(LiveRequest(tuple(ids), int(trace.prompt_lengths[number])))
    return to_run


def check_live(config: ReplayConfig) -> None:
    """Raise ConfigError or PolicyError for a configuration under which no model can run."""
    if config.passes != "recorded":
        raise ConfigError(f"--passes {config.passes} cannot be combined with a live run: expected recorded")
    if config.draft != OFF:
        raise ConfigError(f"--draft {config.draft} cannot be combined with a live run, which has no drafts: expected 0")
    if config.lookahead != "recorded":
        fix = "replay a trace of it instead"
        raise ConfigError(
            f"--lookahead {config.lookahead} cannot be combined with a live run: later tokens are unknown; {fix}"
        )
    platform(config.platform)
    config.policy_set().check(CAPABILITIES, sys.maxsize)


def check_offloadable(config: ReplayConfig) -> None:
    """Raises ConfigError for a configuration that no model can run under with real transfers.

    Experts are computed as they come, and what policies changed is known at the end of a step. So the model has to run
    its own choice, at one precision, on one device.
    """
    chosen, machine = config.policy_set(), platform(config.platform)
    miss = chosen.miss
    changes = miss.policy.changes_output or miss.policy.bits(miss.params) or miss.policy.uses_cpu(miss.params)
    if chosen.routing.policy.name != "standard" or changes:
        raise ConfigError(
            f"--slow-tier requires routing standard and miss fetch "
            f"(got routing {chosen.routing.text()}, miss {miss.text()})"
        )
    if len(machine.links) > 1 or machine.tiers:
        raise ConfigError(
            f"--slow-tier cannot be combined with platform {machine.name}, which has several links or tiers"
        )
