"""Split: of m misses the best round(q * m), at least one, are fetched and the rest run on the CPU (FreeToken)."""

from policies.contract import CPU, Miss, Number, slot

PARAMS = (Number("q", 0.5, 0, 1),)
Q = slot(PARAMS, "q")


def resolve(now, step, experts, copies, own, missing, free, verdict):
    """Misses come in demand order, so the first are the most important."""
    fetched = max(1, int(own.par[Q] * len(missing) + 0.5))
    for m in range(len(missing)):
        verdict[m] = 0 if m < fetched else CPU


POLICY = Miss(
    name="split",
    summary="fetch a share q of the misses, run the rest on the CPU",
    source="FreeToken (arXiv 2608.16157)",
    params=PARAMS,
    resolve=resolve,
    uses_cpu=lambda params: True,
)
