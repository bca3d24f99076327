"""How far the executed mixture is from the router's own: counted only where policies may change it."""

from __future__ import annotations

from collections.abc import Sequence

from policies.contract import NONE
from simulator.reference.ledger import Ledger
from simulator.source import Gate, Gates, Pass


def count_fidelity(
    ledger: Ledger, source: Gates, step_pass: Pass, layer: int, gate: Gate, used: Sequence[Sequence[int]]
) -> None:
    """Kept assignments and mass, rank displacement, total variation: integers, summed over tokens."""
    if list(map(list, gate.ids)) == used:
        routed = sum(e != NONE for row in gate.ids for e in row)
        mass = sum(map(sum, gate.mass))
        for name, amount in (("assignments_kept", routed), ("mass", mass), ("mass_kept", mass)):
            ledger.count(name, layer, amount)
        return
    pairs = list(zip(gate.ids, used, strict=True))
    anew = source.weigh(step_pass, layer, used) if any(replaced(own, run) for own, run in pairs) else ()
    for t, (own, run) in enumerate(pairs):
        _count_token(ledger, layer, gate, t, own, run, anew[t] if replaced(own, run) else ())


def replaced(own: Sequence[int], run: Sequence[int]) -> bool:
    """Whether a token runs an expert that its router did not choose: its whole mixture is then weighed anew.

    Otherwise every expert keeps the weight that the router gave it, and a dropped one leaves the others' as they were.
    """
    return any(e not in (*own, NONE) for e in run)


def _count_token(
    ledger: Ledger, layer: int, gate: Gate, t: int, own: Sequence[int], run: Sequence[int], anew: Sequence[int]
) -> None:
    kept = [j for j, e in enumerate(own) if e != NONE and e in run]
    ledger.count("assignments_kept", layer, len(kept))
    ledger.count("rank_displacement", layer, _displacement(gate, t, own, run))
    if not gate.mass:
        return
    before = {e: mass for e, mass in zip(own, gate.mass[t], strict=True) if e != NONE}
    after = {e: mass for e, mass in (zip(run, anew, strict=True) if anew else before.items()) if e in run and e != NONE}
    ledger.count("mass", layer, sum(before.values()))
    ledger.count("mass_kept", layer, sum(before[own[j]] for j in kept))
    ledger.count("variation", layer, sum(abs(before.get(e, 0) - after.get(e, 0)) for e in before | after) // 2)


def _displacement(gate: Gate, t: int, own: Sequence[int], run: Sequence[int]) -> int:
    """Sum over executed slots of |rank by choice score - slot|; chosen experts keep their recorded rank."""
    if not gate.choice:
        return 0
    others = [e for e in range(len(gate.choice[t])) if e not in own]
    others.sort(key=lambda e: (-gate.choice[t][e], e))
    rank = {e: place for place, e in enumerate([*own, *others])}
    return sum(abs(rank[e] - slot) for slot, e in enumerate(run) if e != NONE)
