"""How many cases each search of the suite tries."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

#: New cases of every search, where somebody asks for so many (`make parity`); without that, cases repeat.
CASES = int(os.environ.get("MOEREPLAY_CASES", "0"))
#: The share of its cases that a search tries: a quarter in `make test`, all of them in `make test-long`.
SHARE = float(os.environ.get("MOEREPLAY_SHARE", "0.25"))
FEWEST = 6


def searched(cases: int, *more: HealthCheck) -> settings:
    """Return settings of a repeatable search of a share of so many cases."""
    tried = CASES or max(min(cases, FEWEST), round(cases * SHARE))
    accepted = [HealthCheck.too_slow, HealthCheck.data_too_large, *more]
    return settings(max_examples=tried, deadline=None, derandomize=not CASES, suppress_health_check=accepted)


def walked(cases: int, steps: int) -> settings:
    """Return settings of a repeatable search by a state machine: so many walks of at most so many steps.

    A walk that fails is printed as it is: to shorten it would take minutes, as each step writes files.
    """
    return settings(searched(cases), stateful_step_count=steps, phases=(Phase.explicit, Phase.generate))
