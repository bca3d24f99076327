"""The contract of importers, tried on a sample of every format of this package."""

from __future__ import annotations

from pathlib import Path

import pytest

from contrib.importers.tests.catalogue import ALL
from moereplay.traces.files import install_contrib
from moereplay.traces.importers import plug_ins
from moereplay.traces.importers import registry as importers
from moereplay.traces.schema import TraceError
from tests.kit.importer_contract import (
    are_what_their_script_writes,
    check,
    is_refused_or_still_a_trace_when_damaged,
    read_all,
)
from tests.kit.importer_formulas import Sample

README = Path(__file__).parents[1] / "README.md"

each = pytest.mark.parametrize("sample", ALL, ids=lambda sample: sample.name)


def test_every_importer_has_a_sample() -> None:
    assert {sample.importer for sample in ALL} == set(plug_ins.contributed())


def test_the_samples_are_what_their_script_writes(tmp_path: Path) -> None:
    are_what_their_script_writes(ALL, tmp_path / "samples")


@each
def test_an_importer_keeps_its_contract(sample: Sample, tmp_path: Path) -> None:
    check(sample, tmp_path)


@each
def test_a_damaged_sample_is_refused_or_still_a_trace(sample: Sample, tmp_path: Path) -> None:
    is_refused_or_still_a_trace_when_damaged(sample, tmp_path)


def test_half_a_record_at_the_end_is_refused(tmp_path: Path) -> None:
    sample = next(sample for sample in ALL if sample.name == "fitz.rtrace")
    (tmp_path / sample.name).write_bytes(sample.path.read_bytes()[:-1])
    with pytest.raises(TraceError, match="bytes after record"):
        read_all(sample, tmp_path / sample.name)


@each
def test_without_the_package_an_import_names_it(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plug_ins, "plug_ins", dict)
    for format in (None, sample.importer):
        with pytest.raises(
            TraceError, match=f"{sample.importer}.* needs a plug-in: run `{install_contrib('importers')}`"
        ):
            importers.read(sample.path, sample.options, format)
