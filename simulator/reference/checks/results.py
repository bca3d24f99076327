"""What hooks of a user's own policy raise and return: errors name the hook's file, line and text.

The policies that ship are held to the same by their tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moereplay.policies.contract import CPU, DROP, NONE, PER_TOKEN, Policy, PolicyError
from moereplay.policies.declaration import check_result
from moereplay.policies.files import blamed, complaint
from moereplay.policies.hooks import Hook

Rows = Sequence[Mapping[str, int]]


class ResultChecks:
    """Refuses results of the wrong type, and numbers of no expert, copy or precision."""

    def __init__(self, policy: Policy, now: Mapping[str, int], copies: Rows) -> None:
        self._policy, self._now, self._copies = policy, now, copies

    def called(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """What the hook returns. Raises PolicyError for what it raises."""
        try:
            return function(*arguments)
        except PolicyError:  # of the tables, which name the line themselves
            raise
        except (Exception, SystemExit) as error:  # here, as SimPy raises a copy without the line
            said = f"{type(error).__name__}: {error}"
            raise PolicyError(blamed(error) or str(complaint(function, said))) from error

    def check(self, hook: Hook, function: Callable[..., Any], result: Any, arguments: Sequence[Any]) -> None:
        """Raises PolicyError for a result of another type or range. `arguments` are the hook's own."""
        check = getattr(self, f"_check_{hook.name}", None)
        try:
            check_result(hook, result)
            if check:
                check(result, *arguments)
        except ValueError as error:
            raise complaint(function, str(error)) from None

    def _check_want(self, precision: int, n: int) -> None:
        self._within("want returned precision", precision, range(self._now["precisions"]))

    def _check_resolve(self, _: None, missing: Sequence[int], free: int, verdict: Sequence[int]) -> None:
        per_token = [PER_TOKEN] if getattr(self._policy, "substitute", None) else []
        allowed = [*range(self._now["precisions"]), DROP, CPU, *per_token]
        if getattr(self._policy, "fetches_all", False) and any(verdict):
            raise ValueError(f"hook resolve gave verdict {next(filter(None, verdict))}; fetches_all promises 0 alone")
        for each in verdict:
            self._within("resolve gave verdict", each, allowed)

    def _check_substitute(self, expert: int, t: int, j: int, eligible: Sequence[int]) -> None:
        self._within("substitute named expert", expert, [NONE, *(e for e, yes in enumerate(eligible) if yes)])

    def _check_choose(self, _: None, out: Sequence[Sequence[int]]) -> None:
        experts = range(NONE, self._now["experts"])
        for row in out:
            for each in row:
                self._within("choose named expert", each, experts)
            named = [each for each in row if each != NONE]
            if len(set(named)) < len(named):
                raise ValueError(f"hook choose named an expert twice for one token: {row}")

    def _check_suggest(self, count: int, out: Sequence[int]) -> None:
        self._within("suggest returned a count of", count, range(len(out) + 1))
        now = self._now
        later = range((now["layer"] + 1) * now["experts"] * now["precisions"], len(self._copies))
        for y in out[:count]:
            self._within("suggest named, of the copies of later layers,", y, later)

    def _within(self, what: str, value: int, allowed: Sequence[int]) -> None:
        if type(value) is not int or value not in allowed:
            raise ValueError(f"hook {what} {value!r}; {_in_words(allowed)} may be named")


def _in_words(allowed: Sequence[int]) -> str:
    """`2, 5, 9`, or `0 to 7` where all between are allowed; `none`."""
    low, high = min(allowed, default=0), max(allowed, default=0)
    if len({*allowed}) > 1 and len({*allowed}) == high - low + 1:
        return f"{low} to {high}"
    return ", ".join(map(str, sorted({*allowed}))) or "none"
