"""Columns of measured runs: every number has a range, is held to it by file and line, and is documented."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from moereplay.calibration.columns import FILES, File, Range, amounts, needed
from moereplay.calibration.files import read_folder, read_lines, read_series
from moereplay.simulator.errors import ConfigError
from tests.kit.every import every
from tests.kit.evidence_folder import made

NO_NUMBERS = ("inf", "-inf", "nan", "1e400", "-1", "-1e-9", "true", "1_000", "٣", "0x10", "1e999999", "9" * 400, "1,5")
NUMBERS: list[tuple[File, str]] = [(file, name) for file in FILES for name in amounts(file)]


def written(folder: Path, file: File, name: str, value: str) -> Path:
    """A file of one row with this value, and 1 in whatever else it needs."""
    cells = dict.fromkeys((*needed(file), name), "1") | {name: f'"{value}"'}
    path = folder / f"{file}.csv"
    path.write_text(f"{','.join(cells)}\n{','.join(cells.values())}\n", "utf-8")
    return path


def beyond(allowed: Range) -> list[str]:
    values = [f"{allowed.most * 1.01:.0f}", "1e308", *(["1.5"] if allowed.whole else [])]
    return [*values, *(["0", "-0.0"] if allowed.least > 0 else [])]


@every("file, name", NUMBERS, apart=True)
def test_what_is_out_of_range_is_named_by_file_line_column_and_range(tmp_path, file, name):
    allowed = FILES[file][name].range
    assert allowed is not None
    for value in (*NO_NUMBERS, *beyond(allowed)):
        path = written(tmp_path, file, name, value)
        with pytest.raises(ConfigError) as error:
            read_lines(path, file)
        for said in (f"{path} line 2", name, repr(value[:60]), str(allowed)):
            assert said in str(error.value)


@every("file, name", NUMBERS, apart=True)
def test_both_ends_of_a_range_are_read(tmp_path, file, name):
    allowed = FILES[file][name].range
    assert allowed is not None
    for value in (allowed.least, allowed.most):
        (line,) = read_lines(written(tmp_path, file, name, repr(value)), file)
        assert line.amount(name) == value


def test_what_a_prediction_divides_by_is_at_least_one():
    """The table is the only other place of these bounds, so the tests above would follow it down to zero."""
    least = {name: FILES["cells"][name].range for name in ("moe_layers", "experts", "k", "expert_bytes_mean", "lanes")}
    least["reads_per_expert"] = FILES["models"]["reads_per_expert"].range
    assert {name: allowed and allowed.least for name, allowed in least.items()} == dict.fromkeys(least, 1)


def test_a_negative_zero_is_zero(tmp_path):
    (line,) = read_lines(written(tmp_path, "cells", "stall_ms", "-0.0"), "cells")
    assert str(line.amount("stall_ms")) == "0.0"


def test_every_declared_column_is_read_and_no_other_can_be():
    """Names stand as texts in the code that reads them; those of series in the room that predicts them."""
    texts = set[str]()
    rooms = Path(__file__).parents[2]
    for path in [*(rooms / "calibration").glob("*.py"), *(rooms / "sweeps" / "recommend").glob("*.py")]:
        if path.name != "columns.py":
            tree = ast.parse(path.read_text("utf-8"))
            texts |= {str(each.value) for each in ast.walk(tree) if isinstance(each, ast.Constant)}
    checked_only = {"prompt_tokens", "decode_tokens"}
    for file in FILES:
        assert set(FILES[file]) - checked_only - set(needed(file)) <= texts
    line = read_lines_of("cell,device,model\na,b,c\n")
    with pytest.raises(KeyError):
        line.text("colour")


def read_lines_of(text: str):
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = Path(folder) / "cells.csv"
        path.write_text(text)
        return read_lines(path, "cells")[0]


SECRET = "root:x:0:0:root"


@every("named", ["../secret.csv", "tokens/../../secret.csv", "{absolute}", "link.csv", "a\0b"], apart=True)
def test_a_log_outside_of_the_folder_is_refused_unread(tmp_path, named):
    (tmp_path / "secret.csv").write_text(f"{SECRET}\n")
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "link.csv").symlink_to(tmp_path / "secret.csv")
    named = named.format(absolute=tmp_path / "secret.csv")
    (folder / "cells.csv").write_text(f"cell,device,model,per_token_file\na,d,m,{named}\n", "utf-8")
    evidence = read_folder(folder)
    with pytest.raises(ConfigError, match="per_token_file") as error:
        evidence.series(evidence.cells[0])
    assert "line 2" in str(error.value) and SECRET not in str(error.value)


def test_a_log_within_the_folder_is_read(tmp_path):
    evidence = read_folder(made(tmp_path / "made"))
    assert all(evidence.series(cell) is not None for cell in evidence.cells)


def test_a_log_of_absurd_bytes_is_refused_by_line(tmp_path):
    (tmp_path / "log.csv").write_text("wall_ms,read_bytes\n1,2\n3,1e308\n")
    with pytest.raises(ConfigError, match=r"log.csv line 3: invalid read_bytes '1e308'"):
        read_series(tmp_path / "log.csv")
