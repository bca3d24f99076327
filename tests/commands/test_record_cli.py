"""`moereplay record` as a user meets it: what it says, what it leaves behind, one line and exit code 2 for mistakes."""

from __future__ import annotations

import gzip
import json
import re
import sys
from itertools import count
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import transformers

from moereplay.commands.terminal import RequestMeter
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.tracegen import folder as folders
from moereplay.tracegen.record import Progress
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace, verify
from tests.kit.command import moereplay_here
from tests.kit.tiny_checkpoints import checkpoint

PROMPTS = [{"q": "def f(x):", "n": 1}, {"q": "Hello", "n": 2}, {"q": "a b c", "n": 3}]


def moe(*arguments: object) -> CompletedProcess[str]:
    """`record` in this process: one of its own would load torch for ten seconds, test by test."""
    return moereplay_here("record", *arguments)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny-olmoe")


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


def refusal(said: CompletedProcess[str]) -> str:
    """The last line of a command that failed as it should: one line, from us."""
    *before, last = said.stderr.splitlines()
    assert said.returncode == 2
    assert not said.stdout
    assert last.startswith("moereplay: ")
    assert all(re.match(r"loading |recording |\d+/\d+ requests, ", line) for line in before)
    return last.removeprefix("moereplay: ")


# What it does


def test_prompts_become_a_trace(tiny, questions, tmp_path):
    out = tmp_path / "a.zarr"
    said = moe(tiny, "--prompts", questions, "--field", "q", "--max-new-tokens", 5, "--out", out)
    assert (said.returncode, said.stdout) == (0, "")
    trace = open_trace(out)
    verify(trace)
    assert trace.prompt_lengths.tolist() == [9, 5, 5]
    assert trace.tokens == 9 + 5 + 5 + 3 * 4
    assert trace.header.lookahead_depth == 2
    lines = said.stderr.splitlines()
    assert lines[0] == f"loading {tiny}"
    assert lines[1].startswith("recording tiny-olmoe (float32, cpu): questions.jsonl: 3 prompts, sha256 ")
    assert lines[1].endswith("; greedy, max_new_tokens=5")
    assert lines[-2] == f"wrote {out}: 3 requests, 31 tokens, digest {trace.digest[:12]}"
    assert lines[-1].startswith("mean nll ")


def test_text_becomes_windows(tiny, tmp_path):
    (tmp_path / "a.txt").write_text("one text\n" * 20)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"another text\n" * 20))
    texts = ("--text", tmp_path / "a.txt", "--text", tmp_path / "b.txt.gz", "--window", 32)
    options = ("--prompt-tokens", 24, "--limit", 7, "--no-logits", "--look-ahead", 1)
    said = moe(tiny, *texts, *options, "--out", tmp_path / "a.zarr")
    assert said.returncode == 0, said.stderr
    trace = open_trace(tmp_path / "a.zarr")
    assert trace.prompt_lengths.tolist() == [24] * 7
    assert trace.tokens == 7 * 32
    assert trace.capabilities == {"ids", "weights", "lookahead"}
    assert "a.txt+b.txt.gz: 7 windows of 32" in trace.header.provenance.prompts


def test_sampling_order_and_limit_follow_the_seed(tiny, questions, tmp_path):
    def made(name: str, seed: int) -> Trace:
        draws = ("--temperature", 1, "--top-k", 20, "--top-p", 0.9, "--seed", seed, "--shuffle", "--limit", 2)
        out = tmp_path / name
        said = moe(
            tiny,
            "--prompts",
            questions,
            "--field",
            "q",
            *draws,
            "--max-new-tokens",
            4,
            "--dtype",
            "bfloat16",
            "--out",
            out,
        )
        assert said.returncode == 0, said.stderr
        return open_trace(out)

    first, again, other = made("a.zarr", 1), made("b.zarr", 1), made("c.zarr", 2)
    assert first.digest == again.digest != other.digest
    assert first.header.provenance.dtype == "bfloat16"


def test_the_miniature_brings_its_own_prompts(tiny, questions, tmp_path, monkeypatch):
    bundled = checkpoint(tmp_path / "miniature")
    (bundled / "prompts.jsonl").write_text('{"prompt": "x = 1"}\n')
    monkeypatch.setattr(folders, "MINIATURE", bundled)
    monkeypatch.setattr("moereplay.commands.record.MINIATURE", bundled)
    said = moe("miniature", "--max-new-tokens", 3, "--out", tmp_path / "a.zarr")
    assert said.returncode == 0, said.stderr
    assert open_trace(tmp_path / "a.zarr").header.provenance.model == "miniature"


def test_a_recorded_trace_replays(tiny, questions, tmp_path):
    """Look-ahead, logits and weights are there for policies that need them; 31 tokens, 3 layers, 4 of 16 experts."""
    out = tmp_path / "a.zarr"
    assert moe(tiny, "--prompts", questions, "--field", "q", "--max-new-tokens", 5, "--out", out).returncode == 0
    config = configure(capacity="25%", prefetch="top_k", eviction="score", routing="cache_prior", passes="token")
    totals = replay(open_trace(out), config).totals
    assert totals["accesses"] == 31 * 3 * 4
    assert 0 < totals["hits"] < totals["accesses"]


# Interrupted


def test_ctrl_c_keeps_what_is_there_and_says_how_to_go_on(tiny, questions, tmp_path, monkeypatch):
    given = (tiny, "--prompts", questions, "--field", "q", "--max-new-tokens", 5)
    assert moe(*given, "--out", tmp_path / "whole.zarr").returncode == 0

    def stop(meter: RequestMeter, at: Progress) -> None:
        if at.done == stop_at:
            raise KeyboardInterrupt

    stop_at = 0
    with monkeypatch.context() as patch:
        patch.setattr(RequestMeter, "update", stop)
        said = moe(*given, "--out", tmp_path / "a.zarr")
        assert (said.returncode, said.stderr.splitlines()[-1]) == (130, "interrupted: nothing was recorded")
        assert not list(tmp_path.glob("a.zarr*"))
    interrupt_in_third_prompt(monkeypatch)
    said = moe(*given, "--out", tmp_path / "a.zarr")
    kept = f"recorded requests are kept in {tmp_path}/a.zarr.partial"
    assert (said.returncode, said.stderr.splitlines()[-1]) == (
        130,
        f"interrupted: {kept}; run the same command with --resume to continue",
    )
    monkeypatch.undo()
    assert "a.zarr.partial exists, an unfinished recording; rerun with --resume" in refusal(
        moe(*given, "--out", tmp_path / "a.zarr")
    )
    said = moe(*given, "--out", tmp_path / "a.zarr", "--resume")
    assert said.returncode == 0, said.stderr
    assert "resuming after 2 of 3 requests" in said.stderr
    assert open_trace(tmp_path / "a.zarr").digest == open_trace(tmp_path / "whole.zarr").digest


def interrupt_in_third_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Ctrl-C were pressed while the model reads it."""
    from moereplay.tracegen import record as recording

    original, calls = recording.continued, iter(range(10))

    def interrupted(*given: Any) -> list[int]:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return original(*given)

    monkeypatch.setattr(recording, "continued", interrupted)


def test_an_error_on_the_way_says_what_is_kept(tiny, questions, tmp_path, monkeypatch):
    from moereplay.tracegen import record as recording

    original, calls = recording.continued, iter(range(10))

    def exhausted(*given: Any) -> list[int]:
        if next(calls) == 1:
            raise MemoryError
        return original(*given)

    monkeypatch.setattr(recording, "continued", exhausted)
    said = moe(tiny, "--prompts", questions, "--field", "q", "--max-new-tokens", 5, "--out", tmp_path / "a.zarr")
    assert refusal(said).startswith("request 1 (5 tokens given) ran out of memory; use --device-map auto")
    assert "a.zarr.partial" in refusal(said) and "--resume" in refusal(said)
    assert open_trace(tmp_path / "a.zarr.partial").requests == 1


# Mistakes


def test_options_that_make_no_sense_together_are_named(tiny, questions, tmp_path):
    out = ("--out", tmp_path / "a.zarr")
    prompts, text = ("--prompts", questions, "--field", "q"), ("--text", questions)
    wrong = [
        ((), "expected exactly one input: pass one of --prompts, --text, --dataset"),
        ((*prompts, *text), "expected exactly one input: pass one of --prompts, --text, --dataset"),
        ((*prompts, "--window", 8), "--window cannot be combined with --prompts"),
        ((*text, "--max-new-tokens", 8), "--max-new-tokens cannot be combined with --text"),
        ((*text, "--chat"), "--chat cannot be combined with --text"),
        ((*text, "--window", 8, "--prompt-tokens", 9), "--prompt-tokens 9 exceeds --window 8"),
        ((*prompts, "--top-k", 5), "--top-p and --top-k require --temperature above 0"),
        ((*prompts, "--temperature", 1, "--top-p", 1.5), "--top-p: expected at most 1 (got 1.5)"),
    ]
    for options, said in wrong:
        assert refusal(moe(tiny, *options, *out)).startswith(said)


def test_what_is_wrong_with_prompts_is_said_before_a_model_is_loaded(questions, tmp_path):
    said = moe(tmp_path / "no-such-model", "--prompts", questions, "--field", "prompt", "--out", tmp_path / "a.zarr")
    assert refusal(said) == f"{questions}, line 1: unknown field 'prompt': it has q, n"


def test_a_taken_path_is_said_before_a_model_is_loaded(questions, tmp_path):
    given = (tmp_path / "no-such-model", "--prompts", questions, "--field", "q", "--out", tmp_path / "a.zarr")
    (tmp_path / "a.zarr.partial").mkdir()
    assert "a.zarr.partial exists, an unfinished recording" in refusal(moe(*given))
    (tmp_path / "a.zarr").mkdir()
    assert refusal(moe(*given, "--resume")) == f"{tmp_path}/a.zarr exists; choose another path or remove it"


def test_a_prompt_that_does_not_fit_is_named_and_can_be_cut(tiny, tmp_path):
    (tmp_path / "a.txt").write_text("short\n" + "x" * 99 + "\n")
    given = (tiny, "--prompts", tmp_path / "a.txt", "--max-new-tokens", 5, "--out", tmp_path / "a.zarr")
    assert refusal(moe(*given)).startswith(
        "prompt 2 has 99 tokens, with 5 new ones more than the model's context of 64; use --truncate"
    )
    assert moe(*given, "--truncate").returncode == 0
    assert open_trace(tmp_path / "a.zarr").prompt_lengths.tolist() == [5, 60]


def test_a_model_without_experts_is_refused(questions, tmp_path):
    dense = checkpoint(tmp_path / "dense")
    (dense / "model.safetensors").unlink()
    small = transformers.LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(small).save_pretrained(dense)
    said = refusal(moe(dense, "--prompts", questions, "--field", "q", "--out", tmp_path / "a.zarr"))
    assert said.startswith("dense: no MoE layers")
    assert said.endswith("nothing was recorded")


def test_without_torch_one_line_says_what_to_install(tiny, questions, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    said = moe(tiny, "--prompts", questions, "--field", "q", "--out", tmp_path / "a.zarr")
    assert refusal(said).startswith("recording needs torch and transformers: pip install -e ")


# Progress


def test_a_terminal_gets_one_line_that_is_rewritten(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    clock = count(step=0.15)  # every other time is too soon
    monkeypatch.setattr("moereplay.commands.terminal.time.monotonic", lambda: next(clock))
    meter = RequestMeter()
    for done in (0, 1, 1, 2):
        meter.update(Progress(done, 4, 0, done * 100, done * 90.0))
    meter.close()
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert [part.strip() for part in shown.split("\r")[1:]] == [
        "1/4 requests, 1 tokens/s, 0:04:30 left",
        "2/4 requests, 1 tokens/s, 0:03:00 left",
    ]


def test_elsewhere_a_line_comes_now_and_then(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 3.0, 5.0, 14.0, 14.0])
    monkeypatch.setattr("moereplay.commands.terminal.time.monotonic", lambda: next(clock))
    meter = RequestMeter()
    for done in (1, 2, 3, 4):
        meter.update(Progress(done, 9, 0, done * 1000, done * 1.0))
    meter.close()
    assert capsys.readouterr().err.splitlines() == [
        "2/9 requests, 1,000 tokens/s, 0:00:07 left",
        "4/9 requests, 1,000 tokens/s, 0:00:05 left",
    ]


def test_the_line_is_cut_to_the_width_of_the_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    meter = RequestMeter()
    meter.update(Progress(1, 4, 0, 100, 90.0))
    meter.close()
    assert capsys.readouterr().err == "\r1/4 requests, 1 tok\n"
