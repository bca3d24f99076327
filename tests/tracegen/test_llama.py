"""llama.cpp records what transformers computes; files, libraries and answers that do not fit are refused."""

from __future__ import annotations

import ctypes.util
import os
import signal
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.tracegen.checkpoint import load
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.folder import MINIATURE
from moereplay.tracegen.llama import binding, process
from moereplay.tracegen.llama.child import nll, pick
from moereplay.tracegen.llama.process import Engine
from moereplay.tracegen.llama.record import Way, is_named, loaded, opened, record, rule_of
from moereplay.tracegen.plan import Decoding, Plan
from moereplay.tracegen.prompts import Prompts
from moereplay.tracegen.record import record as record_in_torch
from moereplay.tracegen.tokens import Work, encode
from moereplay.traces.routers import choose, weigh
from moereplay.traces.schema import Router, Trace
from moereplay.traces.store import open_trace
from tests.kit.every import every
from tests.kit.gguf_models import ARCHITECTURES, characters, of_tokenizer, packed, write_gguf
from tests.kit.tiny_checkpoints import checkpoint

EXACT = Way(threads=1, exact=True)
READ, SAMPLED = Plan(look_ahead=0), Plan(look_ahead=0, decoding=Decoding(max_new_tokens=9, temperature=1.1, top_p=0.9))
TEXTS = ("def f(x):", "Hello", "a", "import os\nimport sys\n", "for each in range(3):")
#: Largest errors against transformers in float32; the prototype's were 1.7e-5 for logits of up to 17.
LOGITS, WEIGHTS = 2e-5, 1e-5


@pytest.fixture(scope="module")
def library() -> Path:
    try:
        return binding.library_file()
    except RecordError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A tiny olmoe, its checkpoint and its GGUF file."""
    folder = tmp_path_factory.mktemp("tiny")
    return written(folder, "olmoe")


def written(folder: Path, family: str) -> Path:
    """Save a checkpoint in a folder, and the same weights as a GGUF file beside it."""
    keys: dict[str, Any] = {"num_nextn_predict_layers": 0} if family == "glm4_moe" else {}
    model = load(str(checkpoint(folder / family, family, **keys))).model
    return write_gguf(folder / f"{family}.gguf", model, characters())


def run(path: Path, library: Path, out: Path, plan: Plan, work: Work | None = None, **how: Any) -> Trace:
    with Engine(library) as engine:
        running = loaded(engine, opened(str(path)))
        new = plan.decoding.max_new_tokens if plan.decoding else 1
        work = work or encode(Prompts("texts", TEXTS), running.tokenizer, running.room, new)
        return record(running, work, out, plan, EXACT, **how)


def drawn(*lengths: int, below: int = 96) -> Work:
    draw = np.random.Generator(np.random.PCG64(5))
    return Work(tuple(draw.integers(0, below, length).astype(np.int32) for length in lengths), "drawn")


def agree(mine: Trace, theirs: Trace) -> None:
    """Same experts in the same order, and numbers to single precision's rounding."""
    assert mine.tokens == theirs.tokens
    assert np.array_equal(mine.read("chosen"), theirs.read("chosen"))
    assert np.abs(mine.read("logits") - theirs.read("logits")).max() <= LOGITS
    assert np.abs(mine.read("weights") - theirs.read("weights")).max() <= WEIGHTS
    assert np.abs(mine.read("nll") - theirs.read("nll")).max() <= 1e-4
    rules = [trace.header.geometry.router for trace in (mine, theirs)]
    assert rules[0] == rules[1] or [rule.family for rule in rules] == ["softmax_topk", "topk_softmax"]  # the same
    assert mine.header.geometry.expert_bytes == theirs.header.geometry.expert_bytes


# -- the same as transformers


@pytest.mark.slow
@every("family", tuple(ARCHITECTURES), apart=True)
def test_four_architectures_route_as_in_transformers(family, library, tmp_path):
    """Softmax, renormalised softmax, softmax of the chosen with biases and windows, sigmoid with a bias and groups."""
    path, work = written(tmp_path, family), drawn(40, 1, 17)
    mine = run(path, library, tmp_path / "mine.zarr", READ, work)
    agree(mine, record_in_torch(load(str(tmp_path / family), dtype="float32"), work, tmp_path / "theirs.zarr", READ))
    assert (mine.router_bias is not None) == (family == "glm4_moe")


@pytest.mark.slow
def test_the_miniature_routes_as_in_transformers(library, tmp_path):
    """The last 12 tokens go one by one. Prompts are tokenised as in transformers."""
    model = load("miniature", dtype="float32", device="cpu")
    path = write_gguf(tmp_path / "mini.gguf", model.model, of_tokenizer(MINIATURE / "tokenizer.json"))
    plan = READ.model_copy(update={"prompt_tokens": 100})
    with Engine(library) as engine:
        running = loaded(engine, opened(str(path)))
        work = encode(Prompts("texts", TEXTS), running.tokenizer, running.room, 1)
        assert [ids.tolist() for ids in work.sequences] == [model.tokenizer(text)["input_ids"] for text in TEXTS]
        work = drawn(112, below=4096)
        mine = record(running, work, tmp_path / "mine.zarr", plan, EXACT)
    agree(mine, record_in_torch(model, work, tmp_path / "theirs.zarr", plan))


@every("kind", ("Q8_0", "Q4_0"), apart=True)
def test_quantised_experts_are_recorded_as_they_run(kind, library, tmp_path):
    """Wide enough for blocks of 32; the choice follows from the recorded logits, and bytes are the file's."""
    model = load(str(checkpoint(tmp_path / "wide", intermediate_size=64))).model
    trace = run(write_gguf(tmp_path / "a.gguf", model, characters(), kind), library, tmp_path / "a.zarr", SAMPLED)
    geometry = trace.header.geometry
    assert geometry.expert_bytes == (3 * 64 * 32 * {"Q8_0": 34, "Q4_0": 18}[kind] // 32,) * 3
    assert geometry.weight_format == kind
    assert np.array_equal(choose(trace.read("logits"), geometry.k), trace.read("chosen"))
    expected = weigh(geometry.router, trace.read("logits"), trace.read("chosen"))
    assert np.abs(expected - trace.read("weights")).max() <= WEIGHTS


# -- nothing recorded is lost


@pytest.mark.slow
def test_a_killed_process_leaves_requests_that_resume_to_the_undisturbed_trace(tiny, library, tmp_path):
    out = tmp_path / "killed.zarr"
    with Engine(library) as engine:
        running = loaded(engine, opened(str(tiny)))
        work = encode(Prompts("texts", TEXTS), running.tokenizer, running.room, 9)

        def kill(stands: Any) -> None:
            if stands.done == 3:
                os.kill(engine.pid, signal.SIGKILL)

        with pytest.raises(RecordError, match=r"request 3: llama\.cpp's process was killed"):
            record(running, work, out, SAMPLED, EXACT, progress=kill)
    assert open_trace(tmp_path / "killed.zarr.partial").requests == 3
    resumed = run(tiny, library, out, SAMPLED, resume=True)
    whole = run(tiny, library, tmp_path / "whole.zarr", SAMPLED)
    assert resumed.digest == whole.digest
    assert {path.name for path in tmp_path.iterdir()} == {"killed.zarr", "whole.zarr"}


def test_a_crash_is_told_with_its_signal(tiny, library):
    with Engine(library) as engine:
        os.kill(engine.pid, signal.SIGABRT)
        with pytest.raises(RecordError, match="SIGABRT"):
            loaded(engine, opened(str(tiny)))


def test_the_process_ends_with_its_parent_and_writes_no_file(tiny, library):
    with Engine(library) as engine:
        pid = engine.pid
        limits = Path(f"/proc/{pid}/limits")
        if limits.exists():
            lines = limits.read_text().splitlines()
            assert next(line for line in lines if line.startswith("Max file size")).split()[3] == "0"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# -- what does not fit


def test_libraries_that_are_not_llama_cpp_are_refused(tmp_path):
    text = tmp_path / "libllama.so"
    text.write_text("no library")
    for path, said in ((text, "cannot be loaded"), (ctypes.util.find_library("c"), "missing function")):
        if path is None:
            continue
        with pytest.raises(RecordError, match=said), Engine(Path(path)):
            pass
    with pytest.raises(RecordError, match="no such file"):
        binding.library_file(tmp_path / "none.so")
    assert binding.library_file(tmp_path) == text.absolute()
    assert binding.library_file(text.rename(tmp_path / "libllama.v0.5.0.so").parent).name == "libllama.v0.5.0.so"


class Foreign(binding.Library):
    """A library whose structures are elsewhere: one answer is changed."""

    def __init__(self, path: Path, name: str, change: Any) -> None:
        self._name, self._change = name, change
        super().__init__(path)

    def declare(self, functions: dict[str, tuple[Any, ...]]) -> None:
        super().declare(functions)
        if self._name in functions:
            given = getattr(self, self._name)
            setattr(self, self._name, lambda *values: self._change(given(*values)))


def moved(at: int, form: str, value: Any) -> Any:
    def change(params: Any) -> Any:
        struct.pack_into(form, params.raw, at, *(value if isinstance(value, tuple) else (value,)))
        return params

    return change


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("llama_model_default_params", moved(0, "<Q", 1), "llama_model_params"),  # no pointers where they were
        ("llama_model_default_params", moved(16, "<i", 7), "llama_model_params"),
        ("llama_model_default_params", moved(74, "<b", 0), "llama_model_params"),  # another flag where repacking was
        ("llama_context_default_params", moved(0, "<I", 4096), "llama_context_params"),
        ("llama_context_default_params", moved(88, "<Q", 1), "llama_context_params"),  # a callback is there already
        ("llama_context_default_params", moved(108, "<i", 0), "llama_context_params"),
        ("llama_context_default_params", moved(52, "<i", 3), "flash_attn"),
        ("ggml_nbytes", lambda size: size + 4, "ggml_tensor"),
    ],
)
def test_builds_whose_structures_do_not_fit_are_refused_before_a_model_is_loaded(name, change, said, library):
    with pytest.raises(RecordError, match=said):
        Foreign(library, name, change)


def test_four_bytes_before_the_callback_may_be_anything(library):
    """Builds of July 2026: the pointer begins at the next multiple of 8 bytes; the bytes before it are not set."""
    known = binding.Library(library).places
    other = Foreign(library, "llama_context_default_params", moved(known.callback - 8, "<fi", (-1.0, 21930))).places
    assert other == known._replace(flash=known.flash - 4)


def test_a_file_that_is_cut_off_or_no_mixture_is_refused_by_our_own_reader(tiny, tmp_path):
    """No library is needed: llama.cpp never sees these."""
    data = tiny.read_bytes()
    named = {
        "cut.gguf": (data[:-100], "ends beyond the file"),
        "header.gguf": (data[:3000], "truncated"),
        "empty.gguf": (b"", "empty"),
        "text.gguf": (b"not a gguf file", "expected GGUF"),
        "old.gguf": (b"GGUF" + struct.pack("<I", 1) + data[8:], "version 1"),
        "dense.gguf": (
            packed({"general.architecture": "llama", "llama.block_count": 1}, {}),
            "missing tensors",
        ),
        "a-00001-of-00002.gguf": (data, "a-00002-of-00002.gguf"),
    }
    for name, (content, said) in named.items():
        path = tmp_path / name
        path.write_bytes(content)
        assert is_named(str(path))
        with pytest.raises(RecordError, match=said):
            opened(str(path))


@every("cut", (4, 40, 400), apart=True)
def test_a_file_that_only_llama_cpp_can_refuse_is_one_sentence(cut, tiny, library, tmp_path):
    """Names of tensors or keys that it needs are changed; the process may end, but with words."""
    data = tiny.read_bytes()
    name = {4: b"olmoe.attention.head_count", 40: b"blk.1.attn_q_norm", 400: b"tokenizer.ggml.model"}[cut]
    path = tmp_path / "changed.gguf"
    path.write_bytes(data.replace(name, name[:-1] + b"X"))
    with Engine(library) as engine, pytest.raises(RecordError, match=r"llama\.cpp"):
        loaded(engine, opened(str(path)))


def test_a_header_that_promises_other_routers_is_refused(tiny, library, tmp_path):
    """The file says 4 experts a token to llama.cpp; our reader is told 3."""
    with Engine(library) as engine:
        file = opened(str(tiny))
        other = file.known.geometry.model_copy(update={"k": 3})
        running = loaded(engine, file._replace(known=file.known.model_copy(update={"geometry": other})))
        with pytest.raises(RecordError, match="the file's header states"):
            record(running, drawn(4), tmp_path / "a.zarr", READ, EXACT)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "answer",
    [
        b"no json\n",
        b"[1]\n",
        b'{"arrays": {"ids": ["<i8", [1]]}}\n',
        b'{"arrays": {"other": ["<i4", [1]]}}\n',
        b'{"arrays": {"ids": ["<i4", [-1]]}}\n',
        b'{"arrays": {"ids": ["<i4", [2147483647, 2147483647, 2]]}}\n',
        b'{"arrays": {"ids": ["<i4", [3]]}}\nab',
        b"",
    ],
)
def test_answers_of_a_process_that_a_file_took_over_are_not_believed(answer, tmp_path, monkeypatch):
    program = tmp_path / "fake.py"
    program.write_text(f"import sys\nsys.stdin.readline()\nsys.stdout.buffer.write({answer!r})\n")
    started = process.subprocess.Popen
    monkeypatch.setattr(process.subprocess, "Popen", lambda command, **how: started([command[0], str(program)], **how))
    engine = Engine(tmp_path / "any.so")
    try:
        with pytest.raises(RecordError, match=r"llama\.cpp"):
            engine.ask("tokens", text="a", special=True)
    finally:
        engine.close()


# -- rules and drawing


@given(st.integers(0, 2**32 - 1), st.sampled_from(("softmax_topk", "sigmoid_groups", "topk_softmax")), st.booleans())
def test_the_rule_that_made_the_rows_is_found(seed, family, renormalise):
    """Or one that gives the same rows: softmax of the chosen is renormalised softmax of all."""
    draw = np.random.Generator(np.random.PCG64(seed))
    made = Router(family=family, renormalise=renormalise, scale=2.5)
    logits = draw.normal(size=(6, 2, 8)).astype(np.float32)
    chosen = choose(logits, 3)
    rows = {"logits": logits, "chosen": chosen, "weights": weigh(made, logits, chosen)}
    said = {"general.architecture": "x", "x.expert_weights_scale": 2.5}
    found = rule_of(said, None, rows)
    assert np.allclose(weigh(found, logits, chosen), rows["weights"], atol=1e-6)
    with pytest.raises(RecordError, match="--no-logits"):
        rule_of(said, None, rows | {"weights": rows["weights"] * 1.01})
    with pytest.raises(RecordError, match="--no-logits"):
        rule_of(said, None, rows | {"chosen": chosen[..., ::-1] * 0 + np.argsort(logits)[..., :3]})


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 3), st.floats(0.05, 1), st.integers(0, 8))
def test_tokens_are_drawn_from_the_likeliest(seed, temperature, top_p, top_k):
    """Against the definition: sorted by probability, the shortest beginning that reaches top_p."""
    logits = np.random.Generator(np.random.PCG64(seed)).normal(size=8).astype(np.float32)
    chances = np.exp(logits.astype(float) / temperature)
    order = sorted(range(8), key=lambda token: -logits[token])[: top_k or None]
    total, allowed, reached = sum(chances[order]), [], 0.0
    for token in order:
        allowed.append(token)
        reached += chances[token] / total
        if reached >= top_p - 1e-12:
            break
    draws = {pick(logits, temperature, top_p, top_k, np.random.Generator(np.random.PCG64(at))) for at in range(40)}
    assert draws <= {*allowed, *order[: len(allowed) + 1]}
    assert len(draws - set(allowed)) == 0 or abs(reached - top_p) < 1e-9
    assert pick(logits, 0, 1, 0, np.random.Generator(np.random.PCG64(0))) == logits.argmax()


def test_surprise_is_minus_the_log_of_the_share():
    logits = np.log(np.array([[1, 3], [1, 1]], np.float32))
    assert nll(None, logits, [0, 1]).tolist() == pytest.approx([0, -np.log(0.75)])
    assert nll(logits[0], logits[1:], [0]).tolist() == pytest.approx([-np.log(0.25)])
