"""Fetch: wait for every missing expert, as stored or at one precision."""

from moereplay.policies.contract import Miss, Number

PARAMS = (Number("bits", 0, 0, 32),)


def resolve(now, step, experts, copies, own, missing, free, verdict):
    """Set every verdict to 0, the only precision."""
    for m in range(len(missing)):
        verdict[m] = 0


def bits(params):
    """Return the one precision; 0 is the trace's own."""
    return () if params["bits"] == 0 else (params["bits"],)


POLICY = Miss(
    name="fetch",
    summary="wait until the expert is loaded (bits=0: as stored)",
    source="SpecMD §3.1.2 Fetch",
    params=PARAMS,
    resolve=resolve,
    fetches_all=True,
    bits=bits,
    reads=frozenset(),
)
