"""A cache of values by bytes, with LRU eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """Values by key. What is larger than the capacity is kept alone."""

    def __init__(self, capacity: int) -> None:
        """`capacity` in bytes."""
        self._capacity, self._size = capacity, 0
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def get(self, key: Key, make: Callable[[], Value], size: Callable[[Value], int]) -> Value:
        """The value of a key, made if it is not cached; `size` says its bytes."""
        if key not in self._values:
            made = make()
            self._values[key] = made, size(made)
            self._size += size(made)
            self._evict()
        self._values.move_to_end(key)
        return self._values[key][0]

    def _evict(self) -> None:
        while self._size > self._capacity and len(self._values) > 1:
            self._size -= self._values.popitem(last=False)[1][1]
