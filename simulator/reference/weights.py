"""Gate weights of what runs: the router's own where a token keeps its experts, weighed anew where it does not.

A recorded weight and the same one worked out from recorded logits differ in their last bits, which would order demand
otherwise; so a policy that changes nothing changes no weight.
"""

from __future__ import annotations

from collections.abc import Sequence

from moereplay.policies.contract import NONE
from moereplay.simulator.source import Gate, Gates, Pass

Rows = Sequence[Sequence[int]]


def weights_of(source: Gates, step_pass: Pass, layer: int, gate: Gate, routed: Rows, run: Rows) -> Rows:
    """(T, k) UNITs of `run`, given what routing made of the gate; () if nothing changed and none are recorded."""
    tokens = list(zip(gate.ids, routed, run, strict=True))
    anew = [reweighed(*token) for token in tokens]
    if not any(anew) and not gate.mass:
        return ()
    weighed = source.weigh(step_pass, layer, run) if any(anew) else ()
    if not gate.mass:
        return weighed
    return [weighed[t] if anew[t] else kept(gate, t, run[t]) for t in range(len(tokens))]


def kept(gate: Gate, t: int, run: Sequence[int]) -> list[int]:
    """What the router gave to those of its experts that token t runs."""
    own = dict(zip(gate.ids[t], gate.mass[t], strict=True))
    return [own[e] if e != NONE else 0 for e in run]


def reweighed(own: Sequence[int], routed: Sequence[int], run: Sequence[int]) -> bool:
    """Whether a token's mixture is weighed anew: it was routed to fewer experts, or runs one that is not its own.

    Otherwise every expert keeps the weight that the router gave it, and one dropped at a miss leaves the others' as
    they were.
    """
    return replaced(own, run) or sum(e != NONE for e in routed) < sum(e != NONE for e in own)


def replaced(own: Sequence[int], run: Sequence[int]) -> bool:
    """Whether a token runs an expert that its router did not choose."""
    return any(e not in (*own, NONE) for e in run)
