"""Hook adapters: what a kernel's pointer to a hook points to.

A kernel calls an adapter with the simulation state and the numbers that the hook takes; the adapter adds the tables of
the contract, which it reads from the state. Tables that came as arguments would be twenty arrays, written out and read
back at every call. A hook that takes lists has an adapter of its own, which says where they lie in the state; others
have the adapter for as many numbers.

`hooks.compiled` copies an adapter for every hook and sets the globals that are not defined here: `hook`, `tables`,
`result_of`, `own`, the memory of its policy, and `all_experts` and `step_of` with what the policy may read.
"""
# ruff: noqa: F821
# pyright: reportUndefinedVariable=false

from moereplay.simulator.compiled.state import (
    all_answers,
    all_asked,
    all_chosen,
    all_copies,
    all_eligible,
    all_missing,
    all_suggested,
    all_verdict,
    all_wants,
    now,
)


def without_step(s):
    """The tables that a hook takes first."""
    return now(s), all_experts(s), all_copies(s), own(s)


def with_step(s):
    """The same for a hook at a gate."""
    return now(s), step_of(s, s["demand"]["demanded"]), all_experts(s), all_copies(s), own(s)


def no_number(s):
    """For a hook that takes the tables alone."""
    return result_of(hook(*tables(s)))


def one_number(s, a):
    """For a hook that takes one number."""
    return result_of(hook(*tables(s), a))


def two_numbers(s, a, b):
    """For a hook that takes two numbers."""
    return result_of(hook(*tables(s), a, b))


def three_numbers(s, a, b, c):
    """For a hook that takes three numbers."""
    return result_of(hook(*tables(s), a, b, c))


BY_NUMBERS = (no_number, one_number, two_numbers, three_numbers)


# hooks that take lists, and those that are called for many positions or copies at once


def choose(s):
    """Into `chosen`, a row for each token of the pass; the demand is not known yet."""
    given = now(s), step_of(s, 0), all_experts(s), all_copies(s), own(s)
    return result_of(hook(*given, all_chosen(s)[: s["compute"]["tokens"]]))


def suggest(s):
    """Into `suggested`."""
    return result_of(hook(*tables(s), all_suggested(s)))


def want(s):
    """For every demanded expert, into `wants`."""
    given, wants = tables(s), all_wants(s)
    for n in range(s["demand"]["demanded"]):
        wants[n] = result_of(hook(*given, n))


def resolve(s, absent, free):
    """For the first `absent` of `missing`, into `verdict`."""
    return result_of(hook(*tables(s), all_missing(s)[:absent], free, all_verdict(s)[:absent]))


def substitute(s, t, j):
    """For the `eligible`."""
    return result_of(hook(*tables(s), t, j, all_eligible(s)))


def key(s, count):
    """For the first `count` of `asked`, into `answers`."""
    asked, answers = all_asked(s), all_answers(s)
    for i in range(count):
        answers[i] = result_of(hook(*tables(s), asked[i]))


#: Those that write results into the state, and return none.
BATCHED = (want, key)
