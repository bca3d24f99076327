"""`moereplay traces`: what the verbs print, and how they refuse: one line, exit code 2, nothing half made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moereplay.traces.combine import content_digest
from moereplay.traces.schema import Header
from moereplay.traces.store import open_trace, verify
from moereplay.traces.writer import write_trace
from tests.commands.test_full_disk import limited
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded
from tests.kit.every import every
from tests.kit.stored import PLAIN, ids_only


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Traces `a` and `b` of one model, `other` of another."""
    for name, seed in (("a", 0), ("b", 10)):
        write_trace(tmp_path / f"{name}.zarr", PLAIN, [ids_only(20, seed + at) for at in range(6)])
    geometry = PLAIN.geometry.model_copy(update={"experts": 16})
    write_trace(tmp_path / "other.zarr", Header(geometry=geometry), [ids_only(20)])
    return tmp_path


def test_slices_merge_to_the_whole(folder: Path) -> None:
    for name, requests in (("first", "0:2"), ("rest", "2:")):
        ended = moereplay("traces", "slice", "a.zarr", "--requests", requests, "--out", f"{name}.zarr", cwd=folder)
        assert ended.returncode == 0, ended.stderr
    ended = moereplay("traces", "merge", "first.zarr", "rest.zarr", "--out", "whole.zarr", cwd=folder)
    made = open_trace(folder / "whole.zarr")
    content = content_digest(made)
    assert content == content_digest(open_trace(folder / "a.zarr"))
    assert ended.stderr.splitlines() == [
        f"wrote whole.zarr: 6 requests, 120 tokens, digest {made.digest[:12]}",
        f"content digest {content[:12]} (independent of how the trace was assembled)",
    ]
    assert max(map(len, ended.stderr.splitlines())) <= 80
    ended = moereplay("traces", "append", "first.zarr", "rest.zarr", cwd=folder)
    assert f"digest {made.digest[:12]}" in ended.stderr


def test_samples_are_spaced_or_drawn(folder: Path) -> None:
    for name, more in (("spaced", ()), ("drawn", ("--seed", 0))):
        out = folder / f"{name}.zarr"
        ended = moereplay("traces", "sample", "a.zarr", "--requests", 3, *more, "--out", out, cwd=folder)
        assert ended.returncode == 0, ended.stderr
        assert open_trace(out).requests == 3
    whole, spaced = open_trace(folder / "a.zarr"), open_trace(folder / "spaced.zarr")
    assert (spaced.request(1).chosen == whole.request(2).chosen).all()
    said = open_trace(folder / "drawn.zarr").header.provenance.notes[-1]
    assert said == f"3 requests drawn with seed 0 of {whole.digest}"


OTHER = "other.zarr: geometry.experts is 16, that of a.zarr is 8"
REFUSED = {
    "another model": (
        "merge a.zarr other.zarr --out out.zarr",
        "other.zarr: geometry.experts is 16, that of a.zarr is 8",
    ),
    "append another model": ("append a.zarr other.zarr", "other.zarr: geometry.experts is 16, that of a.zarr is 8"),
    "no such trace": ("merge a.zarr none.zarr --out out.zarr", "none.zarr does not exist"),
    "there already": ("merge a.zarr b.zarr --out a.zarr", "a.zarr exists; choose another path"),
    "beyond": ("slice a.zarr --requests 4:7 --out out.zarr", "the trace has requests 0 to 5"),
    "no numbers": ("slice a.zarr --requests some --out out.zarr", "expected a list of requests"),
    "too many": ("sample a.zarr --requests 7 --out out.zarr", "expected 1 to 6"),
    "inside a source": ("merge a.zarr b.zarr --out a.zarr/x.zarr", "a.zarr is a trace; "),
    "inside another": ("slice a.zarr --requests 0 --out b.zarr/chosen/x.zarr", "b.zarr is a trace"),
    "a library inside": ("publish a.zarr --licence MIT --out b.zarr", "b.zarr is a trace"),
    "fetched inside": ("get miniature --out b.zarr/x.zarr", "b.zarr is a trace"),
    "not resumable": ("append out.zarr a.zarr", "out.zarr does not exist"),
}


@every("case", REFUSED)
def test_what_cannot_be_done_is_said_in_one_line(case: str, folder: Path) -> None:
    words, said = REFUSED[case]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    ended = moereplay("traces", *words.split(), cwd=folder)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert said in ended.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")}.keys() == before.keys()


@pytest.mark.parametrize("words", ["append a.zarr b.zarr", "merge a.zarr b.zarr --out out.zarr"])
def test_a_full_disk_leaves_what_was_there(words: str, folder: Path) -> None:
    before, names = open_trace(folder / "a.zarr").digest, {path.name for path in folder.iterdir()}
    with limited(200):
        ended = moereplay("traces", *words.split(), cwd=folder)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "cannot write" in ended.stderr
    assert {path.name for path in folder.iterdir()} == names
    trace = open_trace(folder / "a.zarr")
    verify(trace)
    assert trace.digest == before
    ended = moereplay("traces", *words.split(), cwd=folder)
    assert ended.returncode == 0, ended.stderr


def test_bytes_of_every_expert_come_from_a_file(tmp_path: Path) -> None:
    rows = [f"0,{token},0,{expert}" for token, expert in enumerate((1, 2, 0, 2))]
    (tmp_path / "rows.csv").write_text("\n".join(["request,token,layer,expert_0", *rows, ""]))
    (tmp_path / "sizes.json").write_text("[[6000000, 2000000, 2000000]]")
    sizes = ("--expert-bytes", "sizes.json", "--out", "a.zarr")
    assert moereplay("import", "rows.csv", *sizes, cwd=tmp_path).returncode == 0
    assert "experts: 2 of 1.907 MiB, 1 of 5.722 MiB; 0.02 GiB in slots" in unfolded(
        moereplay("inspect", "a.zarr", cwd=tmp_path).stdout
    )
    # 8 MB hold expert 0 and one other, or one slot of 6 MB, in which nothing is found again
    for slots, hits in (("exact", 1), ("padded", 0)):
        done = moereplay("replay", "a.zarr", "--capacity", "8MB", "--slots", slots, "--json", cwd=tmp_path)
        assert json.loads(done.stdout)["totals"]["hits"] == hits
    searched = ("recommend", "a.zarr", "--platform", "phone-ufs4", "--memory", "1GB")
    for command in (searched, ("recommend", "a.zarr", "--vram", "8GB"), ("curve", "a.zarr", "--scope", "per_layer")):
        refused = moereplay(*command, cwd=tmp_path)
        assert refused.returncode == 2 and "replay" in refused.stderr
    (tmp_path / "sizes.json").write_text("[6000000, 2000000]")
    refused = moereplay("import", "rows.csv", *sizes, cwd=tmp_path)
    assert "invalid --expert-bytes sizes.json: expected a JSON list of lists" in unfolded(refused.stderr)
