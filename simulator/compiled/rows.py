"""A pass is rows: the token of each, and the request and phase that its own counts are charged to."""

from __future__ import annotations

from moereplay.simulator.compiled.state import row_token
from moereplay.simulator.jit.marks import fast


@fast
def row_at(s, t):
    """The t-th row of the pass in progress, by its number in the run."""
    return s["compute"]["start"] + t


@fast
def token_at(s, t):
    """The token of that row, as an index of the token axis."""
    return row_at(s, t) if s["batched"] == 0 else row_token(s)[row_at(s, t)]
