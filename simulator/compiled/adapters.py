"""Hook adapters: the functions that a kernel's hook pointers address.

A kernel calls an adapter with the simulation state and the hook's own numbers. The adapter adds the contract's tables,
read from the state: passing them would take twenty arrays, written out and read back at every call. A hook that takes
lists has its own adapter, which finds the lists in the state; other hooks share one adapter per number of arguments.

`hooks.compiled` copies an adapter for every hook and sets the globals that are not defined here: `hook`, `tables`,
`result_of`, `own` (the policy's memory), and `all_experts`, `all_copies` and `step_of` with what the policy may read.
"""
# ruff: noqa: F821
# pyright: reportUndefinedVariable=false

from moereplay.simulator.compiled.state import (
    all_chosen,
    all_eligible,
    all_eval_copies,
    all_eval_keys,
    all_missing,
    all_suggested,
    all_verdict,
    all_wants,
    now,
)


def without_step(s):
    """Return the tables that a hook takes first."""
    return now(s), all_experts(s), all_copies(s), own(s)


def with_step(s):
    """Return the tables that a hook at a gate takes first."""
    return now(s), step_of(s, s["demand"]["demanded"]), all_experts(s), all_copies(s), own(s)


def no_number(s):
    return result_of(hook(*tables(s)))


def one_number(s, a):
    return result_of(hook(*tables(s), a))


def two_numbers(s, a, b):
    return result_of(hook(*tables(s), a, b))


def three_numbers(s, a, b, c):
    return result_of(hook(*tables(s), a, b, c))


BY_NUMBERS = (no_number, one_number, two_numbers, three_numbers)


# hooks that take lists, and hooks that are called for a batch of positions or copies


def choose(s):
    """Fill `chosen`, a row per token of the pass; the demand is not known yet."""
    given = now(s), step_of(s, 0), all_experts(s), all_copies(s), own(s)
    return result_of(hook(*given, all_chosen(s)[: s["compute"]["tokens"]]))


def suggest(s):
    """Fill `suggested` and return the hook's count."""
    return result_of(hook(*tables(s), all_suggested(s)))


def want(s):
    """Fill `wants`, one precision per demanded expert."""
    given, wants = tables(s), all_wants(s)
    for n in range(s["demand"]["demanded"]):
        wants[n] = result_of(hook(*given, n))


def resolve(s, absent, free):
    """Fill `verdict` for the first `absent` entries of `missing`."""
    return result_of(hook(*tables(s), all_missing(s)[:absent], free, all_verdict(s)[:absent]))


def substitute(s, t, j):
    """Return the substitute for the j-th expert of token t, from `eligible`."""
    return result_of(hook(*tables(s), t, j, all_eligible(s)))


def key(s, count):
    """Fill `batch_keys` for the first `count` entries of `batch_copies`."""
    eval_copies, eval_keys = all_eval_copies(s), all_eval_keys(s)
    for i in range(count):
        eval_keys[i] = result_of(hook(*tables(s), eval_copies[i]))


#: Adapters that write results into the state and return nothing.
BATCHED = (want, key)
