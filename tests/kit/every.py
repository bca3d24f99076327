"""`every` runs a test for a table of cases as one item, where all cases take one path through the code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from moereplay import policies

Test = Callable[..., None]


def every(names: str, cases: Iterable[Any], apart: bool = False) -> Callable[[Test], Test]:
    """Call the decorated test once for each case; a note on what a case raises names the case.

    `cases` are values of the one name, or tuples of values for several ("size, rate"). They share their fixtures,
    or, if they are kept `apart`, all of them but `tmp_path` and `monkeypatch`.
    """
    columns = names.split(", ")
    rows = [dict(zip(columns, case if len(columns) > 1 else (case,), strict=True)) for case in cases]
    assert rows, f"no case for {names}"

    def in_one_item(test: Test) -> Test:
        def all_cases(*of_class: Any, **fixtures: Any) -> None:
            for number, row in enumerate(rows):
                try:
                    with pytest.MonkeyPatch.context() as patches:
                        own = _own(fixtures, number, patches) if apart else {}
                        test(*of_class, **row, **fixtures | own)
                except BaseException as error:
                    error.add_note(f"case {row}")
                    raise
                forget_policies()

        taken = signature(test)
        others = [each for name, each in taken.parameters.items() if name not in columns]
        all_cases.__signature__ = taken.replace(parameters=others)  # pyright: ignore[reportFunctionMemberAccess]
        all_cases.__name__, all_cases.__doc__, all_cases.__module__ = test.__name__, test.__doc__, test.__module__
        marks = [pytest.mark.hypothesis] if getattr(test, "is_hypothesis_test", False) else []  # as its plugin marks
        all_cases.pytestmark = getattr(test, "pytestmark", []) + marks  # pyright: ignore[reportFunctionMemberAccess]
        return all_cases

    return in_one_item


def _own(fixtures: dict[str, Any], number: int, patches: pytest.MonkeyPatch) -> dict[str, Any]:
    own: dict[str, Any] = {"monkeypatch": patches} if "monkeypatch" in fixtures else {}
    if "tmp_path" in fixtures:
        own["tmp_path"] = Path(fixtures["tmp_path"] / f"case-{number}")
        own["tmp_path"].mkdir()
    return own


def forget_policies() -> None:
    """Leave the catalogue as shipped, without the policy files that a test has registered."""
    for registered in policies.REGISTERED.values():
        registered.clear()
