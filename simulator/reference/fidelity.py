"""How far the executed mixture is from the router's own: counted only where policies may change it."""

from __future__ import annotations

from collections.abc import Sequence

from policies.contract import NONE
from simulator.reference.ledger import Ledger
from simulator.source import Gate, Pass, Source


def count_fidelity(
    ledger: Ledger, source: Source, step_pass: Pass, layer: int, gate: Gate, used: Sequence[Sequence[int]]
) -> None:
    """Kept assignments and mass, rank displacement, total variation: integers, summed over tokens."""
    if list(map(list, gate.ids)) == used:
        routed = sum(e != NONE for row in gate.ids for e in row)
        mass = sum(map(sum, gate.mass))
        for name, amount in (("assignments_kept", routed), ("mass", mass), ("mass_kept", mass)):
            ledger.count(name, layer, amount)
        return
    weights = _weights(source, step_pass, layer, gate, used)
    for t, (own, run) in enumerate(zip(gate.ids, used, strict=True)):
        _count_token(ledger, layer, gate, t, own, run, weights[t] if weights else ())


def _weights(source: Source, step_pass: Pass, layer: int, gate: Gate, used: Sequence[Sequence[int]]) -> Sequence:
    """Weights of the executed ids; a dropped expert leaves the others' as recorded, a new one has them weighed anew."""
    if any(e not in (*own, NONE) for own, run in zip(gate.ids, used, strict=True) for e in run):
        return source.weigh(step_pass, layer, used)
    return [
        [mass if e != NONE else 0 for mass, e in zip(row, run, strict=True)]
        for row, run in zip(gate.mass, used, strict=True)
    ]


def _count_token(
    ledger: Ledger, layer: int, gate: Gate, t: int, own: Sequence[int], run: Sequence[int], weights: Sequence[int]
) -> None:
    kept = [j for j, e in enumerate(own) if e != NONE and e in run]
    ledger.count("assignments_kept", layer, len(kept))
    ledger.count("rank_displacement", layer, _displacement(gate, t, own, run))
    if not gate.mass:
        return
    before = {e: mass for e, mass in zip(own, gate.mass[t], strict=True) if e != NONE}
    after = {e: mass for e, mass in zip(run, weights, strict=True) if e != NONE}
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
