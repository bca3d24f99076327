"""Sweeps into object stores: a folder as obstore sees one, and an S3 server in this process. The same rows as anywhere.

moto answers as S3 does, by its own tests; obstore and moto are optional, and without them there is nothing to run.
"""

import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moereplay.commands.report import plot as plot_verb
from moereplay.commands.sweep import sweep_merge
from moereplay.commands.sweep import sweep_run as sweep_run_verb
from moereplay.commands.sweep_results import sweep_show as sweep_show_verb
from moereplay.results.parts import PROVENANCE, PartError
from moereplay.results.stored import load
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.jit import machine_code
from moereplay.sweeps.jobs import Batch, compute
from moereplay.sweeps.run import left_to_do, planned
from moereplay.sweeps.store import Bucket, Folder, Objects, _translated, place_of
from tests.kit.command import in_python
from tests.kit.every import every
from tests.kit.sweeping import experiment, merged, moereplay, start, store_trace

plot, sweep_run, sweep_show = map(in_python, (plot_verb, sweep_run_verb, sweep_show_verb))

obstore = pytest.importorskip("obstore")
NOBODY = "http://127.0.0.1:9"  #: the port `discard`, where nothing listens
BUCKET = "sweeps"
REFERENCE = "reference"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of an S3 server with one bucket."""
    moto = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request otherwise
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def credentials(monkeypatch, tmp_path) -> None:
    """Set the environment of an S3 user, and a separate cache with the machine code that is there."""
    kept = machine_code.folder()
    shutil.copytree(kept, tmp_path / "cache" / "moereplay" / kept.name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")


@pytest.fixture
def s3(server, credentials, monkeypatch, tmp_path) -> str:
    """A URL in the server's bucket, where nothing is yet."""
    boto3 = pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    client = boto3.client("s3", endpoint_url=server)
    client.create_bucket(Bucket=BUCKET)
    client.close()
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def files(credentials, tmp_path) -> str:
    """A URL of a folder, where nothing is yet."""
    (tmp_path / "bucket").mkdir()
    return (tmp_path / "bucket").as_uri()


@pytest.fixture(params=["files", "s3"])
def url(request) -> str:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An experiment, and in `out` what a sweep to a folder makes of it."""
    folder = tmp_path_factory.mktemp("bucket")
    sweep_run(experiment(folder), str(folder / "out"), workers=1, engine=REFERENCE)
    return folder


@pytest.fixture
def filled(url, folder) -> str:
    """A URL that has the parts of the folder."""
    for name, documents in documents_of(folder / "out").items():
        for file, data in documents.items():
            Objects(url).put(f"{name}/{file}", data)
    return url


def documents_of(out: Path) -> dict[str, dict[str, bytes]]:
    return {part.name: {file.name: file.read_bytes() for file in part.iterdir()} for part in out.glob("part-*")}


def remove(url: str, *names: str) -> None:
    """Objects go, as a user removes them."""
    for name in names:
        obstore.delete(obstore.store.from_url(url), name)


@pytest.mark.slow
def test_a_sweep_to_a_store_is_the_sweep_to_a_folder(url, folder, tmp_path, capsys):
    for index in ("1/2", "2/2"):
        sweep_run(folder / "experiment.toml", url, workers=1, engine=REFERENCE, shard=index)
    assert merged(tmp_path / "a", url) == merged(tmp_path / "b", folder / "out")
    capsys.readouterr()
    sweep_run(folder / "experiment.toml", url, workers=1)
    assert "21 already stored" in capsys.readouterr().err


def test_to_resume_no_table_is_read(filled, folder, capsys):
    tables = [name for name in Objects(filled).names() if name.endswith(".parquet")]
    assert len(tables) > 3
    for name in tables:
        Objects(filled).put(name, b"nobody reads this")
    sweep_run(folder / "experiment.toml", filled, workers=1)
    assert "21 already stored" in capsys.readouterr().err


@pytest.mark.slow
def test_a_part_without_provenance_is_not_there_and_is_made_again(filled, folder, tmp_path, capsys):
    """As writers killed before their last object, or before one of the tables, leave it."""
    first, second, *rest = place_of(filled).names()
    tables = [name for name in Objects(filled).names() if name.startswith(second) and name.endswith(".parquet")]
    remove(filled, f"{first}/{PROVENANCE}", f"{second}/{PROVENANCE}", tables[0])
    assert place_of(filled).names() == rest
    assert Folder(place_of(filled).local()).names() == rest
    sweep_run(folder / "experiment.toml", filled, workers=1, engine=REFERENCE)
    assert "already stored" in capsys.readouterr().err
    assert merged(tmp_path / "a", filled) == merged(tmp_path / "b", folder / "out")


def test_equal_work_is_stored_under_one_name_whoever_does_it(url, folder):
    sweep = planned(folder / "experiment.toml")
    part = compute(Batch(0, tuple(sweep.jobs[:3]), REFERENCE, False)).part
    for host in ("one", "another"):
        place_of(url).store(part, {"sweep_version": 1, "host": host})
    assert place_of(url).names() == [part.name]
    assert len(Objects(url).names()) == len(part.files) + 1
    other = compute(Batch(0, tuple(sweep.jobs[:3]), REFERENCE, True)).part
    assert other.name != part.name


@pytest.mark.long
def test_kills_lose_nothing_that_is_stored(s3, tmp_path):
    """kill -9 of the driver while it sweeps into S3; workers end by themselves."""
    store_trace(tmp_path / "tiny.zarr", prompt_tokens=20, decode_tokens=40)  # long enough to be caught at work
    file = experiment(tmp_path)
    process = start("sweep", "run", file, "--out", s3, "--workers", 2, "--engine", REFERENCE)
    deadline = time.monotonic() + 60
    while not place_of(s3).names() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = place_of(s3).names()
    assert before
    sweep_run(file, s3, workers=1, engine=REFERENCE)
    assert set(before) < set(place_of(s3).names())
    sweep_run(file, str(tmp_path / "out"), workers=1, engine=REFERENCE)
    assert merged(tmp_path / "a", s3) == merged(tmp_path / "b", tmp_path / "out")


@pytest.mark.slow
def test_a_part_that_cannot_be_stored_costs_no_other(files, folder, tmp_path):
    """A folder lies where a table of the first part belongs: the part stays half, the others get whole."""
    longest = max(planned(folder / "experiment.toml").jobs, key=lambda job: job.work)
    first = compute(Batch(0, (longest,), REFERENCE, True)).part
    (tmp_path / "bucket" / first.name / "layers.parquet" / "full").mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"cannot store {files}/{first.name}/layers.parquet: .*; check the address"):
        sweep_run(folder / "experiment.toml", files, workers=2, engine=REFERENCE)
    assert f"{first.name}/configurations.parquet" in Objects(files).names()
    assert first.name not in place_of(files).names() != []
    shutil.rmtree(tmp_path / "bucket" / first.name / "layers.parquet")
    sweep_run(folder / "experiment.toml", files, workers=1, engine=REFERENCE)
    assert merged(tmp_path / "a", files) == merged(tmp_path / "b", folder / "out")


@pytest.mark.slow
def test_show_merge_and_plot_take_the_url(filled, folder, tmp_path, monkeypatch, capsys):
    sweep_show(str(folder / "out"), as_csv=True)
    expected = capsys.readouterr().out
    sweep_show(filled, as_csv=True)
    assert capsys.readouterr().out == expected
    Objects(filled).put("merged/notes.txt", b"so that the folder is there, where it is one")
    sweep_merge([filled], f"{filled}/merged")
    assert f"wrote {filled}/merged/part-" in capsys.readouterr().err
    assert merged(tmp_path / "a", f"{filled}/merged") == merged(tmp_path / "b", folder / "out")
    with pytest.raises(ConfigError, match="merged holds results already; merge into a new folder"):
        sweep_merge([filled], f"{filled}/merged")
    monkeypatch.chdir(tmp_path)
    plot(filled, figure="misses")
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"misses.png", "misses.svg", "misses.csv"}


def test_a_part_is_fetched_once_and_what_is_there_is_asked_every_time(filled):
    first, *rest = place_of(filled).names()
    assert len(load(place_of(filled).local())) == 18
    tables = [name for name in Objects(filled).names() if name.endswith(".parquet")]
    remove(filled, *tables)  # they are not needed again
    assert len(load(place_of(filled).local())) == 18
    remove(filled, f"{first}/{PROVENANCE}")
    assert Folder(place_of(filled).local()).names() == rest


def test_a_flipped_bit_is_noticed_when_it_is_fetched(filled):
    name = next(name for name in Objects(filled).names() if name.endswith("configurations.parquet"))
    data = bytearray(Objects(filled).get(name))
    data[len(data) // 2] ^= 4
    Objects(filled).put(name, bytes(data))
    with pytest.raises(PartError, match=rf"{filled}/{name} is damaged; remove {filled}/part-\w+ and replay again"):
        place_of(filled).local()


def test_files_of_a_part_are_those_that_it_lists(filled, folder):
    """To resume as to read: what the store lists is held against what the provenance does."""
    sweep = planned(folder / "experiment.toml")
    layers = next(name for name in Objects(filled).names() if name.endswith("/layers.parquet"))
    first = layers.partition("/")[0]  # a part of bounds alone has none
    Objects(filled).put(f"{first}/more.parquet", b"")
    for read in (lambda place: place.local(), lambda place: left_to_do(sweep, place, sweep.jobs)):
        with pytest.raises(PartError, match=rf"{filled}/{first}/more.parquet is not listed in the part's provenance"):
            read(place_of(filled))
    remove(filled, f"{first}/more.parquet", layers)
    for read in (lambda place: place.local(), lambda place: left_to_do(sweep, place, sweep.jobs)):
        with pytest.raises(PartError, match=rf"{filled}/{layers} is missing .*; remove {filled}/{first}"):
            read(place_of(filled))


@every("text", ['{"holds": {}, "sha256": {"../x.parquet": ""}}', "[]", "{", '{"holds": []}'])
def test_what_is_no_part_is_named(text, files):
    Objects(files).put(f"part-0/{PROVENANCE}", text.encode())
    for read in (lambda place: place.local(), lambda place: list(place.provenances())):
        with pytest.raises(PartError, match=f"invalid part {files}/part-0"):
            read(place_of(files))


def test_other_objects_below_the_url_are_let_alone(filled, folder, tmp_path):
    for name in ("notes.txt", "part-notes.txt", "old/part-1/provenance.json", "figures/misses.png"):
        Objects(filled).put(name, b"of somebody")
    assert merged(tmp_path / "a", filled) == merged(tmp_path / "b", folder / "out")


REFUSALS = {
    "bucket": ("s3://nope/x", {}, r"cannot fetch s3://nope/x: .*404 Not Found \(NoSuchBucket\); make that bucket"),
    "endpoint": ("s3://sweeps/x", {"AWS_ENDPOINT_URL": NOBODY}, r"cannot fetch s3://sweeps/x: .*; check the address"),
    "credentials": (
        "s3://sweeps/y",
        {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_METADATA_ENDPOINT": NOBODY},
        r"cannot fetch s3://sweeps/y: .*; set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    ),
    "half of the credentials": (
        "s3://sweeps/z",
        {"AWS_SECRET_ACCESS_KEY": ""},
        r"cannot fetch s3://sweeps/z: .*Missing SecretAccessKey; set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and",
    ),
    "account": ("az://box/x", {}, r"cannot fetch az://box/x: .*; set AZURE_STORAGE_ACCOUNT_NAME and"),
    "folder": ("file:///nope/x", {}, r"cannot fetch file:///nope/x: .*; make that bucket or folder first"),
    "scheme": ("ftp://host/x", {}, r"cannot fetch ftp://host/x: .*Unable to recognise URL.*; check the address"),
    "memory": ("memory:///x", {}, r"memory:///x"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_store_that_cannot_be_reached_is_told_in_one_line(name, s3, folder, monkeypatch):
    url, environment, said = REFUSALS[name]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value) if value else monkeypatch.delenv(variable)
    for read in (lambda place: place.names(), lambda place: place.local()):
        with pytest.raises(ConfigError, match=said) as refused:
            read(place_of(url))
        assert "\n" not in str(refused.value)


def test_a_wrong_bucket_is_exit_code_two_for_every_verb(s3, folder):
    wrong = "s3://nope/x"
    run, merge = ("sweep", "run", folder / "experiment.toml", "--out", wrong), ("sweep", "merge", wrong, "--out", s3)
    for command in (run, merge, ("sweep", "show", wrong), ("plot", wrong)):
        code, out, said = moereplay(*command)
        assert (code, out) == (2, "")
        assert "Traceback" not in said
        assert "cannot fetch s3://nope/x: " in said.strip().splitlines()[-1]
    assert Bucket(Objects(s3)).names() == []


def test_a_store_that_cannot_be_reached_is_named_without_its_password():
    with (
        pytest.raises(ConfigError, match=r"^cannot fetch http://\*\*\*@127\.0\.0\.1:1/runs: ") as refused,
        _translated("fetch", "http://user:secret@127.0.0.1:1/runs"),
    ):
        raise OSError("Error performing GET http://user:secret@127.0.0.1:1/runs")
    assert "secret" not in str(refused.value)
    assert str(Bucket(Objects("s3://user:secret@bucket/runs"))) == "s3://***@bucket/runs"


def test_a_search_wants_a_folder_for_its_journal(folder):
    code, _, said = moereplay("tune", folder / "experiment.toml", "--out", "s3://bucket/x")
    assert code == 2
    assert "--out s3://bucket/x: expected a folder, for the journal of the search" in said
    assert not Path("s3:").exists()
