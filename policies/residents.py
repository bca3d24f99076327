"""Shared look-ups: the row of own memory of an expert, whether it is resident, whether it is predicted."""

from moereplay.policies.contract import RESIDENT, expert_of


def home(now, y):
    """The row of own memory that all copies of y's expert share: its most precise copy's."""
    return y - y % now["precisions"]


def is_here(now, copies, y):
    """Whether any copy of y's expert is resident."""
    first = home(now, y)
    for copy in range(first, first + now["precisions"]):
        if copies[copy]["state"] == RESIDENT:
            return True
    return False


def is_predicted(now, experts, copies, y):
    """Whether a prefetch of this pass suggested or fetched y for a layer whose gate is still to come."""
    expert = experts[expert_of(now, y)]
    if expert["layer"] < now["layer"] or (expert["layer"] == now["layer"] and now["gated"] == 1):
        return False
    brought = copies[y]["prefetched"] == 1 and expert["last_pass"] == now["pass"]
    return brought or expert["prediction_pass"] == now["pass"]
