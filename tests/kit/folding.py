"""Several cases of one test as one item: what takes milliseconds needs no item of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., None]


def in_one_item(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Take the place of `pytest.mark.parametrize`: each case is a subtest of the same item, reported by its values.

    A case has a `tmp_path` and a `monkeypatch` of its own; other fixtures are shared by all.
    """
    listed = (names,) if isinstance(names, str) else tuple(names)
    values = [dict(zip(listed, (case,) if isinstance(names, str) else case, strict=True)) for case in cases]

    def decorate(test: Test) -> Test:
        takes = signature(test).parameters

        def folded(subtests: pytest.Subtests, **fixtures: Any) -> None:
            assert values, "no case"
            for number, case in enumerate(values):
                with subtests.test(number=number, **case), pytest.MonkeyPatch.context() as patches:
                    given = fixtures | case
                    if "tmp_path" in given:
                        given["tmp_path"] = new_folder(fixtures["tmp_path"] / f"case-{number}")
                    if "monkeypatch" in given:
                        given["monkeypatch"] = patches
                    test(**given)

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(folded, name, getattr(test, name))
        folded.pytestmark = list(getattr(test, "pytestmark", []))  # type: ignore[attr-defined]
        fixtures = [Parameter(name, Parameter.KEYWORD_ONLY) for name in takes if name not in listed]
        folded.__signature__ = signature(test).replace(  # type: ignore[attr-defined]
            parameters=[Parameter("subtests", Parameter.POSITIONAL_OR_KEYWORD), *fixtures]
        )
        return folded

    return decorate


def new_folder(path: Path) -> Path:
    path.mkdir()
    return path
