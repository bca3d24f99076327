"""How much a token's expert matters: what HOBBIT's expert scorer (arXiv 2411.01433 §3.2) makes of gate weights."""

from moereplay.policies.contract import DROP


def scored_tier(ahead, total, t1, t2, lowest):
    """The precision for an expert behind `ahead` of its token's gate weight `total`, in descending order of weight.

    The highest up to the share t1, the lowest up to t2, else DROP.
    """
    if ahead <= t1 * total:
        return 0
    return lowest if ahead <= t2 * total else DROP
