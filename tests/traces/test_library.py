"""Libraries of traces: published, listed and fetched, from a folder and from a stand-in for the hub."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moereplay.sweeps.clusters import pack
from moereplay.traces.files import bundled, write_whole
from moereplay.traces.library import fetch, library_of, publish
from moereplay.traces.schema import TraceError
from moereplay.traces.store import open_trace, verify
from moereplay.traces.stored import Column
from tests.kit.collecting import case
from tests.kit.command import moereplay_here as moereplay
from tests.kit.hub import IDENTITY, hub_of

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = bundled(Path("miniature"))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With one trace, the bundled recording."""
    out = tmp_path_factory.mktemp("published") / "lib"
    publish(open_trace(SAMPLE), out, "mini", "Apache-2.0", "recorded | here <b>")
    return out


@pytest.fixture
def library(published: Path, tmp_path: Path) -> Path:
    """A copy of its own."""
    return Path(shutil.copytree(published, tmp_path / "lib"))


# ---------------------------------------------------------------- published, listed, fetched


def test_what_is_fetched_is_what_was_published_without_the_prompts(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moereplay.traces.library.BLOCK", 1000)  # many files have more than one block
    trace, original = fetch(library_of(str(library)), "mini", tmp_path / "a.zarr"), open_trace(SAMPLE)
    verify(trace)
    assert set(original.arrays) - set(trace.arrays) == {"token_ids"}
    for name in trace.arrays:
        np.testing.assert_array_equal(trace.read(name), original.read(name))
    assert trace.request_offsets.tolist() == original.request_offsets.tolist()
    assert trace.header == original.header


def test_the_hash_of_the_prompts_is_that_of_their_token_ids(library: Path) -> None:
    import hashlib

    trace, spelled = open_trace(SAMPLE), b""
    for at in range(trace.requests):
        request = trace.request(at)
        assert request.token_ids is not None
        prompt = request.token_ids[: request.prompt_length]
        spelled += len(prompt).to_bytes(8, "little") + b"".join(int(token).to_bytes(4, "little") for token in prompt)
    (entry,) = library_of(str(library)).index().traces
    assert entry.prompts_sha256 == hashlib.sha256(spelled).hexdigest()


def test_the_list_has_the_documented_fields() -> None:
    for where in ([], [str(SAMPLE.parent)]):
        (entry,) = json.loads(moereplay("traces", "list", *where, "--json").stdout)
        assert list(entry) == [
            *("name", "model", "licence", "requests", "tokens", "bytes", "capabilities", "digest", "source")
        ]
        assert (entry["name"], entry["requests"], entry["licence"]) == ("miniature", 6, "" if where else "Apache-2.0")
        assert entry["digest"] == open_trace(SAMPLE).digest


def test_the_card_has_the_licence_and_no_markup_of_others(library: Path) -> None:
    card = (library / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "recorded \\| here &lt;b>" in card
    assert all(len(line.split(" | ")) == 9 for line in card.splitlines() if line.startswith("| "))


def test_a_second_trace_of_another_licence_joins_the_first(library: Path, tmp_path: Path) -> None:
    ended = moereplay(
        "traces", "publish", str(SAMPLE), "--licence", "cc-by-4.0", "--out", str(library), "--name", "two"
    )
    assert ended.returncode == 0, ended.stderr
    assert [entry.licence for entry in library_of(str(library)).index().traces] == ["Apache-2.0", "CC-BY-4.0"]
    assert (library / "README.md").read_text().startswith("---\nlicense: other\n")
    assert moereplay("traces", "get", "two", "--from", str(library), cwd=tmp_path).returncode == 0
    assert (tmp_path / "two.zarr").is_dir()


def test_the_same_trace_is_published_as_the_same_bytes(library: Path, tmp_path: Path) -> None:
    publish(open_trace(SAMPLE), tmp_path / "again", "mini", "Apache-2.0", "recorded | here <b>")
    for file in sorted(library.rglob("*")):
        if file.is_file():
            assert file.read_bytes() == (tmp_path / "again" / file.relative_to(library)).read_bytes(), file


# ---------------------------------------------------------------- the hub


#: The hub's package reads its settings as it is imported: a process per address, however many commands.
COMMANDS = """
import json, sys
from tests.kit.command import moereplay_here
ended = [moereplay_here("traces", *words) for words in json.loads(sys.argv[1])]
print(json.dumps([[each.returncode, each.stdout, each.stderr] for each in ended]))
"""


def hub(*commands: list[str], at: str, folder: Path) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each command, for which the hub is at an address."""
    said = {"HF_ENDPOINT": at, "HF_HOME": str(folder / "hf"), "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    ended = subprocess.run(command, env=os.environ | said, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout)


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_a_library(library: Path, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    with hub_of(library) as at:
        (code, listed, said), got, (other, _, unknown) = hub(
            ["list", IDENTITY, "--json"],
            ["get", "mini", "--from", f"hf://datasets/{IDENTITY}"],
            ["list", "nobody/nothing"],
            at=at,
            folder=tmp_path,
        )
    assert (code, said) == (0, "") and got[0] == 0, got
    assert json.loads(listed)[0]["digest"] == open_trace(tmp_path / "mini.zarr").digest
    assert (other, unknown.count("\n")) == (2, 1)
    assert "nobody/nothing is neither a folder nor a (public) data set" in unknown
    ((away, _, said),) = hub(["list", "else/where"], at="http://127.0.0.1:9", folder=tmp_path)
    assert (away, said.count("\n")) == (2, 1)
    assert "the Hugging Face hub cannot be reached" in said


# ---------------------------------------------------------------- refused


def test_what_cannot_be_done_is_one_line(library: Path, tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "my trace.zarr").symlink_to(SAMPLE)
    before = sorted(tmp_path.rglob("*"))
    for words, said in [
        (["list", "no/such/place"], "unknown library no/such/place: expected a folder"),
        (["list", "{odd}"], "invalid name 'my trace'"),
        (["get", "minis", "--from", "{lib}"], "has no trace 'minis': did you mean mini?"),
        (["get", "mini", "--from", "{lib}", "--out", "x"], "does not end in .zarr"),
        (["get", "mini", "--from", "{lib}", "--out", "{lib}/mini.zarr"], "exists; choose another"),
        (["publish", "miniature", "--licence", "mine", "--out", "{lib}"], "invalid --licence 'mine'"),
        (["publish", "miniature", "--licence", "MIT", "--out", "{lib}", "--name", "mini"], "has a trace mini already"),
        (["publish", "miniature", "--licence", "MIT", "--out", "{lib}", "--name", "../x"], "invalid name '../x'"),
        (["publish", "miniature", "--licence", "MIT", "--out", "/dev/null/x"], "cannot write /dev/null/x"),
    ]:
        ended = moereplay("traces", *(word.format(lib=library, odd=tmp_path / "odd") for word in words), cwd=tmp_path)
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
        assert said in ended.stderr
        assert sorted(tmp_path.rglob("*")) == before


def test_an_edited_index_is_refused_and_leaves_nothing(library: Path, tmp_path: Path) -> None:
    index = json.loads((library / "traces.json").read_text())
    (entry,) = index["traces"]
    first, *rest = entry["files"]
    edited: dict[str, dict[str, object]] = {
        "above": {"files": [first | {"path": "../../etc/passwd"}, *rest]},
        "inside": {"files": [first | {"path": "mini.zarr/../../../etc/passwd"}, *rest]},
        "absolute": {"files": [first | {"path": "/etc/passwd"}, *rest]},
        "sha": {"files": [first | {"sha256": "0" * 64}, *rest]},
        "size": {"files": [first | {"bytes": 1}, *rest]},
        "missing": {"files": [first | {"path": "mini.zarr/nothing"}, *rest]},
        "fewer": {"files": rest},
        "name": {"name": "../up"},
        "digest": {"digest": "f" * 64},
    }
    wrong = {how: index | {"traces": [entry | change]} for how, change in edited.items()}
    for how, document in {**wrong, "unknown": index | {"more": 1}}.items():
        (library / "traces.json").write_text(json.dumps(document))
        if how in ("above", "inside", "absolute", "size", "name", "unknown"):  # before any file is read
            with case(how), pytest.raises(TraceError, match=r"traces\.json"):
                library_of(str(library)).index()
        ended = moereplay("traces", "get", "mini", "--from", str(library), cwd=tmp_path)
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), (how, ended.stderr)
        assert [path.name for path in tmp_path.iterdir()] == ["lib"], how


def test_a_broken_index_is_refused(tmp_path: Path) -> None:
    for text in [b"", b"{", b"[]", b"\xff\xfe", b'{"traces": 3}', b"[" * 100_000, b'{"version": 2}']:
        with case(text):
            (tmp_path / "traces.json").write_bytes(text)
            with pytest.raises(TraceError, match=r"traces\.json"):
                library_of(str(tmp_path)).index()


def test_an_index_that_describes_another_trace_is_refused(library: Path, tmp_path: Path) -> None:
    file = library / "traces.json"
    index = json.loads(file.read_text())
    (entry,) = index["traces"]
    for what, wrong in {"tokens": 7, "requests": 7, "model": "another", "capabilities": ["ids", "magic"]}.items():
        file.write_text(json.dumps(index | {"traces": [entry | {what: wrong}]}))
        with case(what), pytest.raises(TraceError, match=rf"mini: {what} is .* in the index"):
            fetch(library_of(str(library)), "mini", tmp_path / "a.zarr")
    file.write_text(json.dumps(index | {"traces": [entry | {"bytes": 1}]}))
    with pytest.raises(TraceError, match="bytes is 1, but its files have"):
        library_of(str(library)).index()


def test_only_files_of_the_trace_are_copied_from_a_folder_without_an_index(tmp_path: Path) -> None:
    """Links there lead to files of the user, devices have no end."""
    trace, secret = shutil.copytree(SAMPLE, tmp_path / "lib" / "x.zarr"), tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("mine")
    (trace / "leak").symlink_to(secret / "key")
    (trace / "folder").symlink_to(secret)
    (trace / "zero").symlink_to("/dev/zero")
    os.mkfifo(trace / "chosen" / "pipe")
    (trace / "chosen" / "README").write_text("more")
    fetched = fetch(library_of(str(tmp_path / "lib")), "x", tmp_path / "a.zarr")
    verify(fetched)
    copied = {path.relative_to(tmp_path / "a.zarr") for path in (tmp_path / "a.zarr").rglob("*")}
    assert copied == {path.relative_to(SAMPLE) for path in SAMPLE.rglob("*")}


@pytest.mark.parametrize("place", ["chosen/c.0.0.0", "nll/zarr.json", "lookahead/1"])
def test_a_link_in_place_of_a_file_of_the_trace_is_refused_and_not_followed(place: str, tmp_path: Path) -> None:
    trace = shutil.copytree(SAMPLE, tmp_path / "lib" / "x.zarr")
    (trace / place).rename(tmp_path / "elsewhere")
    (trace / place).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TraceError, match=f"{place} is a link"):
        fetch(library_of(str(tmp_path / "lib")), "x", tmp_path / "a.zarr")
    with pytest.raises(TraceError, match=f"{place} is a link"):
        pack(trace)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "lib"]


# ---------------------------------------------------------------- killed


def _publish(out: Path, name: str) -> None:
    publish(open_trace(SAMPLE), out, name, "MIT")


@pytest.mark.parametrize("step", ["rows", "index", "card"])
def test_a_publication_that_a_full_disk_ended_is_completed_by_the_same_call(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        if path.name == {"index": "traces.json", "card": "README.md"}[step]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_whole(path, data)

    def refuses(column: Column) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        if step == "rows":
            patched.setattr(Column, "write", refuses)
        else:
            patched.setattr("moereplay.traces.library.write_whole", full)
        with pytest.raises(TraceError, match="No space left on device") as refused:
            _publish(tmp_path / "lib", "x")
    assert "--resume" not in str(refused.value)
    if step == "rows":
        assert not (tmp_path / "lib").exists()
    _publish(tmp_path / "lib", "x")
    fetch(library_of(str(tmp_path / "lib")), "x", tmp_path / "a.zarr")
    assert "| x |" in (tmp_path / "lib" / "README.md").read_text()


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_of_what_a_verb_has_created(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file may grow beyond 100 bytes."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would keep 100 bytes of a module for later tests
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for words in (
        ["traces", "publish", SAMPLE, "--licence", "MIT", "--out", "new/lib"],
        ["traces", "get", "mini", "--from", library, "--out", "new/g.zarr"],
        ["split", SAMPLE, "--out", "new/parts"],
        ["replay", SAMPLE, "--engine", "reference", "--capacity", "10%,20%", "--workers", "1", "--out", "new/out"],
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            ended = moereplay(*words, cwd=tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended
        assert not (tmp_path / "new").exists(), words
