"""What a user's eviction policy promises of its keys (`queue`, `key_scope`), checked on some copies at every choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moereplay.policies.contract import Eviction, PolicyError
from moereplay.policies.files import complaint
from moereplay.simulator.reference.hooks import BoundPolicy
from moereplay.simulator.reference.state import Tables

#: Kept keys that are evaluated once more at a choice.
TRIED = 16
#: Keys that move by layer stay below, so that no two of them are farther apart than 64 bits hold.
MOST_BY_LAYER = 1 << 61
Order = tuple[int, int, int]  #: key, timestamp, copy


class KeyChecks:
    """Checks `queue` and `key_scope` against the keys."""

    def __init__(self, eviction: BoundPolicy[Eviction], tables: Tables) -> None:
        self._eviction, self._tables = eviction, tables
        self._queue = eviction.policy.queue(eviction.params)
        self._scope = eviction.policy.scope(eviction.params)
        self._turn = 0
        self._before: dict[int, Order] = {}  # of the scope before this one, what nothing has happened to since

    def check_new(self, y: int, key: int) -> None:
        """Raises PolicyError unless the key is the promised timestamp, and small enough to be moved."""
        if self._scope == "layer" and abs(key) > MOST_BY_LAYER:
            raise self._broken(f"is {key} for copy {y}: key_scope='layer' promises that it stays within 2**61")
        copy, expert = self._tables.copies[y], self._tables.experts[y // self._tables.now["precisions"]]
        promised = {"": key, "last_use": expert["last_use"], "entered": copy["entered"]}[self._queue]
        if key != promised:
            raise self._broken(
                f"is {key} for copy {y}, whose {self._queue} is {promised}: `queue` promises that they agree"
            )

    def check_kept(self, kept: Mapping[int, Order], candidates: Sequence[int]) -> None:
        """Raises PolicyError if a key has changed that `key_scope` says cannot have; candidates take turns."""
        for at in range(self._turn, self._turn + min(TRIED, len(candidates))):
            y = candidates[at % len(candidates)]
            key = self._ask(y) if y in kept else None
            if y in kept and key != kept[y][0]:
                what = f"was {kept[y][0]} and is {key} for copy {y}, which nothing has happened to"
                raise self._broken(f"{what}: key_scope={self._scope!r} promises that it stays")
        self._turn += TRIED

    def move_on(self, kept: Mapping[int, Order], same_pass: bool) -> None:
        """The scope changes; these keys were true until now."""
        self._before = dict(kept) if same_pass and self._scope == "layer" else {}

    def forget(self, y: int) -> None:
        """Forget its key: something happened to the copy."""
        self._before.pop(y, None)

    def check_moved(self, kept: Mapping[int, Order]) -> None:
        """Raises PolicyError unless the keys of a layer have moved by as much."""
        moved: dict[int, int] = {}
        for y in self._before.keys() & kept.keys():
            layer = self._tables.experts[y // self._tables.now["precisions"]]["layer"]
            by = kept[y][0] - self._before[y][0]
            if moved.setdefault(layer, by) != by:
                what = f"moved by {moved[layer]} and by {by} for two copies of layer {layer}"
                raise self._broken(f"{what}: key_scope='layer' promises that it is the same")

    def _ask(self, y: int) -> int:
        return self._eviction.call("key", y)

    def _broken(self, what: str) -> PolicyError:
        hook: Any = self._eviction.policy.key
        return complaint(hook, f"hook key {what}")
