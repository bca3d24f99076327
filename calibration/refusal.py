"""Why a run is not predicted."""

from __future__ import annotations


class RefusalError(Exception):
    """A cell that cannot be predicted, or not fitted on; the message is the reason, in words."""
