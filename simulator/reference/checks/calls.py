"""Every call of a user's own policy: its hooks see checked tables, and what they return is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moereplay.policies.contract import Own, Policy
from moereplay.policies.hooks import Hook
from moereplay.simulator.reference.checks.results import ResultChecks
from moereplay.simulator.reference.checks.tables import CheckedTables
from moereplay.simulator.reference.state import Tables


class CheckedCalls:
    """The policies that ship are called without: tests hold them to the same."""

    def __init__(self, policy: Policy, tables: Tables) -> None:
        self.tables = CheckedTables(policy, tables)
        self._results = ResultChecks(policy, tables.now, tables.copies)

    def call(self, hook: Hook, function: Callable[..., Any], own: Own, given: tuple[Any, ...]) -> Any:
        """What the hook returns. Raises PolicyError with file, line and text for what it does wrongly."""
        self.tables.sealed = "" if hook.writes else hook.name
        if hook.at_gate:
            given = (self.tables.step(given[0]), *given[1:])
        result = self._results.called(function, hook.in_order(self.tables, own, given))
        self._results.check(hook, function, result, given[1:] if hook.at_gate else given)
        return result
