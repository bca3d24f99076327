"""How many configurations one command takes: counted before any is made, so that a slip of the pen is told at once."""

from __future__ import annotations

from moereplay.simulator.errors import ConfigError

#: Planning takes about a quarter of a millisecond each; every one of them is checked before the first replay.
MOST_CONFIGURATIONS = 100_000


def check_count(count: int, what: str, advice: str) -> None:
    """Raises ConfigError if `count` of `what` ("e.toml: [grid] makes") are too many; `advice` says what to do."""
    if count > MOST_CONFIGURATIONS:
        number = f"{count:,}" if count < 10**18 else f"more than {10**18:,}"
        raise ConfigError(f"{what} {number} configurations; one command takes {MOST_CONFIGURATIONS:,}: {advice}")
