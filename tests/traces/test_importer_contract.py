"""The contract of importers, tried on a sample of every built-in format."""

from __future__ import annotations

from pathlib import Path

import pytest

from moereplay.traces.importers import BUILT_IN, CATCH_ALLS
from tests.kit.importer_contract import are_what_their_script_writes, check, is_refused_or_still_a_trace_when_damaged
from tests.kit.importer_formulas import Sample
from tests.kit.importer_samples import ALL

each = pytest.mark.parametrize("sample", ALL, ids=lambda sample: sample.name)


def test_every_importer_has_a_sample() -> None:
    assert {sample.importer for sample in ALL} == {*BUILT_IN, *CATCH_ALLS}


def test_the_samples_are_what_their_script_writes(tmp_path: Path) -> None:
    are_what_their_script_writes(ALL, tmp_path / "samples")


@each
def test_an_importer_keeps_its_contract(sample: Sample, tmp_path: Path) -> None:
    check(sample, tmp_path)


@each
def test_a_damaged_sample_is_refused_or_still_a_trace(sample: Sample, tmp_path: Path) -> None:
    is_refused_or_still_a_trace_when_damaged(sample, tmp_path)
