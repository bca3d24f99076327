"""Split the misses of an eviction policy into causes by subtracting bounds, with the remedy for each part.

compulsory + capacity + admission + victim = misses, where *capacity* is what the relaxed bound misses beyond the
compulsory ones, *admission* what the forced bound misses beyond the relaxed one, and *victim* what the policy misses
beyond the forced one. The *admission share* is admission / (admission + victim), as in arXiv 2608.07911.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moereplay.analysis.tables import Share, table
from moereplay.results.remarks import within
from moereplay.results.result import quotient
from moereplay.traces.texts import times_as_fast

#: Names of table rows, and the keys of their misses, hits or routed misses in a document.
MISSES = {"compulsory": "compulsory", "relaxed belady": "relaxed", "forced belady": "forced"}
REACHED = {"relaxed, reached": "relaxed_reached", "forced, reached": "forced_reached"}
FIXED = {"fixed set, preloaded": "fixed_preloaded", "fixed set, loaded": "fixed_loaded_once"}
ROUTED = {"routing, at least": "at_least", "routing, reached": "at_most"}
COMPLETE = {"complete steps, reached": "complete_steps_reached", "complete steps, at most": "complete_steps"}
ANY_PREFETCH = "any prefetch"
PARTS = ("capacity", "admission", "victim")
HEADS = {"what": "", "hit_rate": "hits", "tokens_per_s": "tok/s"} | {f"{part}_misses": part for part in PARTS}
#: What would avoid each part of the misses.
REMEDIES = {
    "capacity": "more memory, or other routing",
    "admission": "rejecting some misses",
    "victim": "better victim selection",
}
LEGEND = (
    "relaxed, forced belady: lower bound on misses for any eviction, and for any that admits every miss",
    "fixed set: residents never change, and are preloaded for free or loaded by one miss each",
    "any prefetch: upper bound on speed for any eviction with any prefetch",
    "capacity, admission, victim: parts of a policy's misses beyond the compulsory ones",
)


@dataclass(frozen=True)
class Gap:
    """Misses of one policy, in parts that add up."""

    compulsory: int
    capacity: int
    admission: int | None  #: None for a policy that may reject misses: `victim` then includes it
    victim: int

    @property
    def beyond(self) -> int:
        """Misses beyond the compulsory ones."""
        return self.capacity + (self.admission or 0) + self.victim

    @property
    def admission_share(self) -> float | None:
        """Share of admission in the misses beyond the relaxed bound; None if there are none, or if the parts cannot be
        separated.
        """
        return None if self.admission is None else quotient(self.admission, self.admission + self.victim)


def gap_of(misses: int, compulsory: int, relaxed: int, forced: int | None) -> Gap:
    """Split the misses of a policy without prefetch; `forced` is None if the policy may reject a miss."""
    if forced is None:
        return Gap(compulsory, relaxed - compulsory, None, misses - relaxed)
    return Gap(compulsory, relaxed - compulsory, forced - relaxed, misses - forced)


def rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row per limit and policy of one `moereplay bounds` document: misses, hit rate, tokens/s, parts."""
    limits, accesses = document["limits"], document["accesses"]
    lines = [_line(name, limits[key], accesses) for name, key in MISSES.items()]
    lines += [_line(name, limits[key], accesses) for name, key in REACHED.items() if limits.get(key) is not None]
    for name, key in FIXED.items():
        lines.append(_line(name, None if limits[key] is None else accesses - limits[key], accesses))
    routed = limits["routed"] or {}
    lines += [_line(name, routed.get(key), accesses) for name, key in ROUTED.items() if routed]
    lines.append(_line(ANY_PREFETCH, None, accesses) | {"tokens_per_s": limits["tokens_per_s"]})
    for policy in document["policies"]:
        known = {"tokens_per_s": policy["tokens_per_s"]} | (policy["gap"] or {})
        lines.append(_line(policy["eviction"], policy["misses"], accesses) | _parts(known))
    return lines


def with_complete(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return these rows with complete steps, and one for each of their limits, a sentence below the table."""
    counts = {policy["eviction"]: policy["complete_steps"] for policy in document["policies"]}
    found = {name: document["limits"][key] for name, key in COMPLETE.items()}
    more = [_line(name, None, document["accesses"]) for name in found]
    return [line | {"complete_steps": (counts | found).get(line["what"])} for line in (*rows(document), *more)]


def _line(name: str, misses: int | None, accesses: int) -> dict[str, Any]:
    rate = None if misses is None else quotient(accesses - misses, accesses)
    return {"what": name, "misses": misses, "hit_rate": rate} | _parts({})


def _parts(known: Mapping[str, Any]) -> dict[str, Any]:
    return {"tokens_per_s": known.get("tokens_per_s")} | {f"{part}_misses": known.get(part) for part in PARTS}


def drawn(document: Mapping[str, Any]) -> list[str]:
    """Return one document as a table and its sentences."""
    shown = [{HEADS.get(name, name): _cell(name, value) for name, value in line.items()} for line in rows(document)]
    return [table(shown), *sentences(document)]


def _cell(name: str, value: Any) -> object:
    return Share(value) if name == "hit_rate" and value is not None else value


def sentences(document: Mapping[str, Any]) -> list[str]:
    """Return the causes of each policy's misses, and the best remedy for the best policy."""
    known = [policy for policy in document["policies"] if policy["gap"]]
    said = [*_brackets(document), *_complete(document), *(_made_of(policy) for policy in known)]
    if known:
        said.append(_advice(document, min(known, key=lambda policy: policy["misses"])))
    return said


def _brackets(document: Mapping[str, Any]) -> list[str]:
    """Return how far the fewest misses are known, where experts of a pool differ in bytes."""
    limits, said = document["limits"], []
    for name in ("relaxed", "forced"):
        if (reached := limits.get(f"{name}_reached")) is not None:
            gap = quotient(reached - limits[name], document["accesses"])
            said.append(f"{name} belady: upper bound on hits, {within(gap or 0)}")
    return said


def _complete(document: Mapping[str, Any]) -> list[str]:
    """Return how many steps have no miss under each policy, with the future known, and at most under any eviction."""
    names = ("complete_steps", "complete_steps_reached", "steps")
    most, reached, steps = (document["limits"].get(name) for name in names)
    if most is None or not steps:
        return []
    named = ", ".join(f"{each['eviction']} {each['complete_steps'] / steps:.1%}" for each in document["policies"])
    known = f"{reached / steps:.1%} if the future is known, any eviction at most {most / steps:.1%} of {steps:,}"
    return [f"complete steps, without a miss: {named}; {known}"]


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
    gap = best["gap"]
    parts = {name: gap[name] for name in REMEDIES if gap[name]}
    said = [f"remaining potential after {best['eviction']}"]
    if parts:
        most = max(parts, key=lambda name: parts[name])
        said.append(f"{REMEDIES[most]} ({parts[most]:,} misses)")
    if least := document["limits"]["time_ns"]:
        said.append(f"any eviction with any prefetch, at most {times_as_fast(best['time_ns'] / least, 3)}")
    routed = document["limits"]["routed"]
    if routed:
        said.append(
            f"other routing with the best eviction, {best['misses']:,} to {routed['at_most']:,} misses, "
            f"never below {routed['at_least']:,}"
        )
    return f"{said[0]}: {'; '.join(said[1:]) or 'nothing'}"


def flat(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of all documents for other programs, each after its settings."""
    return [{**document["config"], **line} for document in documents for line in with_complete(document)]
