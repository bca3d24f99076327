"""What the misses of an eviction policy are made of, and what would avoid them: the bounds beside results, subtracted.

compulsory + capacity + admission + victim = misses, where *capacity* is what the relaxed bound misses beyond the
compulsory ones, *admission* what the forced bound misses beyond the relaxed one, and *victim* what the policy misses
beyond the forced one. The *admission share* is admission / (admission + victim), as in arXiv 2608.07911.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moereplay.analysis.tables import Share, table
from moereplay.results.metrics import quotient

#: Of a document: what a row of the table is called, and where its misses or hits stand.
MISSES = {"compulsory": "compulsory", "relaxed belady": "relaxed", "forced belady": "forced"}
FIXED = {"fixed set, preloaded": "fixed_preloaded", "fixed set, loaded": "fixed_loaded_once"}
ROUTED = {"routing, at least": "at_least", "routing, reached": "at_most"}
ANY_PREFETCH = "any prefetch"
PARTS = ("capacity", "admission", "victim")
HEADS = {"what": "", "hit_rate": "hits", "tokens_per_s": "tok/s"} | {f"{part}_misses": part for part in PARTS}
#: What avoids a part of the misses.
REMEDIES = {
    "capacity": "more memory, or other routing",
    "admission": "to keep some misses out of the cache",
    "victim": "to choose other victims",
}
LEGEND = (
    "relaxed, forced belady: the fewest misses of any eviction, and of any that admits every miss",
    "fixed set: of residents that never change, loaded free of charge or by a first miss each",
    "any prefetch: no eviction with any prefetch is faster than this",
    "capacity, admission, victim: a policy's misses beyond the compulsory ones, added up",
)


@dataclass(frozen=True)
class Gap:
    """Misses of one policy, in parts that add up."""

    compulsory: int
    capacity: int
    admission: int | None  #: None for a policy that may reject: then `victim` is both
    victim: int

    @property
    def beyond(self) -> int:
        """Misses that some cache would avoid."""
        return self.capacity + (self.admission or 0) + self.victim

    @property
    def admission_share(self) -> float | None:
        """Of what a policy misses beyond the relaxed bound; None where nothing is, or where the parts are one."""
        return None if self.admission is None else quotient(self.admission, self.admission + self.victim)


def gap_of(misses: int, compulsory: int, relaxed: int, forced: int | None) -> Gap:
    """The parts of a policy's misses without prefetch; `forced` is None if the policy may reject a miss."""
    if forced is None:
        return Gap(compulsory, relaxed - compulsory, None, misses - relaxed)
    return Gap(compulsory, relaxed - compulsory, forced - relaxed, misses - forced)


def rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line for every limit and policy of one document of `moereplay bounds`: misses, hit rate, tokens/s, parts."""
    limits, accesses = document["limits"], document["accesses"]
    lines = [_line(name, limits[key], accesses) for name, key in MISSES.items()]
    for name, key in FIXED.items():
        lines.append(_line(name, None if limits[key] is None else accesses - limits[key], accesses))
    routed = limits["routed"] or {}
    lines += [_line(name, routed.get(key), accesses) for name, key in ROUTED.items() if routed]
    lines.append(_line(ANY_PREFETCH, None, accesses) | {"tokens_per_s": limits["tokens_per_s"]})
    for policy in document["policies"]:
        known = {"tokens_per_s": policy["tokens_per_s"]} | (policy["gap"] or {})
        lines.append(_line(policy["eviction"], policy["misses"], accesses) | _parts(known))
    return lines


def _line(name: str, misses: int | None, accesses: int) -> dict[str, Any]:
    rate = None if misses is None else quotient(accesses - misses, accesses)
    return {"what": name, "misses": misses, "hit_rate": rate} | _parts({})


def _parts(known: Mapping[str, Any]) -> dict[str, Any]:
    return {"tokens_per_s": known.get("tokens_per_s")} | {f"{part}_misses": known.get(part) for part in PARTS}


def drawn(document: Mapping[str, Any]) -> list[str]:
    """One document as a table and its sentences."""
    shown = [{HEADS.get(name, name): _cell(name, value) for name, value in line.items()} for line in rows(document)]
    return [table(shown), *sentences(document)]


def _cell(name: str, value: Any) -> object:
    return Share(value) if name == "hit_rate" and value is not None else value


def sentences(document: Mapping[str, Any]) -> list[str]:
    """What each policy's misses are made of, and what would pay for the best of them."""
    known = [policy for policy in document["policies"] if policy["gap"]]
    said = [_made_of(policy) for policy in known]
    if known:
        said.append(_advice(document, min(known, key=lambda policy: policy["misses"])))
    return said


def _made_of(policy: Mapping[str, Any]) -> str:
    gap, name = policy["gap"], policy["eviction"]
    beyond = policy["misses"] - gap["compulsory"]
    if not beyond:
        return f"{name}: only compulsory misses"
    parts = [f"{gap['capacity'] / beyond:.1%} lack of capacity"]
    if gap["admission"] is None:
        parts.append(f"{gap['victim'] / beyond:.1%} admission and victims")
    else:
        parts += [f"{gap['admission'] / beyond:.1%} admission", f"{gap['victim'] / beyond:.1%} victims"]
    return f"{name}: {beyond:,} misses beyond the compulsory ones, {', '.join(parts)}"


def _advice(document: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    """One sentence: the largest part of the best policy's misses, what prefetch and what routing could do."""
    gap = best["gap"]
    parts = {name: gap[name] for name in REMEDIES if gap[name]}
    said = [f"what would pay after {best['eviction']}"]
    if parts:
        most = max(parts, key=lambda name: parts[name])
        said.append(f"{REMEDIES[most]} ({parts[most]:,} misses)")
    if least := document["limits"]["time_ns"]:
        said.append(f"any eviction with any prefetch, at most {best['time_ns'] / least:.3g} times as fast")
    routed = document["limits"]["routed"]
    if routed:
        said.append(
            f"other routing with the best eviction, from {best['misses']:,} to {routed['at_most']:,} misses, "
            f"never below {routed['at_least']:,}"
        )
    return f"{said[0]}: {'; '.join(said[1:]) or 'nothing'}"


def flat(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All documents as rows for other programs: settings first, then the lines of `rows`."""
    return [{**document["config"], **line} for document in documents for line in rows(document)]
