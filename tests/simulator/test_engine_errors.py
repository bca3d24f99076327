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
        (codes.BAD_VICTIM, "fifo named 77, which may not leave its pool"),
        (codes.BAD_CHOICE, "routing prune chose 77, which is no expert"),
        (codes.BAD_NAME, "prefetch top_k named 77, which is no copy"),
        (codes.BAD_WANT, "miss drop wants precision 77, which there is not"),
        (codes.BAD_VERDICT, "miss drop decided 77, which is no verdict"),
        (codes.BAD_STAND_IN, "miss drop let 77 stand in"),
        (codes.STUCK, "nothing can happen any more"),
    ],
)
def test_an_error_of_machine_code_names_the_policy_and_the_value(error: int, message: str) -> None:
    state: Any = {"errors": {"error": error, "culprit": 77}}
    with pytest.raises(AssertionError, match=message):
        check(state, CHOSEN)
