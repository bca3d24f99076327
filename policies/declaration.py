"""Checks of policy declarations, which guard against files that no test of this project has seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import signature
from types import FunctionType, NoneType
from typing import Any

from moereplay.policies.contract import (
    KEY_SCOPES,
    NO_PROFILE,
    OPTIONAL,
    PAR_SLOTS,
    QUEUES,
    Choice,
    Eviction,
    Memory,
    Miss,
    Number,
    Numbers,
    Parameter,
    Params,
    Policy,
    Prefetch,
    Routing,
)
from moereplay.policies.hooks import HOOKS, Hook, given_by

CLASSES = (Routing, Prefetch, Eviction, Miss)
CAPABILITIES = frozenset({"weights", "logits", "lookahead", "future"})
BITS = 64
#: What columns of memory and buffers are counted up to, layers, and tokens.
MOST, MOST_LAYERS, MOST_TOKENS = 1 << 20, 1 << 30, 1 << 62
LONGEST, MOST_SHOWN = 500, 60  #: most characters of a summary or a source, and of its part in an error
#: Bits that an expert's numbers may have.
MOST_BITS = 64


def check(policy: object) -> Policy:
    """Return the object if it is a policy. Raises ValueError naming what is missing in its declaration."""
    if not isinstance(policy, CLASSES):
        raise ValueError(
            f"invalid POLICY {policy!r}: expected Routing, Prefetch, Eviction or Miss of policies.contract"
        )
    _check_words(policy)
    _check_params(policy.params)
    _check_memory(policy.memory)
    for name, hook in given_by(policy):
        _check_hook(name, hook)
    _check_kind(policy)
    check_under(policy, {param.name: param.default for param in policy.params})
    _check_reads(policy)
    return policy


def check_under(policy: Policy, params: Params) -> None:
    """Raises ValueError if engines cannot honour the declarations under these parameters."""
    _check_needs(policy, params)
    _check_count("profile", policy.profile(params), "the tokens that it is fitted to", NO_PROFILE, MOST_TOKENS)
    if isinstance(policy, Eviction):
        _check_choice("key_scope", policy.scope(params), KEY_SCOPES)
        _check_choice("queue", policy.queue(params), QUEUES)
    elif isinstance(policy, Prefetch):
        _check_count("depth", policy.depth(params), "how many layers ahead it reads", most=MOST_LAYERS)
        _check_count(
            "reach or depth", policy.names_ahead(params), "how many layers ahead it may name", most=MOST_LAYERS
        )
        _check_count("side_slots", policy.side_slots(params), "how many buffers it has")
    elif isinstance(policy, Miss):
        _check_bits(policy.bits(params))


def check_result(hook: Hook, result: object) -> None:
    """Raises ValueError if a hook returned a wrong type, which compiled code would silently cut to an integer."""
    name, wanted = hook.name, hook.result
    if type(result) is not wanted:
        expected = "nothing" if wanted is NoneType else f"an {wanted.__name__}" if wanted is int else "True or False"
        raise ValueError(f"hook {name} returned {result!r}: expected {expected}")
    if wanted is int and not fits(result):
        raise ValueError(f"hook {name} returned {result}: expected an integer of {BITS} bits")


def fits(number: Any) -> bool:
    """Return whether machine code can hold the integer."""
    return -(1 << BITS - 1) <= number < 1 << BITS - 1


def _check_words(policy: Policy) -> None:
    if not (isinstance(policy.name, str) and re.fullmatch("[a-z][a-z0-9_]{0,99}", policy.name)):
        got = repr(policy.name)[:MOST_SHOWN]
        raise ValueError(f"invalid name {got}: expected at most 100 small letters, digits and _, a letter first")
    for field in ("summary", "source"):
        text = getattr(policy, field)
        if not (isinstance(text, str) and text.strip() and text.isprintable() and len(text) <= LONGEST):
            got = repr(text)[:MOST_SHOWN]
            raise ValueError(f"invalid {field} {got}: expected one line of at most {LONGEST} printable characters")


def _check_params(params: tuple[Parameter, ...]) -> None:
    if not isinstance(params, tuple) or not all(isinstance(param, Number | Choice | Numbers) for param in params):
        raise ValueError("invalid params: expected a tuple of Number, Choice and Numbers, as in params=(Number(...),)")
    names = [param.name for param in params]
    if len(set(names)) < len(names):
        raise ValueError(f"params declare {max(names, key=names.count)!r} twice")
    slots = sum(param.width for param in params)
    if slots > PAR_SLOTS:
        raise ValueError(f"params need {slots} slots of own.par: expected at most {PAR_SLOTS}")
    for param in params:
        _check_default(param)


def _check_default(param: Parameter) -> None:
    text = param.default
    if isinstance(param, Numbers):
        text = "/".join(map(str, param.default))
    try:
        param.parse(str(text))
    except ValueError:
        raise ValueError(f"invalid default {param.default!r} of {param.name}: expected {param.allowed}") from None


def _check_hook(name: str, hook: Callable[..., Any]) -> None:
    expected = HOOKS[name].arguments
    if not isinstance(hook, FunctionType):
        raise ValueError(f"invalid hook {name} {hook!r}: expected a function defined with def")
    try:
        signature(hook).bind(*expected)
    except TypeError:
        raise ValueError(f"invalid hook {name}: expected the arguments ({', '.join(expected)})") from None


def _check_kind(policy: Policy) -> None:
    if isinstance(policy, Eviction):
        if (policy.key is None) == (policy.victim is None):
            raise ValueError("an eviction policy requires exactly one of the hooks key and victim")
        if not isinstance(policy.decides_once, bool):
            raise ValueError(f"invalid decides_once {policy.decides_once!r}: expected True or False")
    elif isinstance(policy, Routing) and policy.choose is None:
        raise ValueError("a routing policy requires the hook choose")
    elif isinstance(policy, Prefetch) and policy.suggest is None:
        raise ValueError("a prefetch policy requires the hook suggest")


def _check_memory(memory: object) -> None:
    if not isinstance(memory, Memory):
        raise ValueError("invalid memory: expected policies.contract.Memory, as in memory=Memory(rows=...)")
    for name, columns in vars(memory).items():
        _check_count(f"{name} of memory", columns, "how many columns")


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}: choose from {', '.join(each or repr(each) for each in known)}")


def _check_count(name: str, value: object, what: str, least: int = 0, most: int = MOST) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"invalid {name} {value!r}: expected {what}, an integer from {least} to {most:,}")


def _check_bits(bits: object) -> None:
    numbers = isinstance(bits, tuple) and all(isinstance(each, int | float) for each in bits)
    if not isinstance(bits, tuple) or not numbers or not all(0 < each <= MOST_BITS for each in bits):
        raise ValueError(f"invalid bits {bits!r}: expected a tuple of numbers above 0, up to {MOST_BITS}")


def _check_needs(policy: Policy, params: Params) -> None:
    needed = policy.needs(params)
    if not isinstance(needed, frozenset) or needed - CAPABILITIES:
        choices = ", ".join(sorted(CAPABILITIES))
        raise ValueError(f"invalid needs {needed!r}: expected needs=always(...) with any of {choices}")


def _check_reads(policy: Policy) -> None:
    reads = policy.reads
    if reads is not None and not (isinstance(reads, frozenset) and reads <= OPTIONAL):
        choices = ", ".join(sorted(OPTIONAL))
        raise ValueError(
            f"invalid reads {reads!r}: expected reads=frozenset({{...}}) with any of {choices}, or no reads"
        )
