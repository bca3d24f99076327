"""How hooks are asked: what the contract hands them, taken from the world where they are compiled.

A kernel knows of a hook that it takes the world and a few numbers. Tables that came as arguments would be twenty
arrays, written out and read back at every call; so a hook reads what it looks at. Globals that
`hooks` gives when it compiles one of these are `hook`, `own`, the memory of its policy, and, with what it may read,
`all_experts` and `step_of`.
"""
# ruff: noqa: F821
# pyright: reportUndefinedVariable=false

from simulator.compiled.runtime.jit import whole_number
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


def choose(w):
    """Before there is a demand."""
    hook(now(w), step_of(w, 0), all_experts(w), all_copies(w), own(w), all_chosen(w)[: w["compute"]["tokens"]])


def suggest(w):
    """Into `suggested`."""
    return whole_number(
        hook(now(w), step_of(w, w["demand"]["demanded"]), all_experts(w), all_copies(w), own(w), all_suggested(w))
    )


def want(w):
    """Of every demanded expert, into `wants`."""
    step, wants = step_of(w, w["demand"]["demanded"]), all_wants(w)
    for n in range(w["demand"]["demanded"]):
        wants[n] = whole_number(hook(now(w), step, all_experts(w), all_copies(w), own(w), n))


def resolve(w, absent, free):
    """Of the first of `missing`, into `verdict`."""
    step, missing, verdict = step_of(w, w["demand"]["demanded"]), all_missing(w)[:absent], all_verdict(w)[:absent]
    hook(now(w), step, all_experts(w), all_copies(w), own(w), missing, free, verdict)


def substitute(w, t, j):
    """Among the `eligible`."""
    return whole_number(
        hook(now(w), step_of(w, w["demand"]["demanded"]), all_experts(w), all_copies(w), own(w), t, j, all_eligible(w))
    )


def key(w, count):
    """Of the first of `asked`, into `answers`."""
    asked, answers = all_asked(w), all_answers(w)
    for i in range(count):
        answers[i] = whole_number(hook(now(w), all_experts(w), all_copies(w), own(w), asked[i]))


def victim(w, pool, y_in):
    """A copy."""
    return whole_number(hook(now(w), all_experts(w), all_copies(w), own(w), pool, y_in))


def admit(w, y_in, prefetched, y_out):
    """Yes or no."""
    return whole_number(hook(now(w), all_experts(w), all_copies(w), own(w), y_in, prefetched, y_out))


def on_gate(w):
    """The demand is known."""
    hook(now(w), step_of(w, w["demand"]["demanded"]), all_experts(w), all_copies(w), own(w))


def on_insert(w, y, prefetched):
    """A copy is there."""
    hook(now(w), all_experts(w), all_copies(w), own(w), y, prefetched)


def on_use(w, y):
    """Something else happened to a copy."""
    hook(now(w), all_experts(w), all_copies(w), own(w), y)


on_evict = on_predict = on_use
