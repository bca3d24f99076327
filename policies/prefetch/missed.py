"""Missed: what a step misses and does not fetch is brought for the same layer of the next pass.

`of` says which misses: those that the CPU computes (they are uploaded behind its own reading), those that are left out,
or all that are not fetched, substituted ones among them. `top` takes the first of them in demand order, `after` those
that were missed so often since they were last resident. `per_step` is the most that one step suggests. A miss is never
queued or on its way yet, so each suggestion is an upload.
"""

from moereplay.policies.contract import DROPPED, ON_CPU, Choice, Memory, Number, Prefetch, slot

ALL = 0  # of `top` and `per_step`
PARAMS = (
    Number("top", ALL, 0, 1 << 20, integer=True),
    Choice("of", "cpu", ("cpu", "dropped", "any")),
    Number("after", 1, 1, 1 << 20, integer=True),
    Number("per_step", ALL, 0, 1 << 20, integer=True),
)
TOP, OF, AFTER, PER_STEP = (slot(PARAMS, name) for name in ("top", "of", "after", "per_step"))
CPU_ALONE, DROPPED_ALONE = 0, 1  # of `of`
MISSES = 0  # row column: since it was last resident


def suggest(now, step, experts, copies, own, out):
    """Suggest in demand order."""
    found, count = 0, 0
    for n in range(len(step.expert)):
        y = step.expert[n] * now["precisions"]
        if not is_meant(step.unfetched[n], own):
            continue
        own.rows[y][MISSES] += 1
        found += 1
        if own.rows[y][MISSES] < own.par[AFTER] or is_enough(found - 1, own.par[TOP]):
            continue
        if is_enough(count, own.par[PER_STEP]):
            continue
        out[count] = y
        count += 1
    return count


def is_meant(unfetched, own):
    """Return whether `of` means a miss."""
    if own.par[OF] == CPU_ALONE:
        return unfetched == ON_CPU
    if own.par[OF] == DROPPED_ALONE:
        return unfetched == DROPPED
    return unfetched != 0


def is_enough(count, most):
    """Return whether so many are all that may be."""
    return most != ALL and count >= most


def on_insert(now, experts, copies, own, y, prefetched):
    """Count from 0 again."""
    own.rows[y][MISSES] = 0


POLICY = Prefetch(
    name="missed",
    summary="load what this pass ran on the CPU or left out, for the next pass",
    source="llama.cpp's expert cache, KTransformers and FreeToken: missed experts are uploaded behind the CPU's work",
    params=PARAMS,
    memory=Memory(rows=1),
    suggest=suggest,
    on_insert=on_insert,
    next_pass=True,
    reads=frozenset({"unfetched"}),
)
