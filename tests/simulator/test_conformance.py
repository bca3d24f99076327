"""Every conformance case gives the counters and times that two independent implementations agree on."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.kit import conformance
from tests.kit.cases import ENGINES
from tests.kit.conformance_format import CaseError, read_cases
from tests.kit.every import every

FOLDER = Path(__file__).resolve().parents[1] / "conformance"
Document = dict[str, Any]

PARTS = 4  #: items of each engine, so that workers share them


@cache
def pairs() -> list[tuple[conformance.Case, Document]]:
    """Return every case with its agreed result."""
    return list(zip(read_cases(FOLDER / "cases.json"), results(), strict=True))


@cache
def results() -> list[Document]:
    return json.loads((FOLDER / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("engine", ENGINES)
def test_every_case_gives_the_agreed_result(engine: str, part: int) -> None:
    rows = [(conformance.row(case, engine), agreed) for case, agreed in pairs()[part::PARTS]]
    assert [row["name"] for row, _ in rows] == [agreed["name"] for _, agreed in rows]
    different = {
        row["name"]: {name for name in row if row[name] != agreed[name]} for row, agreed in rows if row != agreed
    }
    assert different == {}, "cases, and the counters that differ"


def test_there_are_288_cases() -> None:
    assert len(pairs()) == 288


# ---------------------------------------------------------------- the command


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """A file of the last two cases, the later one first."""
    path = tmp_path / "few.json"
    documents = json.loads((FOLDER / "cases.json").read_text())[:-3:-1]
    path.write_text(json.dumps(documents))
    return path


@every("engine", ENGINES)
def test_rows_are_printed_in_the_files_order_and_in_the_form_of_the_results(
    engine: str, few: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert conformance.main([str(few), "--engine", engine, "--json"]) == 0
    printed = capsys.readouterr().out
    assert printed == conformance.as_json(results()[:-3:-1]) + "\n"
    assert [list(row) for row in json.loads(printed)] == [list(row) for row in results()[:-3:-1]]


def test_without_json_a_case_is_a_line(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance.main([str(few), "--engine", "reference"]) == 0
    row = results()[-1]
    assert capsys.readouterr().out.splitlines()[0] == (
        f"{row['name']}: {row['accesses']} accesses, {row['hits']} hits, {row['late']} late, {row['misses']} misses "
        f"in {row['time_ns']} ns"
    )


def edit(*place: Any, value: Any = None) -> Callable[[Document], None]:
    """Put `value` at a place of a case, or take away what is there."""

    def edited(case: Document) -> None:
        target: Any = case
        for step in place[:-1]:
            target = target[step]
        if value is None:
            del target[place[-1]]
        else:
            target[place[-1]] = value

    return edited


CELL = ("requests", 0, "tokens", 0, 0)
WRONG = {
    "a field too few": (edit("k"), "k: missing"),
    "a field too many": (edit("kk", value=1), "kk: unknown key"),
    "text for a number": (edit("k", value="2"), "k: expected a whole number"),
    "no layers": (edit("layers", value=0), "layers: expected at least 1"),
    "expert sizes of other layers": (edit("expert_bytes", value=[1]), "1 expert_bytes for"),
    "no pool": (edit("capacity_bytes_per_layer", value=[]), "pools of [] bytes"),
    "a pool too small": (edit("capacity_bytes_per_layer", value=1), "pools of [1, 1"),
    "an expert that is not there": (edit(*CELL, "chosen", value=[999]), "request 0: token 0, layer 0: chosen is [999]"),
    "an expert twice": (edit(*CELL, "chosen", value=[1, 1]), "distinct experts"),
    "weights of others": (edit(*CELL, "weights", value=[]), "0 weights for"),
    "a weight that is no number": (edit(*CELL, "weights", 0, value=float("nan")), "finite number"),
    "a layer too few": (edit(*CELL), "token 0 has 3 cells for 4 layers"),
    "no look": (edit(*CELL, "look", value={}), "look has ['1', '2'], expected []"),
    "scores too few": (edit(*CELL, "look", "1", value=[0.5]), "scores, expected 7"),
    "a prompt longer than the request": (edit("requests", 0, "prompt_length", value=99), "a prompt of 99 in"),
    "a policy that is not there": (edit("eviction", value="lruu"), "lruu"),
    "a policy that needs logits": (edit("eviction", value="mrs"), "router logits"),
    "a policy that looks farther": (edit("prefetch", value="top_k:depth=3"), "recorded 2"),
    "passes that are not there": (edit("passes", value="all"), "passes 'all'"),
    "a reset that is not there": (edit("reset", value="now"), "(got 'now')"),
}


@pytest.fixture(scope="module")
def sound() -> Document:
    """A case of a pool per layer, whose experts weigh 2 bytes and more."""
    documents = json.loads((FOLDER / "cases.json").read_text())
    shape = {"scope": "per_layer", "layers": 4, "experts": 7}
    return next(case for case in documents if shape.items() <= case.items() and min(case["expert_bytes"]) > 1)


@every("wrong, said", WRONG.values())
def test_a_wrong_case_is_refused_in_a_line_that_names_it(
    wrong: Callable[[Document], None],
    said: str,
    sound: Document,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = copy.deepcopy(sound) | {"name": "the wrong\none"}
    wrong(case)
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps([sound, case]))
    assert conformance.main([str(path), "--engine", "reference", "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "case the wrong one: " in printed.err
    assert said in printed.err


@every("text", ["", "{}", "[", "[[]]", "[" * 100_000, '[{"k": ' + "9" * 5000 + "}]", "\x00"])
def test_what_is_no_list_of_cases_is_refused_in_a_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(CaseError, match=r"^[^\n]{1,500}$") as refused:
        read_cases(path)
    assert "wrong.json" in str(refused.value)


def test_a_file_that_is_not_there_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance.main([str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.endswith("none.json: No such file or directory; expected a file of cases\n")
