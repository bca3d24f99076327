"""Importers of other packages: found by their entry point, sniffed before the catch-alls, and broken alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from moereplay import command as entry
from moereplay.traces.files import install_contrib
from moereplay.traces.importers import plug_ins
from moereplay.traces.importers import registry as importers
from moereplay.traces.schema import TraceError
from tests.kit.collecting import case
from tests.kit.importer_contract import CLAUSES
from tests.kit.importer_formulas import BITS_UNKNOWN, Sample, ids
from tests.kit.importing import SIZED, imported, refusal, written
from tests.kit.installed import NAME, VERSION, Installed

STRANGER = """
import numpy as np
from moereplay.traces.importers.contract import Foreign, Importer, Origin, header_for
from moereplay.traces.importers.text import blocks, start_of
from moereplay.traces.schema import Request, TraceError

def sniff(path):
    return path.is_file() and start_of(path, 4) == b"odd:"

def read(path, options):
    lines = [line for _, some in blocks(path, 1, ended=True) for line in some]
    try:
        found = np.array([list(map(int, line.split(","))) for line in lines]).reshape(-1, 2, 2)
    except ValueError:
        raise TraceError(f"{path}: invalid rows: expected four ids on every line") from None
    header = header_for(options.counted(found, 2), options, Origin("odd", path, [path]), [])
    return Foreign(header, iter([Request(found, 0)]))

ODD = Importer("odd", "ids of a stranger's engine", "FILE.csv that begins with odd:", sniff, read)
"""


POINTS = {"odd": "stranger:ODD", "generic": "stranger:ODD"}  #: one format of its own, and one named as a built-in


def write(file: Path) -> None:
    file.write_text("odd:\n" + "".join(",".join(map(str, row.ravel())) + "\n" for row in ids(0, 9)))


def test_a_strangers_format_keeps_the_contract(installed: Installed, tmp_path: Path) -> None:
    installed("moereplay.importers", POINTS, {"stranger.py": STRANGER})
    sample = Sample("odd", "odd.csv", write, [], (BITS_UNKNOWN,), folder=tmp_path)
    write(sample.path)
    sample.requests.extend(imported(sample.path)[1])
    np.testing.assert_array_equal(sample.requests[0].chosen, ids(0, 9))
    for clause in CLAUSES:
        (tmp_path / clause.__name__).mkdir()
        with case(clause.__name__):
            clause(sample, tmp_path / clause.__name__)
    assert "| `odd` | ids of a stranger's engine |" in importers.markdown(["odd"])
    assert imported(sample.path, SIZED, "odd")[0].digest == imported(sample.path)[0].digest


def test_a_built_in_format_is_not_replaced(installed: Installed) -> None:
    installed("moereplay.importers", POINTS, {"stranger.py": STRANGER})
    assert importers.load("generic").name == "generic"
    assert importers.names().index("odd") < importers.names().index("arrays")


def test_a_plug_in_that_cannot_be_loaded_is_one_line_and_breaks_no_other(installed: Installed, tmp_path: Path) -> None:
    broken = {"half": "no_such_module:HALF", "wrong": "stranger:ODD"}
    installed("moereplay.importers", POINTS | broken, {"stranger.py": STRANGER})
    for name, said in (("half", "No module named"), ("wrong", "expected an Importer of this name")):
        with pytest.raises(TraceError, match=f"plug-in {name} of {NAME} {VERSION} cannot be used: .*{said}"):
            importers.load(name)
    write(tmp_path / "odd.csv")
    arguments = ["import", str(tmp_path / "odd.csv"), "--expert-bytes", "9", "--out", str(tmp_path / "a.zarr")]
    done = CliRunner().invoke(entry.application(), arguments)
    assert done.exit_code == 0, done.output
    assert done.stderr.count(f"warning: plug-in half of {NAME} {VERSION} cannot be used") == 1


def test_a_format_of_a_missing_plug_in_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`contrib/importers/tests/test_contract.py` tries every sample; here are a text, a folder, and what is none."""
    monkeypatch.setattr(plug_ins, "plug_ins", dict)
    said = refusal(written(tmp_path / "a.csv", "phase,token,layer,rank,expert\nprefill,0,0,0,3\n"))
    assert said.endswith(
        "format llama_ranks, written by moe-trace of a llama.cpp fork, needs a plug-in: "
        f"run `{install_contrib('importers')}`"
    )
    (tmp_path / "layers").mkdir()
    np.save(tmp_path / "layers" / "layer0.npy", ids(0, 3)[:, 0])
    assert "format layer_files, written by " in refusal(tmp_path / "layers")
    assert "format cecar needs a plug-in" in refusal(tmp_path / "a.csv", SIZED, "cecar")
    assert "did you mean generic?" in refusal(tmp_path / "a.csv", SIZED, "genric")
