"""Counters of a run, per (layer, phase) and per request, and lifetimes of evicted copies."""

from __future__ import annotations

from collections.abc import Callable

from results.result import COUNTERS, LIFETIME_BUCKETS, Row

PHASES = ("prefill", "decode")


class Counters:
    """Everything is charged to the phase and the request of the pass in progress."""

    def __init__(self, layers: int) -> None:
        self._cells = [[_zeros() for _ in PHASES] for _ in range(layers)]
        self._lifetimes = [[[0] * LIFETIME_BUCKETS for _ in PHASES] for _ in range(layers)]
        self._requests: dict[int, Row] = {}
        self.phase = 0
        self._row: Row = {}

    def begin_pass(self, now: int, request: int, phase: int, tokens: int) -> None:
        """Charge to this pass's phase and request from here on."""
        self.phase = phase
        if request not in self._requests:
            times = {"start_ns": now, "ttft_ns": None, "decode_ns": 0, "decode_passes": 0, "end_ns": now, "tokens": 0}
            self._requests[request] = {"request": request, **times, **_zeros()}
        self._row = self._requests[request]
        self._row["tokens"] += tokens

    def end_pass(self, began: int, now: int) -> None:
        """The pass's part in TTFT or TPOT: the time from the end of the pass before it."""
        row = self._row
        row["end_ns"] = now
        if self.phase == 0:
            row["ttft_ns"] = now - row["start_ns"]
            return
        row["decode_ns"] += now - began
        row["decode_passes"] += 1

    def count(self, name: str, layer: int, amount: int = 1) -> None:
        """Add to a counter."""
        self._cells[layer][self.phase][name] += amount
        self._row[name] += amount

    def here(self, layer: int) -> Callable[[str, int], None]:
        """`count` for this layer and the pass in progress, to be called when an activity's time is known."""
        cells = self._cells[layer][self.phase], self._row

        def add(name: str, amount: int) -> None:
            for cell in cells:
                cell[name] += amount

        return add

    def lived(self, layer: int, steps: int) -> None:
        """A copy was evicted after `steps` steps."""
        self._lifetimes[layer][self.phase][min(steps.bit_length(), LIFETIME_BUCKETS - 1)] += 1

    def totals(self, end: int) -> Row:
        """Sums over layers and phases."""
        cells = [cell for layer in self._cells for cell in layer]
        totals: Row = {name: sum(cell[name] for cell in cells) for name in COUNTERS}
        histograms = [histogram for layer in self._lifetimes for histogram in layer]
        return totals | {"time_ns": end, "lifetime": [sum(bucket) for bucket in zip(*histograms, strict=True)]}

    def per_layer(self) -> list[Row]:
        """A row per layer and phase, phases without any step left out."""
        return [
            {"layer": layer, "phase": PHASES[phase], **cell, "lifetime": self._lifetimes[layer][phase]}
            for layer, cells in enumerate(self._cells)
            for phase, cell in enumerate(cells)
            if any(cell.values())
        ]

    def per_request(self) -> list[Row]:
        """A row per request in run order."""
        return list(self._requests.values())


def _zeros() -> Row:
    return dict.fromkeys(COUNTERS, 0)
