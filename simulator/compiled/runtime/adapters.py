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

from simulator.compiled.runtime.state import (
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


def without_step(w):
    """The tables that a hook takes first."""
    return now(w), all_experts(w), all_copies(w), own(w)


def with_step(w):
    """The same for a hook at a gate."""
    return now(w), step_of(w, w["demanded"]), all_experts(w), all_copies(w), own(w)


def no_number(w):
    """For a hook that takes the tables alone."""
    return result_of(hook(*tables(w)))


def one_number(w, a):
    """For a hook that takes one number."""
    return result_of(hook(*tables(w), a))


def two_numbers(w, a, b):
    """For a hook that takes two numbers."""
    return result_of(hook(*tables(w), a, b))


def three_numbers(w, a, b, c):
    """For a hook that takes three numbers."""
    return result_of(hook(*tables(w), a, b, c))


BY_NUMBERS = (no_number, one_number, two_numbers, three_numbers)


# hooks that take lists, and those that are called for many positions or copies at once


def choose(w):
    """Into `chosen`, a row for each token of the pass; the demand is not known yet."""
    given = now(w), step_of(w, 0), all_experts(w), all_copies(w), own(w)
    return result_of(hook(*given, all_chosen(w)[: w["tokens"]]))


def suggest(w):
    """Into `suggested`."""
    return result_of(hook(*tables(w), all_suggested(w)))


def want(w):
    """For every demanded expert, into `wants`."""
    given, wants = tables(w), all_wants(w)
    for n in range(w["demanded"]):
        wants[n] = result_of(hook(*given, n))


def resolve(w, absent, free):
    """For the first `absent` of `missing`, into `verdict`."""
    return result_of(hook(*tables(w), all_missing(w)[:absent], free, all_verdict(w)[:absent]))


def substitute(w, t, j):
    """For the `eligible`."""
    return result_of(hook(*tables(w), t, j, all_eligible(w)))


def key(w, count):
    """For the first `count` of `asked`, into `answers`."""
    asked, answers = all_asked(w), all_answers(w)
    for i in range(count):
        answers[i] = result_of(hook(*tables(w), asked[i]))


#: Those that write results into the state, and return none.
BATCHED = (want, key)


# what stands for hooks that a policy does not give: kernels call none of them


def absent_0(w):
    """For a hook that takes the tables alone."""
    return answer


def absent_1(w, a):
    """For one number."""
    return answer


def absent_2(w, a, b):
    """For two numbers."""
    return answer


def absent_3(w, a, b, c):
    """For three numbers."""
    return answer


ABSENT = (absent_0, absent_1, absent_2, absent_3)
