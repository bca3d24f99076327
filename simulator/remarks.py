"""Remarks on the settings of replays: without effect on this trace, or adapted to its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from moereplay.policies.contract import Policy
from moereplay.policies.grammar import at_most, note, parse
from moereplay.policies.hooks import given_by
from moereplay.results.settings import KINDS
from moereplay.simulator import bounds
from moereplay.simulator.config import PolicySet, ReplayConfig, parse_reset
from moereplay.simulator.platforms import platform
from moereplay.simulator.replay import plan
from moereplay.traces.drafts import OFF
from moereplay.traces.passes import schedule, slots_of
from moereplay.traces.schema import Trace
from moereplay.traces.texts import counted, whole
from moereplay.traces.units import GB

NO_PROMPTS = "no request of this trace has a prompt"
NO_PREFETCH = "nothing is prefetched"


def remarks(trace: Trace, configs: Sequence[ReplayConfig], engine: str = "") -> list[str]:
    """Return remarks on these configurations' settings and bounds, one line each; `engine` is the engine that ran."""
    own = unchecked(configs) if engine == "compiled" else []
    about = [*adapted(trace, configs), *without_effect(trace, configs), *own, *bounds.remarks(trace, configs)]
    return [*about, *peaks(trace, configs)]


def peaks(trace: Trace, configs: Sequence[ReplayConfig]) -> list[str]:
    """Return a line for each capacity on a platform that states its reserve and holds it; others have a warning."""
    lines = dict[str, None]()
    for config in configs:
        if platform(config.platform).reserve_bytes is None:
            continue
        of = plan(trace, config).peak
        if of and not of.will_page:
            held = f"{of.total / GB:.4g} of {of.memory_bytes / GB:.4g} GB"
            lines[f"peak memory of {config.platform} at {config.capacity}: {held}: {of.in_words}"] = None
    return list(lines)


def unchecked(configs: Sequence[ReplayConfig]) -> list[str]:
    """Return a line that names the users' policies, which machine code runs without the reference's checks."""
    names = dict.fromkeys(name for config in configs for name in config.policy_set().own)
    if not names:
        return []
    return [
        f"{', '.join(names)}: checked over the first tokens only; --engine reference checks every call, "
        "see docs/policies.md"
    ]


def adapted(trace: Trace, configs: Sequence[ReplayConfig]) -> list[str]:
    """Return a line for each miss policy whose default bits are more than the trace stores."""
    stored, lines = trace.geometry.expert_bits, dict[str, None]()
    for text in dict.fromkeys(config.miss for config in configs):
        asked = parse("miss", text)
        if line := note(asked, at_most(asked, stored), stored):
            lines[line] = None
    return list(lines)


def without_effect(trace: Trace, configs: Sequence[ReplayConfig]) -> list[str]:
    """Return a line for each setting's value that has no effect in any of these configurations on this trace.

    A value that has an effect in one of them is left out.
    """
    found: dict[tuple[str, object], list[str]] = {}
    for config in configs:
        for name, reason in _reasons(trace, config):
            found.setdefault((name, getattr(config, name)), []).append(reason)
    return [
        f"{name} {value} has no effect: {'; '.join(dict.fromkeys(reasons))}"
        for (name, value), reasons in found.items()
        if len(reasons) == sum(getattr(config, name) == value for config in configs)
    ]


def _reasons(trace: Trace, config: ReplayConfig) -> Iterator[tuple[str, str]]:
    """Yield each setting that changes nothing in a configuration, and the reason."""
    chosen = config.policy_set()
    checks: dict[str, Callable[[], str]] = {
        "passes": lambda: _passes(trace, config.passes, config.arrive),
        "draft": lambda: _draft(trace, config),
        "reset": lambda: _reset(trace, config),
        "scope": lambda: _one_pool(trace, config),
        "prefetch": lambda: _one_layer(trace) if chosen.prefetch.policy.suggest else "",
        "prefetch_at": lambda: _prefetch_at(config, chosen),
        "prefetch_admission": lambda: _admission(config, chosen),
        "lookahead": lambda: _lookahead(config, chosen),
        "seed": lambda: _seed(config, chosen),
    }
    yield from ((name, reason) for name, check in checks.items() if (reason := check()))


def _one_layer(trace: Trace) -> str:
    return "the model has one MoE layer" if trace.geometry.layers == 1 else ""


def _one_pool(trace: Trace, config: ReplayConfig) -> str:
    """Return why there is one pool although the scope divides the cache, or an empty string."""
    if config.scope == "per_link":
        return "the platform has one link" if len(platform(config.platform).links) == 1 else ""
    return _one_layer(trace) if config.scope == "per_layer" else ""


def _passes(trace: Trace, passes: str, arrive: bool) -> str:
    """Return why a schedule has the passes of `recorded`, or an empty string."""
    longest = int(np.max(trace.prompt_lengths, initial=0))
    if slots := slots_of(passes):
        if arrive or 0 < slots.chunk < longest:
            return ""
        if trace.requests == 1:
            return "the trace has one request"
        return "one request at a time is what `recorded` replays" if slots.many == 1 else ""
    name, _, number = passes.partition(":")
    size = whole(number) or 1
    if name in ("recorded", "token") or longest > size:
        return ""  # one token per pass is what `token` means, even if the trace has it anyway
    tokens = counted(longest, "token")
    return f"no prompt of this trace has more than {tokens}" if longest else NO_PROMPTS


def _draft(trace: Trace, config: ReplayConfig) -> str:
    """Return why no pass has a draft, or an empty string."""
    if config.draft == OFF:
        return ""
    rows = schedule(trace, config.schedule).rows
    return "" if rows is not None and rows.draft.any() else "no request decodes two tokens in a row"


def _reset(trace: Trace, config: ReplayConfig) -> str:
    """Return why no reset happens after the start, or an empty string."""
    every = parse_reset(config.reset)
    if not every:
        return ""
    if every < 0 and trace.requests == 1:
        return "the trace has one request"
    if config.arrive:
        return ""  # it depends on times
    plan = schedule(trace, config.schedule)
    if every > 0:
        last = int(plan.start[-1])
        return f"the last pass begins after {last:,} tokens" if last < every else ""
    return "" if plan.apart().any() else "every pass shares a request with the pass before"


def _prefetch_at(config: ReplayConfig, chosen: PolicySet) -> str:
    idle = config.prefetch_at == "after_demand" and chosen.prefetch.policy.suggest is None
    return NO_PREFETCH if idle else ""


def _admission(config: ReplayConfig, chosen: PolicySet) -> str:
    if config.prefetch_admission == "evict":
        return ""
    if chosen.prefetch.policy.suggest is None:
        return NO_PREFETCH
    aside = chosen.prefetch.policy.side_slots(chosen.prefetch.params)
    return "prefetches go to side buffers and never evict" if aside else ""


def _lookahead(config: ReplayConfig, chosen: PolicySet) -> str:
    """Return why a control of the look-ahead changes nothing, or an empty string."""
    prefetch = chosen.prefetch
    if config.lookahead == "recorded" or prefetch.policy.depth(prefetch.params):
        return ""
    return f"prefetch {prefetch.policy.name} reads no look-ahead"


def _seed(config: ReplayConfig, chosen: PolicySet) -> str:
    """Return why a seed changes nothing, or an empty string."""
    policies: list[Policy] = [getattr(chosen, kind).policy for kind in KINDS]
    shuffles = config.lookahead != "recorded" and not _lookahead(config, chosen)
    drawn = config.arrivals.startswith("poisson") or config.draft != OFF
    return "" if not config.seed or shuffles or drawn or any(map(_draws, policies)) else "no policy here draws"


def _draws(policy: Policy) -> bool:
    """Return True if hooks read the seed; a user policy may read it in ways that are not seen here."""
    return bool(policy.version) or any(_names_seed(hook) for _, hook in given_by(policy))


@cache
def _names_seed(function: Any) -> bool:
    """Return True if a function, or one that it calls by a global name, reads `now["seed"]`."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    called = (function.__globals__.get(name) for name in code.co_names)
    return "seed" in code.co_consts or any(_names_seed(each) for each in called if hasattr(each, "__code__"))
