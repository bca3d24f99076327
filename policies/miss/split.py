"""Split: of m misses the best round(q * m), at least one, are fetched and the rest run on the CPU (FreeToken).

q = -1 uses the share with which link and CPU finish together, as the authors' code computes it from the
bandwidths of both: B_link / (B_link + B_CPU), here of the mean expert's load and of one token on the CPU.
"""

from moereplay.policies.contract import CPU, Miss, Number, slot

PARAMS = (Number("q", -1, -1, 1),)
Q = slot(PARAMS, "q")


def resolve(now, step, experts, copies, own, missing, free, verdict):
    """Split the misses, which come in demand order: the first are the most important."""
    fetched = max(1, int(own.par[Q] * len(missing) + 0.5))
    for m in range(len(missing)):
        verdict[m] = 0 if m < fetched else CPU


def priced(params, costs):
    """Return the platform's share, if the parameter leaves it open."""
    if params["q"] >= 0 or costs.cpu == 0:
        return params
    return {**params, "q": costs.cpu / (costs.load + costs.cpu)}


POLICY = Miss(
    name="split",
    summary="fetch a share q of the misses, run the others on the CPU",
    source="FreeToken (arXiv 2608.16157)",
    params=PARAMS,
    resolve=resolve,
    priced=priced,
    uses_cpu=lambda params: True,
    reads=frozenset(),
)
