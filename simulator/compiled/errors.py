"""How a run may end before its trace does."""

from __future__ import annotations

from moereplay.simulator.jit.marks import fast

NO_ERROR, STUCK, NO_CPU, NO_LOGITS, NO_HOOK = range(5)
BAD_VICTIM, BAD_CHOICE, BAD_NAME, BAD_WANT, BAD_VERDICT, BAD_STAND_IN = range(5, 11)
STOPPED, TOO_LATE = 11, 12


@fast
def fail(s, error, culprit):
    """End the run. `culprit` is the wrong value that a hook gave, or 0."""
    s["errors"]["error"], s["errors"]["culprit"] = error, culprit
