"""Fiddler (arXiv 2402.07033): a missing expert runs on the CPU if that is faster than to load it.

One load costs as much as `ratio` tokens on the CPU; the authors' constants, 70 ms and 7 ms, make it 10. `ratio=0`
takes it from the platform: (transfer + one token's compute) / one token on the CPU, of the mean expert. CPU time grows
with the tokens routed to an expert, a load's does not.

`goal=sum` decides for each expert alone, as the published code does. `goal=max`, as its comment says, takes the split
of the step's misses that ends first when CPU and link work side by side: those of fewest tokens go to the CPU, ties by
demand order from the back; of equal splits the one with the least on the CPU. `decode=cpu` leaves every miss of a
decode pass to the CPU, as the code does; `decode=cost` asks there, too.
"""

from moereplay.policies.contract import CPU, DECODE, Choice, Miss, Number, slot

PARAMS = (
    Number("ratio", 0, 0, 1e12),
    Choice("goal", "sum", ("sum", "max")),
    Choice("decode", "cpu", ("cpu", "cost")),
)
RATIO, GOAL, ON_DECODE = slot(PARAMS, "ratio"), slot(PARAMS, "goal"), slot(PARAMS, "decode")
MAX, COST = 1, 1


def resolve(now, step, experts, copies, own, missing, free, verdict):
    """Load the experts for which loading is faster."""
    all_on_cpu = now["phase"] == DECODE and own.par[ON_DECODE] != COST
    for m in range(len(missing)):
        cheaper = step.tokens[missing[m]] < own.par[RATIO]
        verdict[m] = CPU if all_on_cpu or (cheaper and own.par[GOAL] != MAX) else 0
    if own.par[GOAL] == MAX and not all_on_cpu:
        split(step, missing, own.par[RATIO], verdict)


def split(step, missing, ratio, verdict):
    """Hand the CPU one miss after the other as long as the later of the two ends sooner."""
    on_cpu, left = 0.0, len(missing)
    while left > 0:
        m = fewest(step, missing, verdict)
        on_cpu += step.tokens[missing[m]]
        if max(on_cpu, ratio * (left - 1)) >= ratio * left:
            return
        verdict[m] = CPU
        left -= 1


def fewest(step, missing, verdict):
    """Return the miss of fewest tokens that is still to be loaded, ties to the last."""
    best = -1
    for m in range(len(missing)):
        if verdict[m] == 0 and (best < 0 or step.tokens[missing[m]] <= step.tokens[missing[best]]):
            best = m
    return best


def priced(params, costs):
    """Return the platform's ratio, if the parameter leaves it open."""
    if params["ratio"] > 0 or costs.cpu == 0:
        return params
    return {**params, "ratio": (costs.load + costs.compute) / costs.cpu}


def uses_cpu(params):
    """Return True: the policy always requires a CPU."""
    return True


POLICY = Miss(
    name="fiddler",
    summary="run a miss on the CPU where that is cheaper than loading it",
    source="Fiddler, arXiv 2402.07033 and its repository",
    params=PARAMS,
    resolve=resolve,
    priced=priced,
    uses_cpu=uses_cpu,
    reads=frozenset(),
)
