"""Distance of the executed mixture from the router's own, and the gate weights that it runs with.

A recorded weight and one recomputed from recorded logits differ in their last bits, which would change demand order.
Therefore a policy that changes nothing changes no weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moereplay.policies.contract import NONE
from moereplay.simulator.reference.counters import Counters
from moereplay.simulator.source import Gate, Gates, Mixture, Pass

Rows = Sequence[Sequence[int]]


def weights_of(source: Gates, step_pass: Pass, layer: int, gate: Gate, routed: Rows, run: Rows) -> Rows:
    """Return (T, k) UNITs of `run`, given the routed experts; () if nothing changed and none are recorded."""
    tokens = list(zip(gate.ids, routed, run, strict=True))
    anew = [reweighed(*token) for token in tokens]
    if not any(anew) and not gate.mass:
        return ()
    weighed = source.weigh(step_pass, layer, run) if any(anew) else ()
    if not gate.mass:
        return weighed
    return [weighed[t] if anew[t] else kept(gate, t, run[t]) for t in range(len(tokens))]


def kept(gate: Gate, t: int, run: Sequence[int]) -> list[int]:
    """Return the router's weights of those of its experts that token t runs."""
    own = dict(zip(gate.ids[t], gate.mass[t], strict=True))
    return [own[e] if e != NONE else 0 for e in run]


def reweighed(own: Sequence[int], routed: Sequence[int], run: Sequence[int]) -> bool:
    """Return True if a token's weights are recomputed: it has fewer experts, or one that is not its own.

    Otherwise every expert keeps its recorded weight; dropping one at a miss does not change the others.
    """
    return replaced(own, run) or sum(e != NONE for e in routed) < sum(e != NONE for e in own)


def replaced(own: Sequence[int], run: Sequence[int]) -> bool:
    """Return True if a token runs an expert that its router did not choose."""
    return any(e not in (*own, NONE) for e in run)


# distance from the router: counted only if policies may change the mixture


def count_fidelity(counters: Counters, source: Gates, step_pass: Pass, layer: int, mixture: Mixture) -> None:
    """Count kept, substituted and dropped assignments and gate weight, rank displacement, total variation.

    Each token's are charged to its own request and phase; rejected drafts count nothing.
    """
    gate, run = mixture.gate, mixture.run
    same = list(map(list, gate.ids)) == run
    tokens = list(zip(gate.ids, mixture.routed, run, strict=True))
    anew = [] if same else [reweighed(*token) for token in tokens]
    weighed = source.weigh(step_pass, layer, run) if any(anew) else ()
    for part, places in step_pass.kept_parts().items():
        counters.charge_to(*part)
        if same:
            _count_kept(counters, layer, gate, places)
        else:
            for t in places:
                _count_token(counters, layer, gate, t, run[t], weighed[t] if anew[t] else ())
        _count_low(counters, layer, mixture, places)
    counters.charge_to(*step_pass.leader)


def _count_kept(counters: Counters, layer: int, gate: Gate, places: Sequence[int]) -> None:
    """Count tokens that run the router's choice; a foreign trace may have weights of unrouted experts."""
    counters.count("assignments_kept", layer, sum(e != NONE for t in places for e in gate.ids[t]))
    weighed = places if gate.mass else ()
    pairs = (pair for t in weighed for pair in zip(gate.ids[t], gate.mass[t], strict=True))
    mass = sum(mass for e, mass in pairs if e != NONE)
    counters.count("mass", layer, mass)
    counters.count("mass_kept", layer, mass)


def _count_token(counters: Counters, layer: int, gate: Gate, t: int, run: Sequence[int], anew: Sequence[int]) -> None:
    own = gate.ids[t]
    kept = [j for j, e in enumerate(own) if e != NONE and e in run]
    counters.count("assignments_kept", layer, len(kept))
    counters.count("rank_displacement", layer, _displacement(gate, t, own, run))
    if not gate.mass:
        return
    before = {e: mass for e, mass in zip(own, gate.mass[t], strict=True) if e != NONE}
    after = {e: mass for e, mass in (zip(run, anew, strict=True) if anew else before.items()) if e in run and e != NONE}
    counters.count("mass", layer, sum(before.values()))
    counters.count("mass_kept", layer, sum(before[own[j]] for j in kept))
    counters.count("variation", layer, sum(abs(before.get(e, 0) - after.get(e, 0)) for e in before | after) // 2)
    _count_lost(counters, layer, own, run, before)


def _count_lost(
    counters: Counters, layer: int, own: Sequence[int], run: Sequence[int], before: Mapping[int, int]
) -> None:
    """Count the weight of experts that did not run.

    Each substitute replaces one of them, first those whose own slot runs something.
    """
    lost = [j for j, e in enumerate(own) if e != NONE and e not in run]
    lost.sort(key=lambda j: (run[j] == NONE, j))
    foreign = sum(e not in (*own, NONE) for e in run)
    for name, slots in (("mass_substituted", lost[:foreign]), ("mass_dropped", lost[foreign:])):
        counters.count(name, layer, sum(before[own[j]] for j in slots))


def _count_low(counters: Counters, layer: int, mixture: Mixture, places: Sequence[int]) -> None:
    """Count the weight of the router's choice that ran below the highest precision."""
    low = {e for e, tier in mixture.tiers.items() if tier > 0}
    if not low or not mixture.gate.mass:
        return
    for t in places:
        pairs = zip(mixture.gate.ids[t], mixture.gate.mass[t], strict=True)
        kept = sum(mass for e, mass in pairs if e in low and e in mixture.run[t])
        counters.count("mass_low_precision", layer, kept)


def _displacement(gate: Gate, t: int, own: Sequence[int], run: Sequence[int]) -> int:
    """Return the sum over executed slots of |rank by choice score - slot|; chosen experts keep their rank."""
    if not gate.choice:
        return 0
    others = [e for e in range(len(gate.choice[t])) if e not in own]
    others.sort(key=lambda e: (-gate.choice[t][e], e))
    rank = {e: place for place, e in enumerate([*own, *others])}
    return sum(abs(rank[e] - slot) for slot, e in enumerate(run) if e != NONE)
