"""Progress of a sweep: done of total, replays/s, time left and the best figures so far."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from moereplay.commands.status_line import StatusLine
from moereplay.commands.terminal import clock

if TYPE_CHECKING:
    from moereplay.sweeps.dispatch import Standing


class Meter:
    """A status line of the driver's standing."""

    def __init__(self) -> None:
        self._line = StatusLine()

    def show(self, at: Standing) -> None:
        """To be called as often as anything changes."""
        self._line.show(partial(status, at), last=at.done == at.total)

    def close(self) -> None:
        """End the status line."""
        self._line.close()


def status(at: Standing) -> str:
    """431/1,000 replays, 12.5/s, 0:00:46 left, best hit rate 71.2% (3f9a...), best TPOT 41.2 ms (...)."""
    parts = [f"{at.done:,}/{at.total:,} replays"]
    if at.done:
        parts.append(f"{at.per_second:.3g}/s, {clock(at.seconds_left or 0)} left")
    if at.errors or at.killers:
        parts.append(f"{len(at.errors) + len(at.killers):,} failed")
    if "hit_rate" in at.best:
        value, identity = at.best["hit_rate"]
        parts.append(f"best hit rate {100 * value:.1f}% ({identity[:8]})")
    if "tpot_ms" in at.best:
        value, identity = at.best["tpot_ms"]
        parts.append(f"best TPOT {value:.3g} ms ({identity[:8]})")
    return ", ".join(parts)
