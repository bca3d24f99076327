"""The cache of the fast tier: residents, pools and evictions. It knows bytes, not time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from moereplay.policies.contract import ABSENT, IN_FLIGHT, NONE, QUEUED, RESIDENT
from moereplay.simulator.interface import CopyLayout
from moereplay.simulator.reference.counters import Counters, EventLog
from moereplay.simulator.reference.hooks import BoundHooks, Victims
from moereplay.simulator.reference.state import Area, Claim, Placement, SideBuffer, Tables, Transfer

NOT_EVICTED = -1  #: before the first pass


class Cache:
    """Copies in one pool, or in one pool per layer, with a bypass buffer and optional side buffers outside of them."""

    def __init__(
        self,
        layout: CopyLayout,
        tables: Tables,
        hooks: BoundHooks,
        counters: Counters,
        log: EventLog,
        placement: Placement,
        side_slots: int = 0,
        free_only: bool = False,
        resident: Sequence[int] = (),
    ) -> None:
        """`resident` are copies that never leave; they take nothing of the pools' capacity."""
        self.tables, self._hooks, self._counters, self._log = tables, hooks, counters, log
        self._precisions, self._free_only = layout.precisions, free_only
        self._capacity = hooks.eviction.own.capacity
        self._victims = Victims(tables, hooks.eviction)
        self._side = SideBuffer(tables, side_slots)
        self._placement, self._placed = placement, dict[int, None]()  # in the order of their placing
        self._for_good = frozenset(resident)
        for y in resident:
            self._placement.warmed(y)
        self.clear()

    def clear(self) -> None:
        """Evict everything and forget the history."""
        copies = len(self.tables.copies)
        for y in list(self._placed):
            self._vacate(y)
        self._victims.clear()
        self._side.clear()
        self._used = [0] * len(self._capacity)
        self._residents: list[set[int]] = [set() for _ in self._capacity]
        self._pinned: set[int] = set()
        self._done: set[int] = set()  # demanded in this step and already computed
        self._ever = [False] * copies
        self._evicted_pass = [NOT_EVICTED] * copies
        self._entered_step = [0] * copies
        self._counted = [False] * copies  # its arrival by a prefetch counted as its first use
        self._time = self._arrivals = self._evicted = 0
        self._bypass_buffer: int | None = None
        for y in self._for_good:
            self.tables.copies[y].update(state=RESIDENT, protected=1)
            self._ever[y] = True

    # look-up

    def find(self, x: int, want: int, state: int = RESIDENT) -> int:
        """Return the most precise copy of x in `state` that is at least as precise as `want`, or NONE."""
        first = x * self._precisions
        for y in range(first, first + want + 1):
            if self.tables.copies[y]["state"] == state:
                return y
        return NONE

    def reason(self, x: int, want: int) -> str:
        """Return why x is missing, judged over the copies that are precise enough."""
        copies = range(x * self._precisions, x * self._precisions + want + 1)
        if not any(self._ever[y] for y in copies):
            return "compulsory"
        latest = max(self._evicted_pass[y] for y in copies)
        return "collisions" if latest == self.tables.now["pass"] else "capacity"

    def use(self, y: int) -> None:
        """Count the use of a demanded expert, resident or in flight."""
        copy, expert = self.tables.copies[y], self.tables.experts[y // self._precisions]
        self._timestamp(expert)
        expert["uses_ever"] += 1
        counted = copy["prefetched"] == 1 and self._counted[y]
        expert["uses_here"] = max(1, expert["uses_here"] + 1 - counted)
        self._hooks.notify("on_use", y)
        copy["prefetched"] = 0
        self._victims.invalidate(y // self._precisions)

    def use_elsewhere(self, y: int) -> None:
        """Count the use of an expert that the CPU runs. It is none of a residence, unless another copy is here."""
        self.use(y)
        self._forget_uses(y // self._precisions)

    def learn(self, x: int, **facts: int) -> None:
        """Set columns of expert x that the gate or compute determined."""
        self.tables.experts[x].update(facts)
        self._victims.invalidate(x)

    def gated(self) -> None:
        """Invalidate the keys of the layer's copies, which `on_gate` may have changed."""
        if self._hooks.eviction.policy.on_gate is None:
            return
        first = self.tables.now["layer"] * self.tables.now["experts"]
        for x in range(first, first + self.tables.now["experts"]):
            self._victims.invalidate(x)

    def predict(self, y: int) -> None:
        """Note that a prefetch policy predicted a resident copy."""
        expert = self.tables.experts[y // self._precisions]
        self._time += 1
        expert["last_prediction"], expert["prediction_pass"] = self._time, self.tables.now["pass"]
        self._hooks.notify("on_predict", y)
        self._victims.invalidate(y // self._precisions)

    def _timestamp(self, expert: dict[str, int]) -> None:
        self._time += 1
        expert["last_use"], expert["last_pass"] = self._time, self.tables.now["pass"]

    def free_bytes(self, y: int) -> int:
        """Return the free bytes of the pool of copy y."""
        pool = self.tables.copies[y]["pool"]
        return self._capacity[pool] - self._used[pool]

    # protection

    def protect(self, y: int) -> None:
        """Pin a copy: it cannot be evicted until it is released or the step ends."""
        self.tables.copies[y]["protected"] = 1
        self._pinned.add(y)

    def release(self, y: int) -> None:
        """Unpin a copy, unless it is there for good."""
        self.tables.copies[y]["protected"] = int(y in self._for_good)
        self._pinned.discard(y)

    def computed(self, y: int) -> None:
        """Note the end of a copy's compute: a demand may evict it as a last resort; the bypass buffer is free."""
        if self._bypass_buffer == y:
            self._bypass_buffer = None
            self._set(y, ABSENT)
            self._vacate(y)
            self._forget_uses(y // self._precisions)
        elif y in self._residents[self.tables.copies[y]["pool"]]:  # and not in a side buffer, which holds no room
            self._done.add(y)

    def end_step(self) -> None:
        """Unpin everything: nothing is pinned between a step's start and its gate."""
        for y in list(self._pinned):
            self.release(y)
        self._done.clear()

    # transfers

    def claim(self, transfer: Transfer) -> Claim:
        """Reserve the bytes of a transfer that is about to start, evicting victims if needed."""
        before = self._evicted
        verdict = self._claim_side(transfer) if transfer.prefetch and self._side.slots else self._claim_pool(transfer)
        transfer.victims = self._evicted - before
        return verdict

    def _claim_pool(self, transfer: Transfer) -> Claim:
        pool = self.tables.copies[transfer.y]["pool"]
        verdict = self._make_space(transfer.y, pool, transfer.prefetch, transfer.layer)
        if verdict is Claim.GRANTED:
            self._used[pool] += self.tables.copies[transfer.y]["bytes"]
            self._place(transfer.y, Area.POOL)
        if verdict is Claim.BYPASSED:
            self._bypass_buffer, transfer.bypasses = transfer.y, True
            self._place(transfer.y, Area.BYPASS)
            self._counters.count("declined", transfer.layer)
        return verdict

    def _make_space(self, y: int, pool: int, prefetch: bool, layer: int) -> Claim:
        short = self._used[pool] + self.tables.copies[y]["bytes"] - self._capacity[pool]
        if short <= 0:
            return Claim.GRANTED
        if prefetch and self._free_only:
            return Claim.REFUSED
        candidates = self._candidates(pool)
        last_resort = set[int]() if prefetch else self._last_resort(pool)
        if not self._would_free(short, chain(candidates, last_resort)):
            return Claim.REFUSED
        if self._victims.asks_of_each:
            return self._evict_if_all_admitted(y, pool, prefetch, layer)
        victim = self._victims.choose(pool, y, candidates or last_resort)
        if not self._victims.admits(y, prefetch, victim):
            return self._reject(prefetch)
        return self._evict_until_it_fits(y, pool, victim, layer)

    def _evict_if_all_admitted(self, y: int, pool: int, prefetch: bool, layer: int) -> Claim:
        """Evict only after the policy has admitted y against every victim."""
        victims = self._admitted_victims(y, pool, prefetch)
        for victim in victims:
            self._evict(victim, layer, cause=y)
        return Claim.GRANTED if victims else self._reject(prefetch)

    def _admitted_victims(self, y: int, pool: int, prefetch: bool) -> list[int]:
        """Return the copies to evict for y, in this order; none if the policy rejects admission. Keeps the pins."""
        copies, aside, pinned = self.tables.copies, list[int](), set(self._pinned)
        short, agreed = self._used[pool] + copies[y]["bytes"] - self._capacity[pool], True
        while agreed and short > 0:
            candidates = self._candidates(pool)
            victim = self._victims.choose(pool, y, candidates or self._last_resort(pool).difference(aside))
            agreed = self._victims.admits(y, prefetch, victim)
            aside.append(victim)
            self.protect(victim)  # the next choice is among the others
            short -= copies[victim]["bytes"]
        for victim in self._pinned - pinned:
            self.release(victim)
        return aside if agreed else []

    def _would_free(self, short: int, copies: Iterable[int]) -> bool:
        for y in copies:
            short -= self.tables.copies[y]["bytes"]
            if short <= 0:
                return True
        return False

    def _candidates(self, pool: int) -> set[int]:
        return self._residents[pool] - self._pinned

    def _last_resort(self, pool: int) -> set[int]:
        """Return copies that this step demanded and computed.

        They are evicted only for a demand, and only if nothing else can be.
        """
        return self._residents[pool] & self._done & self._pinned

    def _reject(self, prefetch: bool) -> Claim:
        return Claim.BYPASSED if not prefetch and self._bypass_buffer is None else Claim.REFUSED

    def _evict_until_it_fits(self, y: int, pool: int, victim: int, layer: int) -> Claim:
        size = self.tables.copies[y]["bytes"]
        while True:
            self._evict(victim, layer, cause=y)
            if self._used[pool] + size <= self._capacity[pool]:
                return Claim.GRANTED
            victim = self._victims.choose(pool, y, self._candidates(pool) or self._last_resort(pool))

    def _evict(self, y: int, layer: int, cause: int) -> None:
        copy = self.tables.copies[y]
        self._residents[copy["pool"]].discard(y)
        self._used[copy["pool"]] -= copy["bytes"]
        self._done.discard(y)
        self._pinned.discard(y)
        self._record_eviction(y, layer, cause)
        self._hooks.notify("on_evict", y)

    def _record_eviction(self, y: int, layer: int, cause: int) -> None:
        """Count for the layer of the incoming expert; waste and lifetime for the victim's layer."""
        copy, expert = self.tables.copies[y], self.tables.experts[y // self._precisions]
        self._evicted += 1
        self._counters.count("evictions", layer)
        self._counters.lived(expert["layer"], self.tables.now["step"] - self._entered_step[y])
        if copy["prefetched"]:
            self._counters.count("bytes_wasted", expert["layer"], self.tables.own_bytes[y])
        copy.update(state=ABSENT, protected=0, prefetched=0)
        self._vacate(y)
        self._forget_uses(y // self._precisions)
        self._evicted_pass[y] = self.tables.now["pass"]
        self._log.note("evict", y, f"for {cause}")

    def _forget_uses(self, x: int) -> None:
        """Reset the uses of x if no copy remains."""
        if self.find(x, self._precisions - 1) == NONE:
            self.tables.experts[x]["uses_here"] = 0

    def land(self, transfer: Transfer) -> None:
        """Make a landed copy resident, unless it bypassed the cache."""
        if transfer.bypasses:
            return
        self._enter(transfer.y, transfer.unused)
        if transfer.y in self._side:
            if transfer.awaited:
                self.promote(transfer.y)
            return
        self._residents[self.tables.copies[transfer.y]["pool"]].add(transfer.y)
        self._hooks.notify("on_insert", transfer.y, int(transfer.unused))

    def _enter(self, y: int, unused: bool) -> None:
        copy, expert = self.tables.copies[y], self.tables.experts[y // self._precisions]
        known = expert["uses_here"] > 0 or self.find(y // self._precisions, self._precisions - 1) != NONE
        self._arrivals += 1
        self._set(y, RESIDENT)
        copy["entered"], copy["prefetched"] = self._arrivals, int(unused)
        self._counted[y] = unused and not known
        self._entered_step[y], self._ever[y] = self.tables.now["step"], True
        self._counters.count("insertions", expert["layer"])
        if unused:
            self._timestamp(expert)
        if self._counted[y]:
            expert["uses_here"] = 1
        self._victims.invalidate(y // self._precisions)

    def queue(self, y: int) -> None:
        """Mark the copy as queued for the link."""
        self._set(y, QUEUED)

    def forget(self, y: int) -> None:
        """Mark a queued copy as absent: it will not be fetched."""
        self._set(y, ABSENT)

    def _set(self, y: int, state: int) -> None:
        self.tables.copies[y]["state"] = state

    # where copies lie

    def _place(self, y: int, area: Area) -> None:
        """Take space for y; its transfer starts next."""
        self._set(y, IN_FLIGHT)
        self._placed[y] = None
        self._placement.placed(y, area)

    def _vacate(self, y: int) -> None:
        del self._placed[y]
        self._placement.vacated(y)

    # the side buffer

    def _claim_side(self, transfer: Transfer) -> Claim:
        """Take a free buffer, or the oldest that can be overwritten."""
        if self._side.full:
            stale = self._side.overwritable()
            if stale == NONE:
                return Claim.REFUSED
            self._side.take(stale)
            self._record_eviction(stale, transfer.layer, cause=transfer.y)
        self._side.put(transfer)
        self._place(transfer.y, Area.SIDE)
        return Claim.GRANTED

    def promote(self, y: int) -> None:
        """Move a demanded expert from its side buffer into the cache, if there is space, without a transfer."""
        if y not in self._side:
            return
        pool, layer = self.tables.copies[y]["pool"], self.tables.experts[y // self._precisions]["layer"]
        if self._make_space(y, pool, prefetch=False, layer=layer) is not Claim.GRANTED:
            return
        self._side.take(y)
        self._placement.promoted(y)
        self._used[pool] += self.tables.copies[y]["bytes"]
        self._residents[pool].add(y)
        self._arrivals += 1
        self.tables.copies[y]["entered"] = self._arrivals  # the cache, now
        self._victims.invalidate(y // self._precisions)
        self._log.note("promote", y, "demand")
        self._hooks.notify("on_insert", y, 0)

    # start and end

    def warm(self, y: int) -> None:
        """Make a copy resident before the start: unused, not prefetched, never counted."""
        copy = self.tables.copies[y]
        self._arrivals += 1
        self._set(y, RESIDENT)
        copy["entered"], self._ever[y] = self._arrivals, True
        self._used[copy["pool"]] += copy["bytes"]
        self._placed[y] = None
        self._placement.warmed(y)
        self._residents[copy["pool"]].add(y)
        self._hooks.notify("on_insert", y, 0)

    def unused_bytes(self) -> list[tuple[int, int]]:
        """Return (layer, bytes) of each copy that was prefetched and is still unused."""
        unused = [y for y, copy in enumerate(self.tables.copies) if copy["state"] == RESIDENT and copy["prefetched"]]
        return [(self.tables.experts[y // self._precisions]["layer"], self.tables.own_bytes[y]) for y in unused]
