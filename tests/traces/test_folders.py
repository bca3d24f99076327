"""Folders of traces: a file that is missing by the others' names is refused or named, one that is not read is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moereplay.traces.importers import registry as importers
from moereplay.traces.importers import sources
from moereplay.traces.importers.contract import Options
from moereplay.traces.profiles.texts import read_count_table
from moereplay.traces.schema import TraceError
from tests.kit.collecting import case
from tests.kit.importer_formulas import SAMPLES
from tests.kit.importing import imported, refusal

SIZED = Options(expert_bytes=1000)


def made(folder: Path, *names: str) -> list[Path]:
    """Empty files of these names in a folder."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).touch()
    return sorted(folder / name for name in names)


#: Files of sets that state how many there are -> those that are missing.
SETS = {
    "train-00001-of-00002.parquet": "train-00000-of-00002.parquet train-00002-of-00002.parquet",
    "a-00000-of-00003.jsonl a-00002-of-00003.jsonl": "a-00001-of-00003.jsonl",
    "m-00001-of-00003.npz m-00003-of-00003.npz": "m-00002-of-00003.npz",
    "x.1of2.csv.gz": "x.0of2.csv.gz x.2of2.csv.gz",
    "train-0-of-1.csv test-0-of-2.csv": "test-1-of-2.csv",
    "a_1_of_2.pt": "a_0_of_2.pt a_2_of_2.pt",
    "train-00000-of-00002.parquet train-00001-of-00002.parquet": "",
    "m-00001-of-00002.npz m-00002-of-00002.npz": "",
    "one.csv two.csv": "",
    "train-0-of-1.csv test-0-of-2.csv test-1-of-2.csv": "",
}


def test_a_set_without_a_file_is_refused_by_the_missing_name(tmp_path: Path) -> None:
    for at, (present, missing) in enumerate(SETS.items()):
        folder = tmp_path / str(at)
        files = made(folder, *present.split())
        with case(present):
            if missing:
                with pytest.raises(TraceError) as refused:
                    sources.refuse_missing(folder, files)
                assert all(name in str(refused.value) for name in missing.split())
            else:
                sources.refuse_missing(folder, files)
                assert sources.notes(folder, files) == []


#: Numbered files -> the numbers that are missing; "" where numbers do not count the files.
NUMBERED = {
    "part-0.csv part-2.csv": "1",
    "part-00001-abc9.csv part-00002-abc9.csv": "0",
    "layer0.npz layer1.npz layer3.npz": "2",
    "prompt_1_data.csv prompt_2_data.csv prompt_4_data.csv": "3",
    "rank0.csv rank1.csv rank4.csv": "2, 3",
    "run_1700000000.csv run_1700000500.csv": "",
    "a7.csv": "",
    "a1.csv b3.csv": "",
    "3.csv 90.csv": "",
}


def test_a_gap_in_numbers_is_named(tmp_path: Path) -> None:
    for at, (present, number) in enumerate(NUMBERED.items()):
        said = sources.notes(tmp_path / str(at), made(tmp_path / str(at), *present.split()))
        assert len(said) == bool(number), (present, said)
        assert all(f"no file {number} of " in note for note in said), (present, said)


def test_files_that_were_not_read_are_named_and_those_about_the_data_are_not(tmp_path: Path) -> None:
    files = made(tmp_path / "set", "a.csv", "b.csv")
    made(tmp_path / "set", "c.csv.part", "README.md", ".cache", "LICENSE", "dataset_infos.json")
    made(tmp_path / "set" / "more", "d.csv")
    assert sources.notes(tmp_path / "set", files) == ["not read: c.csv.part, more/"]
    assert sources.notes(tmp_path / "set", files, [tmp_path / "set" / "c.csv.part"]) == ["not read: more/"]


def test_one_shard_alone_is_imported_and_said_to_be_one(tmp_path: Path) -> None:
    (shard,) = made(tmp_path, "train-00001-of-00002.parquet")
    sources.refuse_missing(shard, [shard])
    assert "2" in sources.notes(shard, [shard])[0]


def test_an_exported_data_set_without_a_shard_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    shutil.copytree(SAMPLES / "exported", folder)
    (folder / "data" / "train-00000-of-00002.parquet").unlink()
    assert "train-00000-of-00002.parquet" in refusal(folder, Options())
    alone = imported(folder / "data" / "train-00001-of-00002.parquet", Options())[0]
    assert alone.requests == 1


def test_a_file_of_a_folder_that_got_another_suffix_is_named_by_the_import(tmp_path: Path) -> None:
    folder = tmp_path / "gptoss_json"
    shutil.copytree(SAMPLES / "gptoss_json", folder)
    last = sorted(folder.iterdir())[-1]
    last.rename(folder / "last.json.bak")
    assert "not read: last.json.bak" in importers.read(folder, SIZED).notes


def test_counts_of_ranks_name_the_rank_that_is_missing(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        (tmp_path / f"rank{rank}.csv").write_text("layer,expert,count\n0,1,5\n")
    (tmp_path / "rank2.csv.tmp").touch()
    notes = read_count_table(tmp_path).notes
    assert any("no file 2 of " in note for note in notes)
    assert "not read: rank2.csv.tmp" in notes
