"""CPU: every missing expert is executed where it lies, by the CPU; nothing is ever fetched on demand.

`below=N` does so in passes of fewer than N tokens and fetches in the others: engines stream experts to the accelerator
for a prompt, which uses each of them many times.
"""

from moereplay.policies.contract import CPU, Miss, Number, slot

ALWAYS = 0  # of `below`
PARAMS = (Number("below", ALWAYS, 0, 1 << 30, integer=True, added=True),)
BELOW = slot(PARAMS, "below")


def resolve(now, step, experts, copies, own, missing, free, verdict):
    """Set every verdict to CPU, or to fetching at the stored precision in a pass of too many tokens."""
    computes = own.par[BELOW] == ALWAYS or now["tokens"] < own.par[BELOW]
    for m in range(len(missing)):
        verdict[m] = CPU if computes else 0


def uses_cpu(params):
    """Return True: the policy always requires a CPU."""
    return True


POLICY = Miss(
    name="cpu",
    summary="run every miss on the CPU",
    source="llama.cpp and KTransformers: experts outside VRAM run on the CPU",
    params=PARAMS,
    resolve=resolve,
    uses_cpu=uses_cpu,
    never_fetches=lambda params: params["below"] == ALWAYS,
    reads=frozenset(),
)
