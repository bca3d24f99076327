"""What machine code could not go on with becomes an error that names the policy and the wrong value."""

from __future__ import annotations

from typing import Any

import pytest

from moereplay.simulator.compiled import state as codes
from moereplay.simulator.compiled.outcome import check
from moereplay.simulator.config import configure

CHOSEN = configure(eviction="fifo", prefetch="top_k", miss="drop", routing="prune").policy_set()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (codes.BAD_VICTIM, "fifo.*77"),
        (codes.BAD_CHOICE, "routing prune.*77"),
        (codes.BAD_NAME, "prefetch top_k.*77"),
        (codes.BAD_WANT, "miss drop.*precision 77"),
        (codes.BAD_VERDICT, "miss drop.*verdict 77"),
        (codes.BAD_STAND_IN, "miss drop.*substitute 77"),
        (codes.STUCK, "deadlock"),
    ],
)
def test_an_error_of_machine_code_names_the_policy_and_the_value(error: int, message: str) -> None:
    state: Any = {"errors": {"error": error, "culprit": 77}}
    with pytest.raises(AssertionError, match=message):
        check(state, CHOSEN)
