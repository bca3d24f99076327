"""What stands for hooks that a policy does not give, so that every pointer points somewhere."""

from policies.contract import NONE


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


def key(now, experts, copies, own, y):
    """None is before another."""
    return 0


def victim(now, experts, copies, own, pool, y_in):
    """Nobody."""
    return NONE


def admit(now, experts, copies, own, y_in, prefetched, y_out):
    """Anybody."""
    return True
