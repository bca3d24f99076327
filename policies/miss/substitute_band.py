"""SMoE's substitution (Zhu et al. 2508.18983): a resident expert replaces one that is barely in the top k.

With S the token's best score outside of its choice, an expert is *top* above (1 + alpha) * S and always loaded. Below,
a missing one is loaded anyway if it is top for another token of the pass; else the best resident expert of score in
((1 - alpha) * S, S] that the token does not use takes its place, ties by lowest id, with its own original weight.
Scores are the router's probabilities. In decode passes only, as in the source; `phase=any` in all.

What finds no stand-in is loaded (`rest=load`), or split as in the paper's algorithm 2 (`rest=balance`): from both ends
of the demand, the better scored to the link while its time so far is not the longer one, else the worse scored to the
CPU. A load costs as much as `ratio` tokens on the CPU; `ratio=0` asks the platform for the mean expert. In a pass of
several tokens every substitutable miss that some token still needs is loaded.
"""

from moereplay.policies.blocks import is_here
from moereplay.policies.contract import CPU, DECODE, NONE, PER_TOKEN, Choice, Miss, Number, always, slot

PARAMS = (
    Number("alpha", 0.35, 0, 1),
    Choice("phase", "decode", ("decode", "any")),
    Choice("rest", "load", ("load", "balance")),
    Number("ratio", 0, 0, 1e12),
)
ALPHA, PHASE = slot(PARAMS, "alpha"), slot(PARAMS, "phase")
REST, RATIO = slot(PARAMS, "rest"), slot(PARAMS, "ratio")
ANY, BALANCE = 1, 1
MINUS_INFINITY = -float("inf")


def resolve(now, step, experts, copies, own, missing, free, verdict):
    """Let tokens decide where they may substitute; load or split the rest."""
    active = now["phase"] == DECODE or own.par[PHASE] == ANY
    for m in range(len(missing)):
        verdict[m] = PER_TOKEN if active else 0
    if own.par[REST] == BALANCE:
        if active and now["tokens"] == 1:
            settle_alone(now, step, copies, own, missing, verdict)
        balance(step, own.par[RATIO], missing, verdict)


def settle_alone(now, step, copies, own, missing, verdict):
    """Settle a pass of one token, whose substitutions are known beforehand: the others are the rest."""
    first, used = now["layer"] * now["experts"], [0] * now["experts"]
    for e in step.ids[0]:
        if e != NONE:
            used[e] = 1
    for m in range(len(missing)):
        eligible = [0] * now["experts"]
        for e in range(now["experts"]):
            here = is_here(now, copies, (first + e) * now["precisions"])
            eligible[e] = 1 if here and used[e] == 0 else 0
        other = stand_in(now, step, own, 0, step.expert[missing[m]] - first, eligible)
        if other == NONE:
            verdict[m] = 0
        else:
            used[other], used[step.expert[missing[m]] - first] = 1, 0


def balance(step, ratio, missing, verdict):
    """Run Algorithm 2 over the misses to be loaded, which come by descending score."""
    best, worst, loading, computing = 0, len(missing) - 1, 0.0, 0.0
    while best <= worst:
        if verdict[best] != 0:
            best += 1
        elif verdict[worst] != 0:
            worst -= 1
        elif loading <= computing:
            loading += ratio
            best += 1
        else:
            computing += step.tokens[missing[worst]]
            verdict[worst] = CPU
            worst -= 1


def substitute(now, step, experts, copies, own, t, j, eligible):
    """Return the expert that takes the place of the token's j-th, or NONE."""
    return stand_in(now, step, own, t, step.ids[t][j], eligible)


def stand_in(now, step, own, t, missing, eligible):
    """Return the best eligible expert in the band below the token's choice, unless a token requires `missing`."""
    if is_top_anywhere(now, step, own, missing):
        return NONE
    outside = best_outside(step, t)
    floor = (1.0 - own.par[ALPHA]) * outside
    best, scores = NONE, step.gate[t]
    for e in range(now["experts"]):
        inside = eligible[e] == 1 and floor < scores[e] <= outside and step.choice[t][e] > MINUS_INFINITY
        if inside and (best == NONE or scores[e] > scores[best]):
            best = e
    return best


def is_top_anywhere(now, step, own, e):
    """Return whether a token of the pass chose e with a score clearly above the best that it left out."""
    for t in range(now["tokens"]):
        for chosen in step.ids[t]:
            if chosen == e and step.gate[t][e] > (1.0 + own.par[ALPHA]) * best_outside(step, t):
                return True
    return False


def best_outside(step, t):
    """Return the best score that the token left out; 0 if it chose every expert that it may."""
    best = 0
    for e in range(len(step.gate[t])):
        chosen = False
        for own_expert in step.ids[t]:
            chosen = chosen or own_expert == e
        if not chosen and step.choice[t][e] > MINUS_INFINITY:
            best = max(best, step.gate[t][e])
    return best


def priced(params, costs):
    """Return the platform's ratio, if the parameter leaves it open."""
    if params["rest"] != "balance" or params["ratio"] > 0 or costs.cpu == 0:
        return params
    return {**params, "ratio": costs.load / costs.cpu}


def uses_cpu(params):
    """Return whether the rest is split with the CPU."""
    return params["rest"] == "balance"


POLICY = Miss(
    name="substitute_band",
    summary="run a resident expert just below the top k instead of one just inside",
    source="SMoE, Zhu et al. arXiv 2508.18983",
    params=PARAMS,
    needs=always("logits"),
    resolve=resolve,
    substitute=substitute,
    uses_cpu=uses_cpu,
    priced=priced,
    changes_output=True,
    reads=frozenset({"choice", "ids"}),
)
