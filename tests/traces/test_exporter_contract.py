"""The contract of exporters: reproducible bytes, atomic output, one block in memory at a time, and no silent loss."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moereplay.traces import growing
from moereplay.traces.exporters import MODULES, NAMES, contract, rows
from moereplay.traces.exporters.contract import Exporter, Options, fields_of
from moereplay.traces.schema import Geometry, Header, Trace, TraceError
from tests.kit.collecting import case
from tests.kit.exporting import ALL, exported, options_for, out_of, whole
from tests.kit.recordings import ROOT


def content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


class Breaking:
    """An array whose rows cannot be read from some token on."""

    def __init__(self, rows: Any, at: int, error: type[BaseException]) -> None:
        self.rows, self.at, self.error = rows, at, error

    def __getitem__(self, rows: slice) -> np.ndarray:
        if rows.stop is None or rows.stop > self.at:
            raise self.error("in the middle")
        return self.rows[rows]


def broken(error: type[BaseException]) -> Trace:
    trace = replace(whole(2, 1000), digest="other")
    arrays = {name: Breaking(rows, 1024, error) for name, rows in trace.arrays.items()}
    return replace(trace, arrays=arrays)


def is_a_file_and_a_word(exporter: Exporter, folder: Path) -> None:
    files = {path.stem for path in (ROOT / "traces" / "exporters").glob("*.py")}
    assert files - {"__init__", "contract"} == set(MODULES.values())
    assert re.sub("[-.]", "_", exporter.name) in NAMES
    assert exporter.needs <= exporter.takes <= Options.model_fields.keys()


def lists_each_file_with_its_bytes_and_sha256_and_writes_the_same_bytes_again(exporter: Exporter, folder: Path) -> None:
    out, made = exported(whole(), exporter.name, folder / "new" / "folder")
    listed = {file.path: (file.bytes, file.sha256) for file in made.files}
    there = {str(out / name) if out.is_dir() else str(out): data for name, data in content(out).items()}
    assert listed == {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in there.items()}
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert content(exported(whole(), exporter.name, folder / "again")[0]) == content(out)


def names_what_it_cannot_hold(exporter: Exporter, folder: Path) -> None:
    _, made = exported(whole(), exporter.name, folder)
    assert exporter.keeps | {*made.dropped_fields} >= {*fields_of(whole())}
    assert not exporter.keeps & {*made.dropped_fields}
    assert {"token_ids", "nll", "lookahead", "residency", "provenance"} <= {*made.dropped_fields}


def refuses_what_is_there_and_leaves_it_alone(exporter: Exporter, folder: Path) -> None:
    out = out_of(exporter, folder)
    out.write_text("mine")
    with pytest.raises(TraceError, match="exists; choose another --out or remove it"):
        exported(whole(), exporter.name, folder)
    assert out.read_text() == "mine"


def leaves_nothing_where_it_fails_half_way(exporter: Exporter, folder: Path) -> None:
    for error in (TraceError, KeyboardInterrupt, OSError):
        with pytest.MonkeyPatch.context() as patch, case(error):
            patch.setattr(growing, "VALUES_AT_ONCE", 1)
            with pytest.raises((TraceError, KeyboardInterrupt), match="in the middle"):
                exported(broken(error), exporter.name, folder / "new")
            assert list(folder.iterdir()) == []


def refuses_options_that_it_has_no_use_for_and_lacks(exporter: Exporter, folder: Path) -> None:
    given = {"cache_bytes": 1, "ranking": ((0, 0),), "dense_layers": 1, "layer": 0, "passes": "token", "licence": "mit"}
    for name in given.keys() - exporter.takes:
        options = options_for(exporter, **{name: given[name]})
        with case(name), pytest.raises(TraceError, match=f"combined with format {re.escape(exporter.name)}"):
            contract.export(whole(), exporter, options, out_of(exporter, folder))
    for _ in exporter.needs:
        with pytest.raises(TraceError, match="requires --"):
            contract.export(whole(), exporter, Options(), out_of(exporter, folder))
    assert list(folder.iterdir()) == []


CLAUSES = (
    is_a_file_and_a_word,
    lists_each_file_with_its_bytes_and_sha256_and_writes_the_same_bytes_again,
    names_what_it_cannot_hold,
    refuses_what_is_there_and_leaves_it_alone,
    leaves_nothing_where_it_fails_half_way,
    refuses_options_that_it_has_no_use_for_and_lacks,
)


@pytest.mark.parametrize("exporter", ALL, ids=lambda exporter: exporter.name)
def test_an_exporter_keeps_its_contract(exporter: Exporter, tmp_path: Path) -> None:
    for clause in CLAUSES:
        (tmp_path / clause.__name__).mkdir()
        with case(clause.__name__):
            clause(exporter, tmp_path / clause.__name__)


class Drawn:
    """Rows made as they are read: a trace of any length in no memory."""

    def __init__(self, tokens: int, width: int, dtype: str) -> None:
        self.tokens, self.width, self.dtype, self.most = tokens, width, dtype, 0

    def __getitem__(self, rows: slice) -> np.ndarray:
        at = np.arange(*rows.indices(self.tokens))
        self.most = max(self.most, len(at))
        first = at[:, None, None] + np.arange(LONG.layers)[:, None]
        return ((first + np.arange(self.width)) % LONG.experts).astype(self.dtype)


LONG = Geometry(layers=4, experts=8, k=2, expert_bytes=(100,) * 4)


def long_trace(tokens: int) -> Trace:
    offsets = np.array([0, tokens // 3, tokens])
    arrays = {"chosen": Drawn(tokens, 2, "<i2"), "weights": Drawn(tokens, 2, "<f4"), "logits": Drawn(tokens, 8, "<f4")}
    return Trace(Header(geometry=LONG), offsets, np.array([5, 0]), arrays, f"of {tokens}")


@pytest.mark.long
@pytest.mark.parametrize("name", [exporter.name for exporter in ALL if exporter.name != "oracle-general"])
def test_memory_does_not_grow_with_the_trace(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The format that is left out reads derived arrays, which are mapped."""
    monkeypatch.setattr(growing, "VALUES_AT_ONCE", 1)
    monkeypatch.setattr(growing, "SHARD_TOKENS", 64)
    monkeypatch.setattr(rows, "GROUP", 256)
    peaks = []
    for tokens in (512, 512, 2_048):
        trace = long_trace(tokens)
        tracemalloc.start()
        exported(trace, name, tmp_path / str(len(peaks)))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert all(array.most <= growing.SHARD_TOKENS for array in trace.arrays.values())
    assert peaks[2] < 1.5 * peaks[1]


@pytest.mark.long
def test_parquet_of_a_long_trace_takes_no_more_of_the_process(tmp_path: Path) -> None:
    """Memory of polars is visible only in the process."""
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from tests.traces.test_exporter_contract import exported, long_trace\n"
        "exported(long_trace(int(sys.argv[1])), 'parquet', Path(sys.argv[2]))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for tokens in (300_000, 3_000_000):
        command = [sys.executable, "-c", script, str(tokens), str(tmp_path / str(tokens))]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        peaks.append(int(ended.stdout))
    assert peaks[1] - peaks[0] < 150_000  # KiB; the arrays of the longer one have 540 MB


@pytest.mark.parametrize("name", ["csv", "hf"])  # a file and a folder
def test_a_killed_export_leaves_no_result_and_the_next_one_clears_up(name: str, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from tests.traces.test_exporter_contract import exported, long_trace\n"
        "exported(long_trace(10_000_000), sys.argv[1], Path(sys.argv[2]))"
    )
    process = subprocess.Popen([sys.executable, "-c", script, name, str(tmp_path)], cwd=ROOT)
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline and not list(tmp_path.iterdir()):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 1 and left[0].startswith(".") and left[0].endswith(".tmp")
    out, _ = exported(whole(), "csv", tmp_path)
    assert list(tmp_path.iterdir()) == [out]
