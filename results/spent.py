"""What the requests of a run spent, added up from their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Spent(NamedTuple):
    """Sums over requests, in nanoseconds and passes."""

    first_ns: list[int]  #: time to the first token of each request that has a prefill
    decode_ns: int
    decode_passes: int

    @property
    def ttft_ms(self) -> float | None:
        """Mean over the requests; None without any."""
        return sum(self.first_ns) / len(self.first_ns) / 1e6 if self.first_ns else None

    @property
    def tpot_ms(self) -> float | None:
        """Per decode pass; None without any."""
        return self.decode_ns / self.decode_passes / 1e6 if self.decode_passes else None


def spent(requests: Sequence[Mapping[str, Any]]) -> Spent:
    """Of the rows of `Result.per_request`."""
    first = [row["ttft_ns"] for row in requests if row["ttft_ns"] is not None]
    decode = (sum(row[name] or 0 for row in requests) for name in ("decode_ns", "decode_passes"))
    return Spent(first, *decode)
