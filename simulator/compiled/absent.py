"""What stands for hooks that a policy does not give, so that every pointer points somewhere; and the loop over keys."""

from policies.contract import NONE
from simulator.compiled.state import all_answers, all_asked, all_copies, all_experts, now, own_eviction


def on_event(now, experts, copies, own, y):
    """`on_use`, `on_evict`, `on_predict`."""


def on_gate(now, step, experts, copies, own):
    """Nobody listens."""


def on_insert(now, experts, copies, own, y, prefetched):
    """Nobody listens."""


def choose(now, step, experts, copies, own, out):
    """The recorded choice."""


def suggest(now, step, experts, copies, own, out):
    """Nothing."""
    return 0


def want(now, step, experts, copies, own, n):
    """The most precise."""
    return 0


def substitute(now, step, experts, copies, own, t, j, eligible):
    """Nobody."""
    return NONE


def keys(w, count):
    """No keys."""


def victim(now, experts, copies, own, pool, y_in):
    """Nobody."""
    return NONE


def admit(now, experts, copies, own, y_in, prefetched, y_out):
    """Anybody."""
    return True


def ask_each(w, count):
    """`key`, a global given when this is compiled, of every copy asked for."""
    asked, answers = all_asked(w), all_answers(w)
    for i in range(count):
        answers[i] = key(now(w), all_experts(w), all_copies(w), own_eviction(w), asked[i])  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
