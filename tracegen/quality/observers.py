"""What attends the gates of one sequence: the policies of a set, or nobody but a recorder."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from moereplay.tracegen.capture import Capture, Reading, Rows
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.experts import Orders
from moereplay.tracegen.modules import MoeModules


class Observer(Protocol):
    """As `tracegen.live.source.Emulation`: a pass begins, each gate is attended, the pass ends."""

    @property
    def orders(self) -> Orders | None:
        """What experts modules must do in a pass, if they must do anything else."""
        ...

    def begin(self, tokens: int, request: int, prefill: bool) -> None:
        """A pass comes."""

    def at_gate(self, layer: int, reading: Reading) -> tuple[Tensor, Tensor] | None:
        """What the experts are given instead, or None."""

    def end(self) -> None:
        """The pass is over."""

    def take(self) -> tuple[Rows, np.ndarray]:
        """Rows since the last take, and what was executed."""
        ...


class Recorder:
    """Keeps what the gates of the unmodified model said."""

    orders: Orders | None = None

    def __init__(self, modules: MoeModules, depth: int) -> None:
        self._modules, self._capture, self._gates = modules, Capture(modules, depth), 0

    def begin(self, tokens: int, request: int, prefill: bool) -> None:
        """A pass comes."""
        self._gates = 0

    def at_gate(self, layer: int, reading: Reading) -> None:
        """Keep the reading; the model goes on as it would."""
        self._gates += 1
        self._capture.keep(layer, reading)

    def end(self) -> None:
        """Raises RecordError if gates were left out."""
        if self._gates != len(self._modules.sites):
            raise RecordError(f"{self._modules.name}: a pass ran {self._gates} of {len(self._modules.sites)} gates")

    def take(self) -> tuple[Rows, np.ndarray]:
        """Rows since the last take; what was executed is what was chosen."""
        rows = self._capture.take()
        return rows, rows.chosen
