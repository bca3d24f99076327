"""A worker process: threads that run batches and store their parts. It ends when its driver does, however that ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.batches import Batch, Headline, compute
from moereplay.sweeps.store import Place


class Told(NamedTuple):
    """What a worker tells its driver."""

    what: Literal["ready", "began", "stored", "failed"]
    batch: int = -1
    position: int = -1  #: of the job that began
    headlines: tuple[Headline, ...] = ()
    error: str = ""  #: why nothing could be stored


def work(connection: Connection, threads: int, out: Place, provenance: Mapping[str, Any]) -> None:
    """Run the batches that arrive, `threads` at a time, until None arrives or the driver is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the driver decides
        signal.signal(number, signal.SIG_IGN)
    sending = threading.Lock()

    def tell(told: Told) -> None:
        with sending, suppress(OSError):  # without a driver nobody listens
            connection.send(told)

    def run(batch: Batch) -> None:
        try:
            made = compute(batch, lambda position: tell(Told("began", batch.number, position)))
            out.store(made.part, provenance)
        except ConfigError as error:
            tell(Told("failed", batch.number, error=str(error)))
        except BaseException as error:  # a bug in here must not leave the driver waiting
            tell(Told("failed", batch.number, error=f"unexpected {type(error).__name__}: {error}"))
        else:
            tell(Told("stored", batch.number, headlines=tuple(made.headlines)))

    with ThreadPoolExecutor(threads) as pool:
        tell(Told("ready"))
        for batch in _batches(connection):
            pool.submit(run, batch)


def _batches(connection: Connection) -> Iterator[Batch]:
    """Batches as they arrive. Threads in a replay cannot be stopped, so without a driver the process ends at once."""
    while True:
        try:
            batch = connection.recv()
        except (EOFError, OSError):
            os._exit(1)
        if batch is None:
            return
        yield batch
