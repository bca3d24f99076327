"""Seconds to the first token of a prompt, by engine: replays of its prefill passes.

An engine computes a prompt in batches. Experts that are not in fast memory are computed by the CPU, or cross the link
once for all rows of a batch; from which size on, `[[prompts]]` of its profile says. Whole layers that cross the link
are taken as the experts that the batch touches, and waves as one transfer after the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from moereplay.simulator.replay import replay
from moereplay.sweeps.recommend.engines import Prompt, engine
from moereplay.sweeps.recommend.load import Load, middle
from moereplay.sweeps.recommend.settings import Setting
from moereplay.traces.drafts import OFF
from moereplay.traces.schema import Header, Request, Trace, memory_trace

MOST_PROMPT = 32_768  #: tokens of a prompt; longer ones take as long for each
LENGTHS = (32, 64, 128, 256, 512, 1_024, 2_048, 4_096)  #: at which the CPU and the link are compared


class First(NamedTuple):
    """The first token of a prompt on one engine."""

    engine: str
    how: str  #: experts outside fast memory, as in `Prompt.how`
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the prompt per second."""
        return self.tokens / self.seconds


def rule_of(prompts: tuple[Prompt, ...], tokens: int, k: int, slots: int) -> Prompt | None:
    """Return the last rule that a batch of the prompt reaches; None if nothing is known."""
    fitting = [rule for rule in prompts if rule.within_slots and tokens * k <= slots]
    reached = [rule for rule in prompts if not rule.within_slots and rule.least <= min(tokens, rule.batch or tokens)]
    return (fitting or reached[-1:] or [None])[0]


def first_token(load: Load, setting: Setting, tokens: int) -> First | None:
    """Return the first token of a prompt on a setting's engine; None if it is not known how it computes prompts."""
    slots = setting.fast_bytes * load.geometry.experts * load.geometry.layers // load.expert_bytes
    rule = rule_of(engine(setting.engine).prompts, tokens, load.geometry.k, slots)
    return rule and First(setting.engine, rule.how, tokens, seconds(load, setting, tokens, rule))


def seconds(load: Load, setting: Setting, tokens: int, rule: Prompt) -> float:
    """Return the seconds of a prompt of so many tokens under a rule."""
    misses = {"cpu": "cpu", "cache": setting.mode.miss}.get(rule.how, "fetch")
    mode = setting.mode.model_copy(update={"miss": misses})
    config = replace(setting, mode=mode, uploads=rule.uploads).config(load, middle(len(load.routings)))
    passes = f"chunk:{rule.batch}" if 0 < rule.batch < tokens else "recorded"
    config = config.model_copy(update={"passes": passes, "draft": OFF, "prefetch": "none"})
    (row,) = replay(_prompt(load, tokens), config).per_request
    return row["ttft_ns"] / 1e9


def _prompt(load: Load, tokens: int) -> Trace:
    """Return a prompt whose routing is that of the load's text, repeated."""
    routing = load.routings[middle(len(load.routings))]
    ids = np.concatenate([routing.history, routing.ids])
    return memory_trace(Header(geometry=load.geometry), [Request(np.resize(ids, (tokens, *ids.shape[1:])), tokens)])


def streaming_wins(load: Load, setting: Setting) -> int:
    """Return the shortest prompt whose experts the engine streams sooner than the CPU computes them; 0 if none."""
    streamed = next((rule for rule in engine(setting.engine).prompts if rule.how in ("touched", "layers")), None)
    if setting.machine.platform.cpu is None or not setting.ram_bytes or streamed is None:
        return 0
    computed = streamed.model_copy(update={"how": "cpu"})
    for tokens in LENGTHS:
        if seconds(load, setting, tokens, streamed) < seconds(load, setting, tokens, computed):
            return tokens
    return 0
