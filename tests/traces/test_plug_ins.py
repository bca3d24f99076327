"""Importers of other packages: found by their entry point, sniffed before the catch-alls, and broken alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from moereplay import command as entry
from moereplay.traces.importers import plug_ins
from moereplay.traces.importers import registry as importers
from moereplay.traces.plugins import plugins
from moereplay.traces.schema import TraceError
from tests.kit.collecting import case
from tests.kit.importer_contract import CLAUSES
from tests.kit.importer_formulas import BITS_UNKNOWN, EXPERTS_UNKNOWN, Sample, ids
from tests.kit.importing import SIZED, imported, refusal, written

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


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages: one with a format of its own, and two that cannot be loaded."""
    site = tmp_path / "site"
    for package, entries in {
        "stranger": "odd = stranger:ODD\ngeneric = stranger:ODD",
        "halfway": "half = no_such_module:HALF",
        "mistaken": "wrong = stranger:ODD",
    }.items():
        about = site / f"{package}-1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[moereplay.importers]\n{entries}\n")
    (site / "stranger.py").write_text(STRANGER)
    monkeypatch.syspath_prepend(site)
    plugins.cache_clear()
    yield tmp_path
    plugins.cache_clear()


def write(file: Path) -> None:
    file.write_text("odd:\n" + "".join(",".join(map(str, row.ravel())) + "\n" for row in ids(0, 9)))


def test_a_strangers_format_keeps_the_contract(installed: Path) -> None:
    sample = Sample("odd", "odd.csv", write, [], (EXPERTS_UNKNOWN, BITS_UNKNOWN), folder=installed)
    write(sample.path)
    sample.requests.extend(imported(sample.path)[1])
    np.testing.assert_array_equal(sample.requests[0].chosen, ids(0, 9))
    for clause in CLAUSES:
        (installed / clause.__name__).mkdir()
        with case(clause.__name__):
            clause(sample, installed / clause.__name__)
    assert "| `odd` | ids of a stranger's engine |" in importers.markdown(["odd"])
    assert imported(sample.path, SIZED, "odd")[0].digest == imported(sample.path)[0].digest


def test_a_built_in_format_is_not_replaced(installed: Path) -> None:
    assert importers.load("generic").name == "generic"
    assert importers.names().index("odd") < importers.names().index("arrays")


def test_a_plug_in_that_cannot_be_loaded_is_one_line_and_breaks_no_other(installed: Path) -> None:
    for name, package, said in (
        ("half", "halfway", "No module named"),
        ("wrong", "mistaken", "expected an Importer of this name"),
    ):
        with pytest.raises(TraceError, match=f"plug-in {name} of {package} 1.0 cannot be used: .*{said}"):
            importers.load(name)
    write(installed / "odd.csv")
    out = installed / "a.zarr"
    done = CliRunner().invoke(
        entry.application(), ["import", str(installed / "odd.csv"), "--expert-bytes", "9", "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert done.stderr.count("warning: plug-in ") == 2 and "warning: plug-in half of halfway" in done.stderr


def test_a_format_of_a_missing_plug_in_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`contrib/importers/tests/test_contract.py` tries every sample; here are a text, a folder, and what is none."""
    monkeypatch.setattr(plug_ins, "plug_ins", dict)
    said = refusal(written(tmp_path / "a.csv", "phase,token,layer,rank,expert\nprefill,0,0,0,3\n"))
    assert said.endswith(
        "format llama_ranks, written by moe-trace of a llama.cpp fork, needs a plug-in: run `pip install "
        "moereplay-importers`, or in a clone `pip install contrib/importers`"
    )
    (tmp_path / "layers").mkdir()
    np.save(tmp_path / "layers" / "layer0.npy", ids(0, 3)[:, 0])
    assert "format layer_files, written by " in refusal(tmp_path / "layers")
    assert "format cecar needs a plug-in" in refusal(tmp_path / "a.csv", SIZED, "cecar")
    assert "did you mean generic?" in refusal(tmp_path / "a.csv", SIZED, "genric")
