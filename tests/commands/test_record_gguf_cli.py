"""`moereplay record MODEL.gguf`: options that mean nothing there, and a recording from prompts to replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from moereplay.tracegen.checkpoint import load
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.llama.binding import library_file
from moereplay.traces.store import open_trace
from tests.kit.command import moereplay_here
from tests.kit.gguf_models import characters, write_gguf
from tests.kit.tiny_checkpoints import checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("gguf")
    write_gguf(made / "tiny.gguf", load(str(checkpoint(made / "tiny"))).model, characters())
    (made / "prompts.txt").write_text("def f(x):\nimport os\n")
    return made


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--look-ahead", "2"), "--look-ahead 2"),
        (("--device", "cuda"), "--device cuda"),
        (("--device-map", "auto"), "--device-map"),
        (("--dtype", "bfloat16"), "--dtype bfloat16"),
        (("--quantise", "bnb-4bit"), "--quantise"),
        (("--revision", "main"), "--revision"),
        (("--window", "16"), "--window"),
        (("--llama-lib", "none.so"), "none.so: no such file"),
    ],
)
def test_options_that_mean_nothing_for_a_gguf_are_refused(options, said, folder, tmp_path):
    out = tmp_path / "a.zarr"
    ran = moereplay_here("record", "tiny.gguf", "--prompts", "prompts.txt", "--out", out, *options, cwd=folder)
    assert ran.returncode == 2
    assert said in ran.stderr
    assert not list(tmp_path.iterdir())


def test_options_of_llama_cpp_need_a_gguf(folder, tmp_path):
    option = ("--llama-lib", "a.so")
    ran = moereplay_here("record", "tiny", "--prompts", "prompts.txt", "--out", tmp_path / "a", *option, cwd=folder)
    assert ran.returncode == 2
    assert "--llama-lib requires a GGUF file" in ran.stderr


def test_a_file_that_is_not_there_is_named(folder, tmp_path):
    ran = moereplay_here("record", "no.gguf", "--prompts", "prompts.txt", "--out", tmp_path / "a", cwd=folder)
    assert ran.returncode == 2
    assert "no.gguf: no such file" in ran.stderr


def test_a_gguf_is_recorded_on_prompts_and_on_text(folder, tmp_path):
    try:
        library_file()
    except RecordError as missing:
        pytest.skip(str(missing))
    prompted, read = tmp_path / "a.zarr", tmp_path / "b.zarr"
    words = ("record", "tiny.gguf", "--threads", 1)
    new = ("--max-new-tokens", 5, "--limit", 1)
    ran = moereplay_here(*words, "--prompts", "prompts.txt", *new, "--out", prompted, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    assert "look-ahead" in ran.stderr
    trace = open_trace(prompted)
    assert trace.prompt_lengths.tolist() == [len("def f(x):")]
    assert trace.header.lookahead_depth == 0
    assert trace.header.provenance.model == "tiny"
    (folder / "text.txt").write_text("for each in range(3):" * 3)
    ran = moereplay_here(*words, "--text", "text.txt", "--window", 16, "--no-logits", "--out", read, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    assert open_trace(read).requests == 3
    ran = moereplay_here("replay", prompted, "--capacity", "50%", "--prefetch", "top_k")
    assert ran.returncode == 2
    assert "lookahead" in ran.stderr
