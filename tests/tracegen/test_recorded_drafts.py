"""Recording under assisted generation: tokens are the model's own, rejected rows are what it computed for them."""

from __future__ import annotations

import numpy as np
import pytest

from moereplay.tracegen import record as recording
from moereplay.tracegen.checkpoint import Loaded, load
from moereplay.tracegen.decoding import Decoding
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.folder import MINIATURE
from moereplay.tracegen.plan import Drafting, Plan, drafting_of
from moereplay.tracegen.prompts import Prompts
from moereplay.tracegen.record import record, room_of
from moereplay.tracegen.tokens import Work, encode
from moereplay.traces.schema import Trace, TraceError
from moereplay.traces.store import verify
from studies.recorded_drafts import first_layers
from tests.kit.every import every
from tests.kit.tiny_checkpoints import checkpoint

TEXTS = ("def f(x):\n    return x\n\ndef g(x):\n", "import os\nimport", "a")
NEW = 10
ROUTED = ("chosen", "weights", "logits", "lookahead/1", "lookahead/2")


@pytest.fixture(scope="module")
def miniature() -> Loaded:
    return load("miniature", dtype="float32")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Loaded:
    """The first 12 of its 16 layers, which guess some of its tokens."""
    return load(str(first_layers(MINIATURE, tmp_path_factory.mktemp("draft") / "first", 12)), dtype="float32")


def work_of(loaded: Loaded, texts: tuple[str, ...] = TEXTS) -> Work:
    return encode(Prompts("texts", texts), loaded.tokenizer, room_of(loaded), NEW)


def plan_of(many: int = 3, model: str = "ngram") -> Plan:
    return Plan(decoding=Decoding(max_new_tokens=NEW), drafting=Drafting(many=many, model=model))


@pytest.fixture(scope="module")
def plain(miniature, tmp_path_factory) -> Trace:
    out = tmp_path_factory.mktemp("plain") / "a.zarr"
    return record(miniature, work_of(miniature), out, Plan(decoding=Decoding(max_new_tokens=NEW)))


@pytest.fixture(scope="module", params=["model", "ngram"])
def drafted(request, miniature, small, tmp_path_factory) -> Trace:
    plan = plan_of(4 if request.param == "ngram" else 2, "ngram" if request.param == "ngram" else "first")
    out = tmp_path_factory.mktemp(request.param) / "a.zarr"
    return record(miniature, work_of(miniature), out, plan, drafts=small if request.param == "model" else None)


@pytest.mark.slow
def test_tokens_are_those_of_the_plain_recording(plain, drafted):
    """Greedy: verifying drafts changes no token. Numbers differ by rounding, because passes have several rows."""
    verify(drafted)
    assert drafted.read("token_ids").tolist() == plain.read("token_ids").tolist()
    assert drafted.prompt_lengths.tolist() == plain.prompt_lengths.tolist()
    assert drafted.verified.right.sum() > 3, "some drafts are right"
    assert drafted.rejects > 3, "and some are not"
    for name in ("nll", "logits", "lookahead/1", "lookahead/2", "weights"):
        np.testing.assert_allclose(drafted.read(name), plain.read(name), atol=2e-3)
    assert (drafted.read("chosen") == plain.read("chosen")).mean() > 0.999


@pytest.mark.slow
def test_rejected_rows_are_the_models_own_routing_of_these_tokens(miniature, drafted, tmp_path):
    """Teacher-forced in one pass: the tokens before a pass, and its known token, accepted and rejected drafts."""
    texts, spans, known = [], [], drafted.verified
    for number in range(drafted.requests):
        begin, end = drafted.request_offsets[number : number + 2].tolist()
        for token in range(begin, end):
            right, wrong = int(known.right[token]), int(known.many[token] - known.right[token])
            if wrong > 0:
                first = int(known.first[token])
                before = drafted.read("token_ids", begin, token + 1 + right)
                rejected = drafted.read("token_ids", drafted.tokens + first, drafted.tokens + first + wrong)
                texts.append(np.concatenate([before, rejected]).astype(np.int32))
                spans.append((first, wrong))
    forced = record(miniature, Work(tuple(texts), "forced"), tmp_path / "a.zarr", Plan())
    assert sum(wrong for _, wrong in spans) == drafted.rejects
    for name in ROUTED:
        ends = forced.request_offsets[1:].tolist()
        rows = np.concatenate(
            [forced.read(name, end - wrong, end) for end, (_, wrong) in zip(ends, spans, strict=True)]
        )
        found = drafted.read(name, drafted.tokens, drafted.rows)
        if name == "chosen":
            assert (found == rows).mean() > 0.999
        else:
            np.testing.assert_allclose(found, rows, atol=2e-3)


@pytest.mark.slow
def test_a_stopped_recording_goes_on_to_the_same_bytes(miniature, drafted, small, tmp_path, monkeypatch):
    """And refuses to go on with other drafts."""
    is_ngram = "ngram" in drafted.header.provenance.decoding
    model = "ngram" if is_ngram else "first"
    plan, drafts, runs = plan_of(4 if is_ngram else 2, model), None if is_ngram else small, []
    alone = recording._Recorder.request

    def once(self, number, ids):
        if runs:
            raise KeyboardInterrupt
        runs.append(number)
        return alone(self, number, ids)

    monkeypatch.setattr(recording._Recorder, "request", once)
    with pytest.raises(KeyboardInterrupt):
        record(miniature, work_of(miniature), tmp_path / "a.zarr", plan, drafts=drafts)
    monkeypatch.undo()
    for other in (plan_of(1, model), Plan(decoding=plan.decoding)):
        with pytest.raises(TraceError, match="another header"):
            record(miniature, work_of(miniature), tmp_path / "a.zarr", other, resume=True, drafts=drafts)
    resumed = record(miniature, work_of(miniature), tmp_path / "a.zarr", plan, resume=True, drafts=drafts)
    assert resumed.digest == drafted.digest


@pytest.mark.slow
def test_a_request_may_end_with_its_first_token_or_within_a_draft(miniature, tmp_path):
    """The end token is no row of the trace, so a draft of it counts as rejected, and so does what was drafted after."""
    loaded = load("miniature", dtype="float32")
    first = record(loaded, work_of(loaded, TEXTS[:1]), tmp_path / "a.zarr", plan_of(4))
    said = first.read("token_ids").tolist()[int(first.prompt_lengths[0]) :]
    alone = Plan(decoding=Decoding(max_new_tokens=NEW))
    for number, end in enumerate((said[0], said[len(said) // 2])):
        loaded.model.generation_config.eos_token_id = end
        work = work_of(loaded, TEXTS[:1])
        expected = record(loaded, work, tmp_path / f"b{number}.zarr", alone)
        found = record(loaded, work, tmp_path / f"c{number}.zarr", plan_of(4))
        assert found.read("token_ids").tolist() == expected.read("token_ids").tolist()
        assert found.verified is not None


@pytest.mark.slow
def test_sampled_tokens_may_be_drafted_too(miniature, small, tmp_path):
    plan = Plan(
        decoding=Decoding(max_new_tokens=NEW, temperature=1.0), drafting=Drafting(many=2, model="first"), seed=3
    )
    work = work_of(miniature, TEXTS[1:])
    once, again = (record(miniature, work, tmp_path / name, plan, drafts=small) for name in ("a", "b"))
    assert once.digest == again.digest
    assert once.rejects > 0


def test_a_draft_model_of_other_tokens_is_refused(miniature, tmp_path):
    other = load(str(checkpoint(tmp_path / "tiny")))
    with pytest.raises(RecordError, match="--draft-model tiny: its tokens are not those of miniature"):
        record(miniature, work_of(miniature), tmp_path / "a.zarr", plan_of(2, "tiny"), drafts=other)


@every("text, expected", [("ngram", (2, "ngram")), ("ngram:3", (3, "ngram")), ("x/y", (2, "x/y"))])
def test_what_may_be_typed(text, expected):
    found = drafting_of(text, None)
    assert (found.ngram, found.model, found.many) == (*expected, 3)


@every("text", ["ngram:0", "ngram:x", "ngram:1.5"])
def test_a_wrong_n_is_refused(text):
    with pytest.raises(RecordError, match=r"expected a model, or ngram\[:N\]"):
        drafting_of(text, 3)
