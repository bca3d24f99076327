"""Side buffer: speculative experts use a few separate buffers and never evict a cached one.

An expert that its gate then demands moves into the cache like a fetched one; the others are overwritten in turn. The
buffers' bytes come on top of the capacity, as in the source (`count=beside`), or are taken from it (`count=inside`).
"""

from moereplay.policies.contract import Choice, Number, Prefetch, always, slot
from moereplay.policies.selection import suggest_best_of_each

PARAMS = (
    Number("buffers", 4, 1, 4096, integer=True),
    Number("fetch", 2, 1, 4096, integer=True),
    Choice("count", "beside", ("beside", "inside")),
)
FETCH = slot(PARAMS, "fetch")


def suggest(now, step, experts, copies, own, out):
    """Suggest the `fetch` most likely experts of the next layer for each token."""
    each = min(now["experts"], int(own.par[FETCH]))
    return suggest_best_of_each(now, step, 0, each, out, 0)


def depth(params):
    """Return 1: the next layer only."""
    return 1


def side_slots(params):
    """Return the number of buffers, each as large as the largest expert."""
    return params["buffers"]


def side_inside(params):
    """Return whether the capacity includes the buffers."""
    return params["count"] == "inside"


POLICY = Prefetch(
    name="side_buffer",
    summary="prefetch into separate buffers",
    source="Eliseev & Mazur (arXiv 2312.17238) §3.3",
    params=PARAMS,
    needs=always("lookahead"),
    suggest=suggest,
    depth=depth,
    side_slots=side_slots,
    side_inside=side_inside,
    reads=frozenset(),
)
