"""The budget of lines and files counts what it says, and names a room that outgrew it."""

import tomllib

import pytest

from tests.project.budget import ROOT, code_lines, complaints, measured


def test_a_room_above_its_row_is_named_and_so_is_one_without_a_row():
    rooms = {"traces": (3, 101, 60), "attic": (1, 1, 1), "policies": (2, 50, 30)}
    budget = {"traces": {"lines": 100, "files": 3}, "policies": {"lines": 50, "files": 2}}
    named = [line.split(":")[0] for line in complaints(rooms, budget)]
    assert named == ["attic", "traces"]


def test_code_lines_leave_out_blank_lines_comments_and_docstrings():
    assert (
        code_lines('"""Two\nlines."""\n\n# why\nx = """a\nb"""\n\n\ndef f():\n    """One."""\n    return x  # why\n')
        == 4
    )


@pytest.mark.long
def test_every_room_has_a_row_with_a_reason_and_no_row_is_left_over():
    budget = tomllib.loads((ROOT / "tests/project/budget.toml").read_text(encoding="utf-8"))
    assert set(measured()) == set(budget)
    assert all(row["why"] for row in budget.values())
