"""The gate: one indivisible event that decides routing, look-up, miss handling and prefetching."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from moereplay.policies.contract import (
    CPU,
    DROP,
    DROPPED,
    IN_FLIGHT,
    NEVER,
    NONE,
    ON_CPU,
    PER_TOKEN,
    QUEUED,
    REPLACED,
    RESIDENT,
    Step,
)
from moereplay.policies.files import complaint
from moereplay.simulator.reference.cache import Cache
from moereplay.simulator.reference.counters import Counters, EventLog, count_fidelity, weights_of
from moereplay.simulator.reference.hooks import BoundHooks
from moereplay.simulator.reference.links import Links
from moereplay.simulator.reference.state import Tables, Transfer
from moereplay.simulator.source import Gate, Gates, Mixture, Pass
from moereplay.traces.demand import Union, union_of


class Served(Enum):
    """Outcome of an access."""

    HIT = 0
    LATE = 1
    FETCH = 2
    DROP = 3
    CPU = 4
    REPLACED = 5  #: by substitutes, for every token

    @property
    def runs_here(self) -> bool:
        """True if it is computed from the fast tier, perhaps after a transfer."""
        return self in (Served.HIT, Served.LATE, Served.FETCH)

    @property
    def runs(self) -> bool:
        """True if it is computed, on the accelerator or on the CPU."""
        return self.runs_here or self is Served.CPU

    @property
    def waits(self) -> bool:
        """True if compute waits for a transfer first."""
        return self in (Served.LATE, Served.FETCH)


@dataclass
class Access:
    """One demanded expert of a step, or a substitute, and how it is served."""

    n: int  #: position in the demand, NONE for a substitute
    x: int
    y: int  #: the copy that serves it
    tokens: int
    served: Served
    substitutes: dict[int, int] = field(default_factory=dict)  #: expert x -> tokens that it takes over


#: Not resident at look-up, and executed.
ABSENT_YET_RUN = (Served.FETCH, Served.CPU)


@dataclass
class Demanded:
    """Demand of a step after its gate."""

    step_pass: Pass
    gate: Gate
    union: Union
    step: Step
    ids: list[list[int]]  #: what each token runs: routing's choice, then substitutes and -1 for dropped
    wants: list[int]
    misses: int = 0
    tiers: dict[int, int] = field(default_factory=dict)  #: executed expert of the layer -> precision it runs at


# the gate


class Gatekeeper:
    """Steps 2 to 7 of semantics §3. `atomic` calls them together; `sequential` looks experts up one by one."""

    def __init__(
        self,
        source: Gates,
        tables: Tables,
        hooks: BoundHooks,
        cache: Cache,
        links: Links,
        counters: Counters,
        log: EventLog,
    ) -> None:
        self._source, self._tables, self._hooks = source, tables, hooks
        self._cache, self._links, self._counters, self._log = cache, links, counters, log
        self._precisions = tables.now["precisions"]
        self._predicted: dict[int, list[int]] = {}  # target layer -> experts named for it in this pass
        self._reach = hooks.prefetch.policy.names_ahead(hooks.prefetch.params)
        #: The prefetch policy reads the verdicts on a step's misses, and names experts of the next pass.
        self.suggests_when_decided = self._next_pass = hooks.prefetch.policy.next_pass
        self._gated = set[int]()  # layers of which a gate has run since the start or the last reset
        self._out = hooks.prefetch.output(len(tables.copies))

    def clear(self) -> None:
        """Forget what was predicted, and that anything could have been."""
        self._predicted.clear()
        self._gated.clear()

    # 2: routing

    def open(self, step_pass: Pass, layer: int) -> Demanded:
        """Route the tokens, form the union of their demand, cancel outdated prefetches."""
        self._tables.now.update(gated=1, absent=-1)
        gate = self._source.gate(step_pass, layer)
        ids, weight, union = self._route(gate, step_pass, layer)
        self._links.cancel(self._tables.now["step"])
        base = layer * self._tables.now["experts"]
        step = Step(
            ids=ids,
            logits=gate.logits,
            choice=gate.choice,
            gate=gate.scores,
            look_order=gate.look_order,
            look_score=gate.look_score,
            expert=[base + e for e in union.expert],
            rank=union.rank,
            mass=union.mass,
            tokens=union.tokens,
            weight=weight,
            unfetched=[0] * len(union.expert),
        )
        demanded = Demanded(step_pass, gate, union, step, [list(row) for row in ids], [])
        self._count_demand(demanded, layer)
        self._hooks.notify("on_gate", step)
        self._cache.gated()
        demanded.wants = [self._want(step, n) for n in range(len(step.expert))]
        return demanded

    def _route(
        self, gate: Gate, step_pass: Pass, layer: int
    ) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]], Union]:
        """Return the chosen experts, their weights and their union."""
        routing = self._hooks.routing
        if routing.policy.choose is None:
            return gate.ids, gate.mass, gate.demand
        ids = [[NONE] * len(row) for row in gate.ids]
        look = (gate.look_order, gate.look_score)
        bare = Step(gate.ids, gate.logits, gate.choice, gate.scores, *look, (), (), (), (), weight=gate.mass)
        routing.call("choose", bare, ids)
        weight = weights_of(self._source, step_pass, layer, gate, ids, ids)
        return ids, weight, union_of(ids, weight)

    def _want(self, step: Step, n: int) -> int:
        miss = self._hooks.miss
        return 0 if miss.policy.want is None else miss.call("want", step, n)

    def _count_demand(self, demanded: Demanded, layer: int) -> None:
        union, step = demanded.union, demanded.step
        self._counters.count("accesses", layer, len(step.expert))
        for part, rows in demanded.step_pass.kept_parts().items():
            self._counters.charge_to(*part)
            self._counters.count("assignments", layer, sum(e != NONE for t in rows for e in demanded.gate.ids[t]))
        self._counters.charge_to(*demanded.step_pass.leader)
        for x, mass in zip(step.expert, union.mass_sum, strict=True):
            self._cache.learn(x, needed=1, mass_ever=self._tables.experts[x]["mass_ever"] + mass)
        predicted = Counter(self._predicted.pop(layer, ()))
        self._counters.count("predicted_demanded", layer, sum(predicted[x] for x in step.expert))
        gates = int(layer in self._gated) if self._next_pass else min(layer, self._reach)  # that may name this layer
        self._gated.add(layer)
        self._counters.count("predictable", layer, sum(max(gates, predicted[x]) for x in step.expert))

    # 4 and 5: look-up and misses

    def look_up(self, demanded: Demanded, positions: Sequence[int]) -> list[Access]:
        """Classify these demanded experts against the present state; the miss policy decides on absent ones."""
        accesses = [self._classify(demanded, n) for n in positions]
        missing = [access for access in accesses if access.served is Served.FETCH]
        demanded.misses += len(missing)
        if missing:
            self._resolve(demanded, missing)
        now = self._tables.now
        now["absent"] = max(now["absent"], 0) + sum(access.served in ABSENT_YET_RUN for access in accesses)
        if demanded.union.next_use:
            for n in positions:
                position = demanded.union.next_use[n]
                coming = NEVER if position == NEVER else self._source.pass_of(position)
                self._cache.learn(demanded.step.expert[n], next_use=position, next_pass=coming)
        return accesses

    def _classify(self, demanded: Demanded, n: int) -> Access:
        x, want, tokens = demanded.step.expert[n], demanded.wants[n], demanded.union.tokens[n]
        y = self._cache.find(x, want)
        if y != NONE:
            self._note("hits", x, y)
            if self._tables.copies[y]["prefetched"]:
                self._count("prefetch_hits", x)
                self._count("prefetch_used", x)
            return Access(n, x, y, tokens, Served.HIT)
        y = self._cache.find(x, want, IN_FLIGHT)
        if y != NONE:
            self._note("late", x, y)
            self._await(self._links.in_flight(y))
            return Access(n, x, y, tokens, Served.LATE)
        reason = self._cache.reason(x, want)
        self._count("misses", x)
        self._note(reason, x, x * self._precisions + want)
        return Access(n, x, x * self._precisions + want, tokens, Served.FETCH)

    def _await(self, transfer: Transfer) -> None:
        if transfer.prefetch and not transfer.awaited:
            transfer.awaited = True
            self._counters.count("prefetch_used", transfer.layer)
            self._links.meet(transfer)

    def _resolve(self, demanded: Demanded, missing: list[Access]) -> None:
        miss, verdict = self._hooks.miss, [0] * len(missing)
        positions = tuple(access.n for access in missing)
        free = self._cache.free_bytes(missing[0].y)
        miss.call("resolve", demanded.step, positions, free, verdict)
        for access, decided in zip(missing, verdict, strict=True):
            self._decide(demanded, access, decided)

    def _decide(self, demanded: Demanded, access: Access, verdict: int) -> None:
        if verdict == PER_TOKEN:
            self._substitute(demanded, access)
        elif verdict == DROP:
            access.served = Served.DROP
            demanded.step.unfetched[access.n] = DROPPED
            self._count("dropped", access.x)
            e = access.x % self._tables.now["experts"]
            for row in demanded.ids:
                row[:] = [NONE if used == e else used for used in row]
        elif verdict == CPU:
            access.served, access.y = Served.CPU, access.x * self._precisions
            self._count("cpu_executed", access.x)
            demanded.step.unfetched[access.n] = ON_CPU
        elif verdict <= demanded.wants[access.n]:
            access.y = access.x * self._precisions + verdict
        else:
            what = f"returned verdict {verdict} where `want` returned precision {demanded.wants[access.n]}"
            raise complaint(self._hooks.miss.policy.resolve, f"hook resolve {what}; return a lower precision there")

    def _substitute(self, demanded: Demanded, access: Access) -> None:
        """Call the policy token by token; the expert is fetched, most precise, if any token still needs it."""
        e, still_needed = access.x % self._tables.now["experts"], 0
        for t, row in enumerate(demanded.ids):
            if e not in row:
                continue
            other = self._substitute_for(demanded, t, row.index(e), row)
            if other == NONE:
                still_needed += 1
                continue
            row[row.index(e)] = other
            substitute = access.x - e + other
            access.substitutes[substitute] = access.substitutes.get(substitute, 0) + 1
            self._count_for(demanded.step_pass, t, "substituted", access.x)
        access.tokens, access.y = still_needed, access.x * self._precisions
        if not still_needed:
            access.served = Served.REPLACED
            demanded.step.unfetched[access.n] = REPLACED

    def _substitute_for(self, demanded: Demanded, t: int, j: int, row: list[int]) -> int:
        miss, now = self._hooks.miss, self._tables.now
        base = now["layer"] * now["experts"]
        eligible = [
            int(e not in row and self._cache.find(base + e, now["precisions"] - 1) != NONE)
            for e in range(now["experts"])
        ]
        return miss.call("substitute", demanded.step, t, j, eligible)

    # 6: use

    def use(self, demanded: Demanded, accesses: list[Access]) -> list[Transfer]:
        """Count the uses of what runs; pin and, where absent, announce what will be executed from the fast tier.

        Returns the transfers that compute is to queue, in demand order.
        """
        for access in accesses:
            if access.served.runs:
                demanded.tiers[access.x % self._tables.now["experts"]] = access.y % self._precisions
            if access.served.runs_here:
                if access.n == NONE:  # a substitute; demanded experts are marked already
                    self._cache.learn(access.x, needed=1)
                self._cache.use(access.y)
                self._cache.protect(access.y)
                if access.y % self._precisions:
                    self._count("low_precision", access.x)
            else:
                if access.served is Served.CPU:
                    self._cache.use_elsewhere(access.y)
                self._cache.learn(access.x, needed=0)
        now, announced = self._tables.now, list[Transfer]()
        for access in accesses:
            if access.served is Served.FETCH:
                announced.append(Transfer(access.y, now["layer"], prefetch=False, target_step=now["step"]))
                self._links.announce(announced[-1])
            if access.served is Served.HIT:
                self._cache.promote(access.y)
        return announced

    def union_again(self, demanded: Demanded, accesses: list[Access], step_pass: Pass) -> list[Access]:
        """Return the union after substitution: substitutes are used, but are not accesses."""
        if not any(access.substitutes for access in accesses):
            return accesses
        now = self._tables.now
        mass = weights_of(self._source, step_pass, now["layer"], demanded.gate, demanded.step.ids, demanded.ids)
        final, base = union_of(demanded.ids, mass), now["layer"] * now["experts"]
        known = {access.x: access for access in accesses}
        merged = [self._serve(known, base + e, tokens) for e, tokens in zip(final.expert, final.tokens, strict=True)]
        return merged + [access for access in accesses if not access.served.runs]

    def _serve(self, known: dict[int, Access], x: int, tokens: int) -> Access:
        if x in known:
            known[x].tokens = tokens
            return known[x]
        return Access(NONE, x, self._cache.find(x, self._precisions - 1), tokens, Served.HIT)

    def substitutes(self, access: Access) -> list[Access]:
        """Return the substitutes of one access, for the sequential contract."""
        return [self._serve({}, x, tokens) for x, tokens in sorted(access.substitutes.items())]

    def settle(self, demanded: Demanded, step_pass: Pass, layer: int) -> None:
        """Count the step, report the executed mixture to the source and count its fidelity."""
        if demanded.step.expert:
            self._counters.count("steps", layer)
            self._counters.count("complete_steps", layer, int(demanded.misses == 0))
        mixture = Mixture(demanded.gate, demanded.step.ids, demanded.ids, demanded.tiers)
        self._source.used(step_pass, layer, mixture)
        count_fidelity(self._counters, self._source, step_pass, layer, mixture)

    # 7: prefetch

    def suggest(self, demanded: Demanded) -> list[Transfer]:
        """Call the prefetch policy, and announce its absent predictions.

        Returns the prefetches that compute is to queue, in their order.
        """
        prefetch, announced = self._hooks.prefetch, list[Transfer]()
        if prefetch.policy.suggest is None:
            return announced
        if prefetch.policy.renews_queue:
            self._links.renew()
        for y in self._out[: prefetch.call("suggest", demanded.step, self._out)]:
            transfer = self._predict(y)
            if transfer is not None:
                self._links.announce(transfer)
                announced.append(transfer)
        return announced

    def _predict(self, y: int) -> Transfer | None:
        """Record a prediction. Return its transfer if it is absent."""
        x, precision = divmod(y, self._precisions)
        layer = self._tables.experts[x]["layer"]
        self._counters.count("predicted", layer)
        self._predicted.setdefault(layer, []).append(x)
        resident = self._cache.find(x, precision, RESIDENT)
        if resident != NONE:
            self._cache.predict(resident)
        elif self._cache.find(x, precision, IN_FLIGHT) == NONE and self._cache.find(x, precision, QUEUED) == NONE:
            now = self._tables.now
            ahead = now["layers"] if self._next_pass else layer - now["layer"]
            return Transfer(y, layer, prefetch=True, target_step=now["step"] + ahead)
        return None

    def _count_for(self, step_pass: Pass, t: int, name: str, x: int) -> None:
        """Count one for the request of row t, unless it is a rejected draft."""
        row = step_pass.rows[t]
        if not row.kept:
            return
        self._counters.charge_to(row.request, row.phase)
        self._count(name, x)
        self._counters.charge_to(*step_pass.leader)

    def _count(self, name: str, x: int, amount: int = 1) -> None:
        self._counters.count(name, self._tables.experts[x]["layer"], amount)

    def _note(self, name: str, x: int, y: int) -> None:
        self._count(name, x)
        self._log.note(name, y, "gate")
