"""`moereplay live --slow-tier` as a user meets it: real transfers beside the emulated run, and errors of one line."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from torch import Tensor

from moereplay.tracegen.offload.slow_tier import Memory
from moereplay.tracegen.offload.study import VERDICTS
from tests.kit.command import moereplay_here as moereplay
from tests.kit.tiny_checkpoints import checkpoint

SAME = ("accesses", "hits", "late", "misses", "compulsory", "collisions", "evictions", "bytes_demand")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """A model and two windows of text, as words of the command."""
    folder = tmp_path_factory.mktemp("real")
    text = folder / "text.txt"
    text.write_text("Experts that do not fit fast memory are cached. ")
    windows = ("--text", text, "--window", 16, "--prompt-tokens", 8, "--limit", 2)
    return checkpoint(folder / "tiny"), *windows, "--capacity", "40%", "--device", "cpu"


def decisions(path: Path) -> set[tuple[object, ...]]:
    """Return how every access was served, and each eviction with its cause."""
    frame = pl.read_parquet(path).filter(pl.col("kind").is_in([*VERDICTS, "evict"]))
    return set(frame.select("kind", "pass", "layer", "expert", "cause").iter_rows())


@pytest.mark.slow
@pytest.mark.parametrize("contract", ["atomic", "sequential"])
def test_without_prefetch_it_decides_what_the_emulated_run_decides(
    contract: str, tiny: tuple[object, ...], tmp_path: Path
) -> None:
    words = ("live", *tiny, "--contract", contract, "--eviction", "least_stale", "--json", "--events")
    emulated = moereplay(*words, tmp_path / "emulated.parquet", "--eager")
    real = moereplay(*words, tmp_path / "real.parquet", "--slow-tier", f"disk:{tmp_path / 'experts'}:buffered")
    assert real.returncode == emulated.returncode == 0, real.stderr + emulated.stderr
    ours, theirs = json.loads(real.stdout), json.loads(emulated.stdout)
    assert (ours["about"]["label"], theirs["about"]["label"]) == ("LIVE, measured", "LIVE, emulated")
    assert {name: ours["totals"][name] for name in SAME} == {name: theirs["totals"][name] for name in SAME}
    assert ours["quality"] == theirs["quality"] and ours["quality"]["total"]["identical"] is True
    assert ours["quality"]["total"]["kl"] == ours["quality"]["total"]["differing"] == 0
    assert decisions(tmp_path / "real.parquet") == decisions(tmp_path / "emulated.parquet")
    assert ours["about"]["slow_tier"] == "disk, buffered: the page cache answers too"
    assert "head" in set(pl.read_parquet(tmp_path / "real.parquet")["kind"])


def test_the_table_says_what_was_measured_and_a_record_of_it_replays(tiny: tuple[object, ...], tmp_path: Path) -> None:
    words = ("--slow-tier", "pinned", "--throttle", "40MB/s", "--threads", 1, "--record", tmp_path / "real.zarr")
    ran = moereplay("live", *tiny, *words, "--events", tmp_path / "real.parquet")
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "LIVE, measured: tiny, 2 requests, 32 tokens"
    assert lines[1].startswith("experts read from memory, at most 40 MB/s; computed on ")
    assert "platform this machine; contract atomic" in ran.stdout and "SIMULATED" not in ran.stdout
    for heading in ("MEASURED TTFT ms", "MEASURED TPOT ms", "tokens with other logits"):
        assert all(word in ran.stdout for word in heading.split())  # a head of several words may be folded
    assert "in main memory, in addition to it" in ran.stderr
    words = ("--capacity", "40%", "--engine", "reference", "--events", tmp_path / "replayed.parquet")
    assert moereplay("replay", tmp_path / "real.zarr", *words).returncode == 0
    assert decisions(tmp_path / "real.parquet") == decisions(tmp_path / "replayed.parquet")


@pytest.mark.parametrize("error", [OSError(5, "Input/output error", "experts.bin"), KeyboardInterrupt()], ids=type)
def test_a_run_that_ends_in_the_middle_leaves_nothing(
    error: BaseException, tiny: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that fails, and Ctrl-C in the middle of a pass."""
    reads: list[int] = []

    def read(self: Memory, y: int, into: Tensor) -> None:
        reads.append(y)
        if len(reads) == 20 and isinstance(error, OSError):
            raise error
        into[: self.layout.padded(y)] = self._of(y)

    def weights_in(*_: object) -> None:
        raise error

    monkeypatch.setattr(Memory, "read", read)
    if not isinstance(error, OSError):
        monkeypatch.setattr("moereplay.tracegen.live.offloaded.weights_in", weights_in)
    ended = moereplay("live", *tiny, "--slow-tier", "pinned", "--record", tmp_path / "run.zarr")
    code, said = (
        (2, "moereplay: the slow tier failed: experts.bin: Input/output error; the results of this run are discarded")
        if isinstance(error, OSError)
        else (130, "interrupted: nothing was written")
    )
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (code, said)
    assert list(tmp_path.iterdir()) == []
