"""What was used last, up to so many bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Held(Generic[Key, Value]):
    """Values by key. What was not used for longest goes first; what is larger than the room is held alone."""

    def __init__(self, room: int) -> None:
        """`room` in bytes."""
        self._room, self._size = room, 0
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def get(self, key: Key, make: Callable[[], Value], size: Callable[[Value], int]) -> Value:
        """The value of a key, made if it is not held; `size` says its bytes."""
        if key not in self._values:
            made = make()
            self._values[key] = made, size(made)
            self._size += size(made)
            self._make_space()
        self._values.move_to_end(key)
        return self._values[key][0]

    def _make_space(self) -> None:
        while self._size > self._room and len(self._values) > 1:
            self._size -= self._values.popitem(last=False)[1][1]
