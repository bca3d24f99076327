"""Long files of this package's formats are read some lines at a time, as those of built-in formats are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moereplay_importers import cache_lab
from moereplay_importers.by_pass import Joined, by_pass, in_groups, tokens_of

from contrib.importers.tests.catalogue import ALL
from contrib.importers.tests.long_files import MANY, ONE
from tests.kit.long_files import LAYERS, TOKENS
from tests.traces.test_streamed_imports import (
    OF_REQUEST,
    cut,
    does_not_depend_on_pieces,
    growth,
    in_pieces,
    is_read_as_its_requests_are_taken,
)

TEXTS = [sample for sample in ALL if sample.path.is_file() and sample.path.suffix not in (".pt", ".bin")]
#: Bytes that are held of a row of the one request of a file; as Python's lists it took four times as much.
OF_ROW = {"one_ranks.csv": 140, "lab.jsonl": 100, "steps.jsonl": 40}


@pytest.mark.long
@pytest.mark.parametrize("name", MANY)
def test_memory_does_not_grow_with_the_requests_of_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_pieces(monkeypatch, 1 << 12, 64)
    assert growth(tmp_path, name, MANY) < OF_REQUEST


@pytest.mark.long
@pytest.mark.parametrize("name", ONE)
def test_of_a_file_that_is_one_request_its_numbers_alone_are_held(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_pieces(monkeypatch, 1 << 12, 64)
    monkeypatch.setattr(cache_lab, "ROWS", 64)
    assert growth(tmp_path, name, ONE) < OF_ROW[name] * TOKENS * LAYERS


@pytest.mark.parametrize("name", MANY)
def test_a_file_is_read_as_its_requests_are_taken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_read_as_its_requests_are_taken(name, MANY, tmp_path, monkeypatch)


def test_a_trace_does_not_depend_on_the_pieces_in_which_its_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_lab, "ROWS", 1)
    does_not_depend_on_pieces(TEXTS, monkeypatch)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.data())
def test_passes_have_the_same_tokens_in_pieces(layers: list[int], data: st.DataObject) -> None:
    layer = np.array(layers)
    pieces = [{"layer": layer[part], "run": layer[part]} for part in data.draw(cut(len(layer)))]
    joined = Joined()
    whole, found = tokens_of(layer, layer), list(by_pass(pieces, found=joined))
    assert joined.passes == whole.follows.sum()
    for name in ("request", "token", "phase"):
        np.testing.assert_array_equal(np.concatenate([each[name] for each in found]), getattr(whole, name))


@given(st.integers(1, 40), st.integers(1, 7), st.data())
def test_groups_are_whole_but_the_last(rows: int, k: int, data: st.DataObject) -> None:
    pieces = [{"row": np.arange(rows)[part]} for part in data.draw(cut(rows))]
    found = [each["row"] for each in in_groups(pieces, k)]
    np.testing.assert_array_equal(np.concatenate(found), np.arange(rows))
    assert all(len(each) % k == 0 for each in found[:-1])
