"""Dry run of user policies: both engines replay a short opening before the policy runs in machine code.

Machine code reports neither the line of an error nor a result of the wrong type, and relies on the promises of a
policy. The reference engine checks results and promises, and its errors name a line. If the engines then disagree, an
uncheckable promise is broken, or machine code computes differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np

from moereplay.policies.contract import Eviction, Miss, Policy, PolicyError
from moereplay.policies.hooks import given_by
from moereplay.simulator.arrivals import ALL
from moereplay.simulator.config import KINDS, PolicySet
from moereplay.simulator.interface import EndState, RunSpec
from moereplay.simulator.reference import engine as reference
from moereplay.traces.schema import LOOKAHEAD, Request, Trace, memory_trace

#: Demanded experts and tokens of the opening, summed over gates: under a second in Python.
ENOUGH = 4096
#: Requests that share it, so that there is a reset between them.
REQUESTS = 2
#: Dry runs that have passed in this process.
_passed: set[tuple[object, ...]] = set()
_trying = Lock()


def dry_run(trace: Trace, spec: RunSpec) -> None:
    """Replay an opening on both engines, once for all capacities and seeds.

    Raises PolicyError with file and line for a wrong result or a broken promise, and the error of a failing hook.
    """
    chosen = spec.chosen
    case = (trace.digest, tuple(chosen.own), spec.config.model_copy(update={"capacity": "", "seed": 0}))
    with _trying:  # threads would only take turns in Python
        if case not in _passed:
            # all requests of the opening are there at the start: policies see no arrivals
            config = spec.config.model_copy(update={"arrivals": ALL})
            _compare(opening(trace), replace(spec, log=False, arrivals=(), config=config))
            _passed.add(case)


def opening(trace: Trace) -> Trace:
    """Return the first tokens of the first requests, of prompt and output, as a trace."""
    requests = min(REQUESTS, trace.requests)
    geometry = trace.geometry
    tokens = max(1, ENOUGH // (requests * geometry.layers * (geometry.k + 1)))
    return memory_trace(trace.header, [_begin(trace, at, tokens) for at in range(requests)], trace.router_bias)


def _begin(trace: Trace, index: int, tokens: int) -> Request:
    """Return up to `tokens` tokens of a request: half of them from its prompt, if it is long enough."""
    first, last = (int(offset) for offset in trace.request_offsets[index : index + 2])
    prompt = int(trace.prompt_lengths[index])
    decoded = min(last - first - prompt, max(tokens - prompt, tokens // 2))
    prefilled = min(prompt, tokens - decoded)
    spans = [(first, first + prefilled), (first + prompt, first + prompt + decoded)]
    rows: dict[str, Any] = {
        name: _rows(trace, name, spans) for name in ("chosen", "weights", "logits") if name in trace.arrays
    }
    rows |= _drafts(trace, prefilled, first + prompt, decoded)
    looks = [_rows(trace, f"{LOOKAHEAD}{depth}", spans) for depth in range(1, trace.header.lookahead_depth + 1)]
    return Request(prompt_length=prefilled, lookahead=tuple(looks), **rows)


def _drafts(trace: Trace, prefilled: int, begin: int, decoded: int) -> dict[str, Any]:
    """Return the recorded drafts of `prefilled` prompt tokens and the decoded ones from `begin`."""
    if trace.verified is None:
        return {}
    drafts, span = np.zeros(0, np.int16), slice(0, 0)
    if decoded:
        drafts, span = trace.verified.span(begin, begin + decoded)
    rejected = trace.rejected_rows(set(trace.arrays) - {"token_ids"}, span.start, span.stop)
    return {"drafts": np.concatenate([np.zeros(prefilled, np.int16), drafts]), "rejected": rejected}


def _rows(trace: Trace, name: str, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.concatenate([trace.read(name, first, last) for first, last in spans])


def _compare(short: Trace, spec: RunSpec) -> None:
    first = difference(*end_states(short, replace(spec, pools=_tight(short, spec))))
    if first:
        raise PolicyError(_disagreement(spec.chosen, first))


def end_states(trace: Trace, spec: RunSpec) -> tuple[EndState, EndState]:
    """Run the reference engine, then the compiled one. Raises PolicyError, and the error of a hook in the reference."""
    from moereplay.simulator.compiled import engine as compiled  # LLVM takes a moment to import

    expected = reference.run_with_state(spec.source_of(trace), spec)
    with named_by_machine_code(spec.chosen):
        return expected, compiled.run_with_state(trace, spec)


def _tight(short: Trace, spec: RunSpec) -> tuple[int, ...]:
    """Return pool sizes that force evictions: half of the opening's demand, at least two experts."""
    if spec.config.warm:
        return spec.pools
    chosen, sizes, shape = short.read("chosen"), spec.most_precise.tolist(), spec.layout.geometry
    demanded, largest = [0] * len(spec.pools), [0] * len(spec.pools)
    by_layer = [np.unique(chosen[:, layer]).tolist() for layer in range(shape.layers)]
    used = {layer * shape.experts + e for layer, ids in enumerate(by_layer) for e in ids if e >= 0}
    for x, pool in enumerate(spec.pool_of):
        demanded[pool] += sizes[x] * (x in used)
        largest[pool] = max(largest[pool], sizes[x])
    return tuple(
        min(pool, max(demand // 2, 2 * size)) for pool, demand, size in zip(spec.pools, demanded, largest, strict=True)
    )


@contextmanager
def named_by_machine_code(chosen: PolicySet) -> Iterator[None]:
    """Turn errors of machine code under user policies into a PolicyError with the policies' names, without lines."""
    try:
        yield
    except (AssertionError, IndexError, ArithmeticError) as error:
        message = f"{', '.join(chosen.own)}: {error}; replay it with --engine reference, which names the line"
        raise PolicyError(message) from error


# differences


def difference(expected: EndState, found: EndState) -> str:
    """Return the first difference between two engines, or an empty string."""
    totals, others = expected.ran.counters.totals(expected.ran.end_ns), found.ran.counters.totals(found.ran.end_ns)
    for name, count in totals.items():
        if others[name] != count:
            return f"{name} {count} by the reference and {others[name]} compiled"
    if expected.ran.counters.per_layer() != found.ran.counters.per_layer():
        return "other counts of single layers"
    if expected.residents != found.residents:
        return "other experts resident at the end"
    for kind, mine, other in zip(KINDS, expected.memories, found.memories, strict=True):
        for one, two in zip(map(np.asarray, mine), map(np.asarray, other), strict=True):
            if (one.size or two.size) and not np.array_equal(one, two, equal_nan=one.dtype.kind == "f"):
                return f"another memory `own` of the {kind} policy"
    return ""


def _disagreement(chosen: PolicySet, difference: str) -> str:
    own: list[Policy] = [each.policy for each in chosen.all if each.policy.version]
    promised = [
        f"{_file_of(policy)}: {policy.kind} {policy.label} promises {', '.join(_promises(policy))}" for policy in own
    ]
    return (
        f"{'; '.join(promised)}; the engines disagree, {difference} over the first tokens: check these promises, that "
        "integers stay within 64 bits, and that floats are made by + - * / and sqrt alone, or use --engine reference"
    )


def _file_of(policy: Policy) -> str:
    return next((hook.__code__.co_filename for _, hook in given_by(policy)), policy.name)


def _promises(policy: Policy) -> Iterator[str]:
    """Yield the declarations of a policy that engines rely on."""
    if isinstance(policy, Eviction):
        yield f"key_scope={policy.key_scope!r}" if isinstance(policy.key_scope, str) else "key_scope"
        for name in ("queue", "declines"):
            if name in vars(policy) and getattr(policy, name) is not type(policy).__dataclass_fields__[name].default:
                yield name
    if isinstance(policy, Miss) and policy.fetches_all:
        yield "fetches_all"
    yield "reads everything" if policy.reads is None else f"reads {', '.join(sorted(policy.reads)) or 'nothing'}"
