"""Damage to stored results is an error that names the part, or changes nothing: no row is lost or altered silently."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moereplay.results import curves, parts
from moereplay.results.errors import ResultError
from moereplay.results.parts import PROVENANCE, stored
from moereplay.results.schema import FILE_DIGEST
from moereplay.results.stored import errors, load
from moereplay.simulator.config import configure
from moereplay.simulator.curves.curve import curve, write_curve
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.grid import run_grid
from moereplay.sweeps.jobs import TABLES, Batch, compute
from moereplay.sweeps.run import Sweep, planned
from moereplay.sweeps.store import Folder
from moereplay.traces.store import open_trace
from tests.kit.sweeping import experiment, merged
from tests.kit.tiny_runs import written_before

REFUSED = (ResultError, ConfigError)
COUNTS = (20, pytest.param(200, marks=pytest.mark.long))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Sweep:
    return planned(experiment(tmp_path_factory.mktemp("damage")))


@pytest.fixture(scope="module")
def swept(sweep, tmp_path_factory) -> Path:
    """The sweep in three parts, with a row per request."""
    out = tmp_path_factory.mktemp("swept")
    for number in range(3):
        part = compute(Batch(number, tuple(sweep.jobs[number::3]), "reference", True)).part
        Folder(out).store(part, {"sweep_version": 1, "host": "here", "traces": {"a": "b"}})
    return out


@pytest.fixture
def copy(swept, tmp_path) -> Path:
    return Path(shutil.copytree(swept, tmp_path / "copy"))


def first_part(folder: Path) -> Path:
    return min(folder.glob("part-*"))


def rewrite(part: Path, change: Callable[[dict], object]) -> None:
    """Edit a provenance."""
    document = json.loads((part / PROVENANCE).read_text())
    change(document)
    (part / PROVENANCE).write_text(json.dumps(document, indent=1, sort_keys=True))


def readers(folder: Path, scratch: Path) -> dict[str, Callable[[], object]]:
    """Return the result of each way of reading."""
    return {
        "merge": lambda: merged(scratch / str(random.random()), folder),
        "show and plot": lambda: load(folder).to_dicts(),
        "show --errors": lambda: errors(folder).to_dicts(),
        "resume": lambda: stored(Folder(folder).provenances(), "requests"),
    }


def refusals(folder: Path, scratch: Path) -> dict[str, str]:
    """Return the error of each way of reading a folder that all must refuse."""
    said = {}
    for name, read in readers(folder, scratch).items():
        with pytest.raises(REFUSED) as refused:
            read()
        assert "\n" not in str(refused.value)
        said[name] = str(refused.value)
    return said


def flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def flips(folder: Path, count: int) -> Iterator[tuple[Path, int]]:
    """One bit after the other is wrong, anywhere in any file; each is right again after its turn."""
    dice, files = random.Random(count), sorted(path for path in folder.rglob("*") if path.is_file())
    for _ in range(count):
        file = dice.choice(files)
        data = file.read_bytes()
        bit = dice.randrange(8 * len(data))
        file.write_bytes(flipped(data, bit))
        yield file, bit
        file.write_bytes(data)


def outcome(read: Callable[[], object], expected: object) -> str:
    try:
        return "same" if read() == expected else "different"
    except REFUSED as refused:
        return "refused" if "\n" not in str(refused) else "refused in several lines"


# parts of a sweep


@pytest.mark.parametrize("has_digest", (True, False))
def test_one_bit_in_the_name_of_a_table_loses_no_row(has_digest, copy, tmp_path):
    """`reqeests` for `requests`: also in a part of the first versions, whose provenance had no digest of itself."""
    part = first_part(copy)
    if not has_digest:
        rewrite(part, lambda document: document.pop("digest"))
    data = (part / PROVENANCE).read_bytes()
    at = data.index(b"quests.parquet") + 1
    (part / PROVENANCE).write_bytes(flipped(data, 8 * at + 4))
    assert b"reqeests.parquet" in (part / PROVENANCE).read_bytes()
    for said in refusals(copy, tmp_path).values():
        assert str(part) in said and "replay again" in said


def test_a_part_without_a_digest_of_its_provenance_is_read_as_ever(copy, swept, tmp_path):
    for part in copy.glob("part-*"):
        rewrite(part, lambda document: document.pop("digest"))
    before = readers(swept, tmp_path)
    for name, read in readers(copy, tmp_path).items():
        assert read() == before[name]()


def test_hidden_files_of_the_system_are_let_alone(copy, swept, tmp_path):
    (first_part(copy) / ".DS_Store").write_bytes(b"")
    assert merged(tmp_path / "a", copy) == merged(tmp_path / "b", swept)


def test_a_table_under_the_right_digest_that_is_no_table_is_refused(copy, tmp_path):
    part = parts.Part({"configurations": b"no Parquet"}, {"configuration": ["a"]})
    Folder(copy).store(part, {"sweep_version": 1})
    del (reads := readers(copy, tmp_path))["resume"]  # it reads no table
    for read in reads.values():
        with pytest.raises(REFUSED, match=rf"{part.name}: its configurations cannot be read as Parquet"):
            read()


def test_a_part_can_hold_the_tables_that_there_are():
    assert set(parts.TABLES) == set(TABLES)


# files of `curve --out`, and those of `replay --out` until November 2026


@pytest.fixture(scope="module")
def replays(sweep, tmp_path_factory) -> Path:
    """Four replays and the curves behind them."""
    out, trace = tmp_path_factory.mktemp("replays"), open_trace(sweep.traces[0].path or Path())
    configs = [configure(capacity=capacity, prefetch=name) for capacity in ("20%", "60%") for name in ("none", "top_k")]
    written_before(out, *zip(*run_grid(trace, configs, engine="reference"), strict=True))
    write_curve(out, curve(trace))
    return out


def test_a_file_of_one_table_carries_its_own_digest(replays, tmp_path):
    """So that nothing damaged is parsed: what polars says of that goes to the terminal in many lines."""
    for file in replays.iterdir():
        reader = load if file.name.startswith("part-") else curves.load
        data = file.read_bytes()
        assert data.count(FILE_DIGEST.encode()) == 1
        name = data.index(FILE_DIGEST.encode())  # without it a file is an older version's
        for bit in range(0, 8 * len(data), 8 * len(data) // 40):
            if name <= bit // 8 < name + len(FILE_DIGEST):
                continue
            (tmp_path / file.name).write_bytes(flipped(data, bit))
            with pytest.raises(ResultError, match="is damaged: its content does not match its digest"):
                reader(tmp_path)
        (tmp_path / file.name).unlink()


@pytest.mark.parametrize("count", COUNTS)
def test_flipped_bits_in_replays_are_refused_or_change_nothing(count, replays, tmp_path, capfd):
    copy = Path(shutil.copytree(replays, tmp_path / "copy"))

    def read() -> list[dict]:
        return load(copy).to_dicts() + curves.load(copy).to_dicts()

    expected = read()
    found = [outcome(read, expected) for _ in flips(copy, count)]
    assert set(found) <= {"same", "refused"}
    assert found.count("refused") > 0.9 * count
    assert capfd.readouterr().err == ""
