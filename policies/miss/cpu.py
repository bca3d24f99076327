"""CPU: every missing expert is executed where it lies, by the CPU; nothing is ever fetched on demand."""

from moereplay.policies.contract import CPU, Miss


def resolve(now, step, experts, copies, own, missing, free, verdict):
    """Set every verdict to CPU."""
    for m in range(len(missing)):
        verdict[m] = CPU


def uses_cpu(params):
    """Return True: the policy always requires a CPU."""
    return True


POLICY = Miss(
    name="cpu",
    summary="execute every miss on the CPU",
    source="llama.cpp and KTransformers: experts outside VRAM run on the CPU",
    resolve=resolve,
    uses_cpu=uses_cpu,
    reads=frozenset(),
)
