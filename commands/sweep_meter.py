"""Progress of a sweep: one line that is rewritten on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from commands.terminal import clock, rewrite, say

if TYPE_CHECKING:
    from sweeps.dispatch import Standing

SECONDS_BETWEEN_LINES = 10
SECONDS_BETWEEN_REWRITES = 0.2


class Meter:
    """Done of total, replays/s, time left and the best hit rate so far."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._said = time.monotonic()
        self._wide = 0

    def show(self, at: Standing) -> None:
        """To be called as often as anything changes."""
        since = time.monotonic() - self._said
        if since < (SECONDS_BETWEEN_REWRITES if self._terminal else SECONDS_BETWEEN_LINES) and at.done < at.total:
            return
        self._said = time.monotonic()
        line = status(at)
        if self._terminal:
            self._wide = rewrite(line, self._wide)
        else:
            say(line)

    def close(self) -> None:
        """End the line."""
        if self._wide:
            say("")


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
