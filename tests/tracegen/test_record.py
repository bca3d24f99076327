"""Recording: rows are the tokens that went through, the model is left alone, and nothing recorded is ever lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from zarr.storage import LocalStore

from moereplay.tracegen import record as recording
from moereplay.tracegen.checkpoint import Loaded, load
from moereplay.tracegen.decoding import Decoding, Stepper, Surprise, continued, nll, seed_of
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.folder import MINIATURE
from moereplay.tracegen.plan import Plan, refuse_taken
from moereplay.tracegen.prompts import Prompts, read_prompts
from moereplay.tracegen.record import Progress, record, room_of
from moereplay.tracegen.tokens import Work, encode
from moereplay.traces.schema import Geometry, Header, Trace, TraceError
from moereplay.traces.store import open_trace, verify
from moereplay.traces.writer import TraceWriter
from tests.kit.command import moereplay_here as moereplay
from tests.kit.every import every
from tests.kit.tiny_checkpoints import checkpoint

TEXTS = ("def f(x):", "Hello", "a", "import os\nimport sys\n", "for each in range(3):")
GREEDY, SAMPLED = Decoding(max_new_tokens=9), Decoding(max_new_tokens=9, temperature=1.3, top_p=0.95, top_k=40)
#: A softmax router, one with a correction bias and groups, one with a bias and sinks.
FAMILIES = ("olmoe", "deepseek_v3", "gpt_oss")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny-olmoe")


@pytest.fixture(scope="module")
def loaded(folder) -> Loaded:
    """Tests leave it as it is."""
    return load(str(folder))


def prompts_of(loaded: Loaded, texts: tuple[str, ...] = TEXTS) -> Work:
    return encode(Prompts("texts", texts), loaded.tokenizer, room_of(loaded), GREEDY.max_new_tokens)


def read_work(*lengths: int) -> Work:
    draw = np.random.Generator(np.random.PCG64(5))
    return Work(tuple(draw.integers(0, 96, length).astype(np.int32) for length in lengths), "drawn")


def plainly(model: Any, ids: np.ndarray, new: int) -> Any:
    """transformers' own generate(), greedy, with everything it can tell."""
    given = torch.tensor(ids[None].astype(np.int64))
    asked = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new, pad_token_id=0, **asked)


# Rows


@pytest.mark.slow
@every("family", FAMILIES, apart=True)
def test_rows_are_the_tokens_that_went_through_the_model(family, tmp_path):
    loaded = load(str(checkpoint(tmp_path / family, family)))
    work = prompts_of(loaded, TEXTS[:3])
    trace = record(loaded, work, tmp_path / "a.zarr", Plan(decoding=GREEDY))
    assert trace.prompt_lengths.tolist() == [len(ids) for ids in work.sequences]
    for number, ids in enumerate(work.sequences):
        everything = plainly(loaded.model, ids, 9).sequences[0].numpy()
        request = trace.request(number)
        assert request.token_ids is not None
        assert request.token_ids.tolist() == everything[:-1].tolist()  # P + N - 1: the last new token is not run
        assert len(request.chosen) == len(ids) + 9 - 1


@pytest.mark.slow
@every("dtype, family", product([torch.float32, torch.bfloat16], FAMILIES), apart=True)
def test_generate_sees_the_same_bits_recorded_or_not(family, dtype, tmp_path):
    """The logits that every token is chosen from, the first after the prompt included."""
    loaded = load(str(checkpoint(tmp_path / family, family, dtype)))
    (ids,) = prompts_of(loaded, TEXTS[3:4]).sequences
    expected = torch.cat(plainly(loaded.model, ids, 9).logits)
    seen: list[torch.Tensor] = []
    with loaded.model.register_forward_hook(lambda model, args, out: seen.append(out.logits[0, -1:].float().clone())):
        record(loaded, Work((ids,), "one"), tmp_path / "a.zarr", Plan(decoding=GREEDY))
    assert torch.equal(torch.cat(seen[-9:]), expected)  # before them, the probes of the self-check


def test_the_gates_rows_are_the_models_own(loaded, tmp_path):
    """transformers' output_router_logits is another way to the same numbers; a text in one pass, bit for bit."""
    work = read_work(20, 7)
    trace = record(loaded, work, tmp_path / "a.zarr", Plan())
    for number, ids in enumerate(work.sequences):
        with torch.inference_mode():
            out = loaded.model(torch.tensor(ids[None].astype(np.int64)), output_router_logits=True)
        expected = torch.stack(out.router_logits, dim=1).numpy()
        logits, request = expected.reshape(len(ids), 3, 16), trace.request(number)
        assert request.logits is not None
        assert np.array_equal(request.logits, logits)
        assert np.array_equal(np.sort(request.chosen), np.sort(logits.argsort(-1)[..., -4:]))


@pytest.mark.slow
def test_token_ids_are_recorded_as_the_text_that_has_them(tmp_path):
    """The bundled model on its first prompt, and on the ids that its tokenizer gives for it."""
    (text,) = read_prompts([MINIATURE / "prompts.jsonl"]).chosen(limit=1).texts
    ids = AutoTokenizer.from_pretrained(MINIATURE)(text)["input_ids"]
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": ids, "attention_mask": [1] * len(ids)}))
    given = {"text": ("--limit", 1), "ids": ("--prompts", tmp_path / "ids.jsonl", "--field", "input_ids")}
    for name, words in given.items():
        ended = moereplay("record", "miniature", *words, "--max-new-tokens", 3, "--out", tmp_path / f"{name}.zarr")
        assert ended.returncode == 0, ended.stderr
    of_text, of_ids = (open_trace(tmp_path / f"{name}.zarr") for name in given)
    assert of_ids.header.provenance.prompts.startswith("ids.jsonl: 1 prompt of token ids, sha256")
    assert of_ids.tokens == len(ids) + 2 and set(of_ids.arrays) == set(of_text.arrays) > {"token_ids", "logits"}
    for name in of_text.arrays:
        assert np.array_equal(of_text.read(name, 0, of_ids.tokens), of_ids.read(name, 0, of_ids.tokens)), name


def test_text_can_be_read_in_one_pass_or_token_by_token(loaded, tmp_path):
    work = read_work(20, 5)
    at_once = record(loaded, work, tmp_path / "a.zarr", Plan())
    stepwise = record(loaded, work, tmp_path / "b.zarr", Plan(prompt_tokens=8))
    assert at_once.prompt_lengths.tolist() == [20, 5]
    assert stepwise.prompt_lengths.tolist() == [8, 5]
    assert np.array_equal(at_once.read("token_ids"), np.concatenate(work.sequences))
    for name in ("token_ids", "chosen"):
        assert np.array_equal(at_once.read(name), stepwise.read(name))
    for name in ("nll", "logits", "lookahead/1", "lookahead/2"):
        np.testing.assert_allclose(at_once.read(name), stepwise.read(name), atol=2e-5)
    assert stepwise.header.provenance.decoding.endswith("the first 8 in one pass, the rest one by one")


def test_the_end_token_ends_a_request_and_is_not_run(folder, tmp_path):
    loaded = load(str(folder))
    (ids,) = prompts_of(loaded, TEXTS[:1]).sequences
    said = plainly(loaded.model, ids, 9).sequences[0, len(ids) :].tolist()
    loaded.model.generation_config.eos_token_id = said[3]
    kept = said.index(said[3])
    request = record(loaded, Work((ids,), "one"), tmp_path / "a.zarr", Plan(decoding=GREEDY)).request(0)
    assert request.token_ids is not None
    assert request.token_ids.tolist() == [*ids.tolist(), *said[:kept]]


def test_a_checkpoints_own_taste_is_not_used(folder):
    loaded = load(str(folder))
    ids = prompts_of(loaded, TEXTS[:1]).sequences[0].tolist()
    expected = continued(loaded.model, ids, GREEDY, 0)
    theirs = loaded.model.generation_config
    theirs.update(do_sample=True, temperature=3.0, repetition_penalty=9.0, suppress_tokens=expected, min_new_tokens=2)
    assert continued(loaded.model, ids, GREEDY, 0) == expected
    assert loaded.model.generation_config is theirs


def test_logits_may_be_left_out_and_look_ahead_too(loaded, tmp_path):
    trace = record(loaded, read_work(6), tmp_path / "a.zarr", Plan(look_ahead=0, logits=False))
    assert trace.arrays.keys() == {"chosen", "weights", "token_ids", "nll"}
    assert trace.capabilities == {"ids", "weights"}


# Negative log-likelihood


@given(rows=st.integers(1, 600), seed=st.integers(0, 9))
def test_nll_is_minus_log_softmax(rows, seed):
    draw = np.random.Generator(np.random.PCG64(seed))
    logits, targets = draw.normal(0, 4, (rows, 7)), draw.integers(0, 7, rows)
    highest = logits.max(-1, keepdims=True)
    expected = (np.log(np.exp(logits - highest).sum(-1)) + highest[:, 0]) - logits[np.arange(rows), targets]
    found = nll(torch.tensor(logits, dtype=torch.float32), torch.tensor(targets))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


@every("decoding", [None, GREEDY, SAMPLED], apart=True)
def test_every_token_has_the_nll_of_a_whole_pass_over_its_request(loaded, tmp_path, decoding):
    work = prompts_of(loaded) if decoding else read_work(9, 1, 12)
    trace = record(loaded, work, tmp_path / "a.zarr", Plan(decoding=decoding, prompt_tokens=None if decoding else 4))
    for number in range(trace.requests):
        request = trace.request(number)
        assert request.token_ids is not None
        assert request.nll is not None
        logits = Stepper(loaded.model).prefill(request.token_ids.tolist())
        expected = torch.log_softmax(logits.double(), -1)[:-1].gather(
            1, torch.tensor(request.token_ids[1:, None]).long()
        )
        assert request.nll[0] == 0
        np.testing.assert_allclose(request.nll[1:], -expected[:, 0].numpy(), atol=1e-4)


def test_sequences_do_not_predict_each_other(loaded):
    stepper = Stepper(loaded.model)
    with Surprise(loaded.model) as surprise:
        stepper.prefill([5, 6, 7])
        first = surprise.take()
        stepper.prefill([5, 6, 7])
        assert np.array_equal(surprise.take(), first)


# The same bytes again


def interrupted(out: Path, at: int, error: type[BaseException], run: Callable[..., Trace]) -> int:
    """Record until the `at`-th request is done, then fail; returns how many requests are kept."""

    def stop(progress: Progress) -> None:
        if progress.done == at:
            raise error

    with pytest.raises(error):
        run(out, progress=stop)
    partial = out.with_name(f"{out.name}.partial")
    return open_trace(partial).requests if partial.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("decoding", [GREEDY, SAMPLED])
def test_a_resumed_recording_is_the_undisturbed_one(loaded, tmp_path, decoding, monkeypatch):
    """Sampling included: every request has its own seed."""
    work = prompts_of(loaded)

    def run(out: Path, **more: Any) -> Trace:
        return record(loaded, work, out, Plan(decoding=decoding, seed=3), **more)

    whole = run(tmp_path / "whole.zarr")
    monkeypatch.setattr(recording, "SECONDS_BETWEEN_COMMITS", -1.0)
    assert interrupted(tmp_path / "b.zarr", 3, KeyboardInterrupt, run) == 3
    steps: list[Progress] = []
    resumed = run(tmp_path / "b.zarr", resume=True, progress=steps.append)
    assert [(step.done, step.skipped, step.total) for step in steps] == [(3, 3, 5), (4, 3, 5), (5, 3, 5)]
    assert resumed.digest == whole.digest
    verify(resumed)


def test_a_seed_draws_its_own_text_and_each_request_too(loaded, tmp_path):
    work = Work(prompts_of(loaded).sequences[:1] * 2, "twice")
    traces = [record(loaded, work, tmp_path / f"{s}.zarr", Plan(decoding=SAMPLED, seed=s)) for s in (1, 2)]
    first, second = (trace.read("token_ids") for trace in traces)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first[: len(first) // 2], first[len(first) // 2 :])


def test_drawing_leaves_the_callers_random_numbers_alone(loaded):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    continued(loaded.model, [3, 4], SAMPLED, seed_of(0, 0))
    assert torch.equal(torch.rand(3), expected)


def test_another_run_is_not_resumed(loaded, tmp_path, monkeypatch):
    work = prompts_of(loaded)
    monkeypatch.setattr(recording, "SECONDS_BETWEEN_COMMITS", -1.0)
    out = tmp_path / "a.zarr"
    interrupted(out, 2, KeyboardInterrupt, lambda out, **more: record(loaded, work, out, Plan(decoding=GREEDY), **more))
    others = {
        "seed is 0 in the store, 1 now": (loaded, work, Plan(decoding=GREEDY, seed=1)),
        "prompts": (loaded, prompts_of(loaded, ("other",)), Plan(decoding=GREEDY)),
        "decoding": (loaded, work, Plan(decoding=SAMPLED)),
        "lookahead_depth": (loaded, work, Plan(decoding=GREEDY, look_ahead=1)),
        "source_sha256": (loaded._replace(weights_sha256="other"), work, Plan(decoding=GREEDY)),
    }
    for said, (model, texts, plan) in others.items():
        with pytest.raises(TraceError, match=said):
            record(model, texts, out, plan, resume=True)
    assert open_trace(tmp_path / "a.zarr.partial").requests == 2


def test_resume_begins_where_there_is_nothing(loaded, tmp_path):
    assert record(loaded, read_work(5), tmp_path / "a.zarr", Plan(), resume=True).requests == 1


@pytest.mark.parametrize("resume", [False, True])
def test_a_recording_is_refused_before_its_model_is_loaded_while_another_writes_the_trace(tmp_path, resume):
    header = Header(geometry=Geometry(layers=1, experts=4, k=1, expert_bytes=(1,)))
    busy = pytest.raises(TraceError, match=rf"a\.zarr\.partial is being written by process {os.getpid()} ")
    with TraceWriter.create(tmp_path / "a.zarr", header), busy:
        refuse_taken(tmp_path / "a.zarr", resume)
    refuse_taken(tmp_path / "a.zarr", resume)


def test_provenance_names_everything_and_no_path_and_no_time(loaded, folder, tmp_path):
    trace = record(loaded, prompts_of(loaded), tmp_path / "a.zarr", Plan(decoding=SAMPLED, seed=4))
    found = trace.header.provenance
    assert (found.model, found.dtype, found.seed) == ("tiny-olmoe", "float32", 4)
    assert found.source == f"OlmoeForCausalLM of transformers, cpu {os.uname().machine}"
    assert found.source_sha256 == loaded.weights_sha256
    assert found.prompts == f"texts: 5 prompts, sha256 {Prompts('texts', TEXTS).sha256}"
    assert found.decoding == "sampled, temperature=1.3, top_p=0.95, top_k=40, max_new_tokens=9"
    assert found.versions.keys() == {"python", "torch", "transformers", "moereplay"}
    assert str(folder.parent) not in trace.header.model_dump_json()
    again = record(loaded, prompts_of(loaded), tmp_path / "b.zarr", Plan(decoding=SAMPLED, seed=4))
    assert again.header == trace.header


# What goes wrong on the way


def failing_at(loaded: Loaded, request: int, fail: Callable[[Any], Any]) -> Any:
    """A hook on the embedding that fails in that request's prompt; requests are told apart by a first token of 7."""
    seen = iter(range(10**9))

    def hook(module: Any, args: Any, output: Any) -> Any:
        starts = args[0].shape[1] > 1 and int(args[0][0, 0]) == 7
        return fail(output) if starts and next(seen) == request else None

    return loaded.model.get_input_embeddings().register_forward_hook(hook)


def numbered(count: int) -> Work:
    """Prompts of 5 tokens that begin with 7."""
    return Work(tuple(np.array([7, 8, 9, 10, number], np.int32) for number in range(count)), "numbered")


FAILURES = [
    (lambda _: torch.empty(2**60), r"request 2 \(5 tokens given\) ran out of memory; use --device-map auto, shorter"),
    (lambda output: output * float("nan"), r"request 2: .*(NaN|not numbers).*--dtype bfloat16 or float32"),
]


@pytest.mark.parametrize(("fail", "said"), FAILURES, ids=["memory", "nan"])
@pytest.mark.parametrize("decoding", [None, SAMPLED])
def test_a_request_that_fails_is_named_and_the_others_are_kept(loaded, tmp_path, fail, said, decoding):
    plan, out = Plan(decoding=decoding), tmp_path / "a.zarr"
    with failing_at(loaded, 2, fail), pytest.raises(RecordError, match=said) as raised:
        record(loaded, numbered(5), out, plan)
    assert "\n" not in str(raised.value)
    assert open_trace(tmp_path / "a.zarr.partial").requests == 2
    resumed = record(loaded, numbered(5), out, plan, resume=True)
    assert resumed.digest == record(loaded, numbered(5), tmp_path / "whole.zarr", plan).digest


def test_ctrl_c_in_the_middle_of_a_request_keeps_the_ones_before(loaded, tmp_path):
    def interrupt(output: Any) -> None:
        raise KeyboardInterrupt

    with failing_at(loaded, 3, interrupt), pytest.raises(KeyboardInterrupt):
        record(loaded, numbered(5), tmp_path / "a.zarr", Plan())
    assert open_trace(tmp_path / "a.zarr.partial").requests == 3


def test_a_failure_in_the_first_request_leaves_nothing(loaded, tmp_path):
    with failing_at(loaded, 0, FAILURES[0][0]), pytest.raises(RecordError, match="request 0"):
        record(loaded, numbered(3), tmp_path / "a.zarr", Plan())
    assert not list(tmp_path.iterdir())


def test_our_own_mistakes_are_not_dressed_up(loaded, tmp_path):
    """A RuntimeError that is not about memory is a bug, and must look like one."""

    def fail(output: Any) -> None:
        raise RuntimeError("shapes differ")

    with failing_at(loaded, 1, fail), pytest.raises(RuntimeError, match="shapes differ"):
        record(loaded, numbered(3), tmp_path / "a.zarr", Plan())


@pytest.mark.slow
def test_a_full_disk_keeps_what_is_committed_and_a_rerun_completes(loaded, tmp_path, monkeypatch):
    original, calls = LocalStore.set, iter(range(10**9))

    async def refuse(self, key, value):
        if next(calls) >= 80:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        await original(self, key, value)

    monkeypatch.setattr(recording, "SECONDS_BETWEEN_COMMITS", -1.0)
    monkeypatch.setattr(LocalStore, "set", refuse)
    with pytest.raises(TraceError, match=r"No space left on device; committed rows are kept .* rerun with --resume"):
        record(loaded, numbered(40), tmp_path / "a.zarr", Plan())
    kept = open_trace(tmp_path / "a.zarr.partial").requests
    assert 0 < kept < 40
    monkeypatch.undo()
    resumed = record(loaded, numbered(40), tmp_path / "a.zarr", Plan(), resume=True)
    assert resumed.digest == record(loaded, numbered(40), tmp_path / "whole.zarr", Plan()).digest


def test_a_minute_is_the_most_that_a_kill_costs(loaded, tmp_path, monkeypatch):
    """With no time between commits every request is committed when the next begins; with a minute, none of so few."""
    group = tmp_path / "a.zarr.partial" / "zarr.json"

    def committed(progress: Progress) -> None:
        kept.append(json.loads(group.read_text())["attributes"]["committed"]["requests"])

    for seconds, expected in ((-1.0, [0, 1, 2, 3]), (60.0, [0, 0, 0, 0])):
        kept: list[int] = []
        monkeypatch.setattr(recording, "SECONDS_BETWEEN_COMMITS", seconds)
        record(loaded, numbered(3), tmp_path / "a.zarr", Plan(), progress=committed)
        assert kept == expected
        shutil.rmtree(tmp_path / "a.zarr")


def test_a_model_whose_weights_are_no_numbers_is_refused_before_anything_is_written(folder, tmp_path):
    loaded = load(str(folder))
    with torch.no_grad():
        next(loaded.model.get_input_embeddings().parameters()).fill_(float("nan"))
    with pytest.raises(RecordError):
        record(loaded, numbered(2), tmp_path / "a.zarr", Plan())
    assert not list(tmp_path.iterdir())


def test_progress_tells_speed_and_time_left():
    at = Progress(done=6, total=10, skipped=4, tokens=300, seconds=3.0)
    assert at.tokens_per_second == 100
    assert at.seconds_left == 6  # four requests at the 1.5 s that each of the two took
    assert Progress(4, 10, 4, 0, 0.0).seconds_left == 0
