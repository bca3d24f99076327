"""A server may answer with anything: a command then says so in one line and in time, and keeps nothing of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moereplay.traces import network
from moereplay.traces.checkpoints.found import model_of
from moereplay.traces.schema import TraceError
from tests.kit.count_samples import gguf_header
from tests.kit.every import every
from tests.kit.liar import Liar, lying

CONFIG = {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
CONFIG |= {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96, "num_hidden_layers": 4}
GOOD = json.dumps(CONFIG).encode()
EXPERT = 3 * 32 * 64 * 2  #: bytes of three matrices at 16 bits
HEADER = gguf_header(
    {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.expert_count": 4,
        "llama.expert_used_count": 2,
        "llama.embedding_length": 64,
    },
    {f"blk.0.ffn_{matrix}_exps.weight": ((64, 32, 4), 1) for matrix in ("gate", "up", "down")},
)
FILE = HEADER + bytes(3 * 64 * 32 * 4 * 2 + 64)
#: Seconds in which a command has to give up, when a whole answer may take .4 and all of them .8.
SOON = 5.0


@pytest.fixture(scope="module")
def liar() -> Iterator[Liar]:
    with lying() as at:
        yield at


@pytest.fixture(autouse=True)
def hasty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, liar: Liar) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", liar.address)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for limit, value in {"IDLE_S": 0.3, "ANSWER_S": 0.4, "MODEL_S": 0.8, "MOST_DOCUMENT": 1 << 16}.items():
        monkeypatch.setattr(network, limit, value)


def whole(body: bytes, status: str = "200 OK", *headers: str) -> Iterable[bytes]:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return ["\r\n".join(lines).encode("latin-1") + body]


def honest(path: str, part: tuple[int, int] | None) -> Iterable[bytes]:
    """The config and the GGUF file as they are; nothing else is there."""
    if path.endswith("config.json"):
        return whole(GOOD)
    if not path.endswith(".gguf"):
        return whole(b"", "404 Not Found")
    assert part
    body = FILE[part[0] : part[1] + 1]
    return whole(body, "206 Partial", f"Content-Range: bytes {part[0]}-{part[0] + len(body) - 1}/{len(FILE)}")


def refusal(spec: str) -> str:
    """The one line with which a model is refused, in time."""
    began = time.monotonic()
    with pytest.raises(TraceError) as refused:
        model_of(spec)
    assert time.monotonic() - began < SOON
    assert "\n" not in str(refused.value)
    return str(refused.value)


STATUSES = [
    "HTTP/1.1 200 OK",
    "HTTP/1.1 206 Partial",
    "SSH-2.0",
    "HTTP/1.1 2\xb20 OK",
    "HTTP/1.1 99999 x",
    "HTTP/9 200",
]
STATUSES += ["", "HTTP/1.1 100 Continue", "HTTP/1.1 204 None", "HTTP/1.1 302 Moved", "HTTP/1.1 416 No"]
STATUSES += ["HTTP/1.1 500 \x9b31m"]
RANGES = ("0-3/\xb2", "0-3/" + "9" * 5000, "7-9/100", "0-9/*", "0-0/99", "-/-")
LINES = [f"Content-Range: bytes {text}" for text in RANGES]
LINES += [
    "Content-Length: 9" + "9" * 4999,
    "Content-Length: -1",
    "Content-Length: \xb2",
    "Content-Length: 1000",
    "no colon",
]
LINES += ["Transfer-Encoding: chunked", "Content-Encoding: gzip", "X: " + "y" * 70_000, "\r\n".join(["A: b"] * 120)]
LINES += ["Location: ftp://127.0.0.1/x", "Location: file:///etc/passwd", "Location: http://[::1/", "Location: \x00"]
LINES += ["Location: http://u:p@127.0.0.1/x", "Location: /again/config.json", "Location:", "no colon"]
BODIES = [b"", b"<html>log in</html>", GOOD[:-9], b"9" * 5000, b"[" * 9000, b"{}", b'{"a":1}', b"\xff\xfe", b"zz\r\n"]
BODIES += [b"5\r\nab", b"f" * 19 + b"\r\nx", b"GGUF", HEADER[:60], b"x" * 70_000]


@pytest.mark.slow
@given(
    status=st.sampled_from(STATUSES),
    lines=st.lists(st.sampled_from(LINES), max_size=2),
    body=st.sampled_from(BODIES),
    pace=st.sampled_from(["at once", "drip", "silent", "endless"]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_lie_is_one_line_in_time_and_poisons_nothing(
    liar: Liar, status: str, lines: list[str], body: bytes, pace: str
) -> None:
    begun = "\r\n".join([status, *lines, "", ""]).encode("latin-1")
    pieces = {
        "at once": lambda: [begun + body],
        "drip": lambda: ((begun + body)[at : at + 1] for at in range(len(begun + body))),
        "silent": lambda: [begun, *repeat(b"", 40)],
        "endless": lambda: [begun + body, *repeat(b"x" * 4096, 200)],
    }
    for spec in (f"{liar.address}/a/config.json", f"{liar.address}/a/m.gguf", "some/model"):
        liar.lie = lambda path, part: pieces[pace]()
        refusal(spec)
        if spec == "some/model":  # headers that cannot be had are no reason to give other sizes
            liar.lie = lambda path, part: honest(path, part) if "config" in path else pieces[pace]()
            refusal(spec)
        liar.lie = honest
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(network, "ANSWER_S", 60)
            patch.setattr(network, "MODEL_S", 60)
            assert set(model_of(spec).geometry.expert_bytes) == {EXPERT}
        for file in (Path(os.environ["XDG_CACHE_HOME"]) / "moereplay" / "models").iterdir():
            file.unlink()


def count(spec: str, liar: Liar) -> int:
    """The requests that a model takes."""
    liar.asked.clear()
    assert set(model_of(spec).geometry.expert_bytes) == {EXPERT}
    return len(liar.asked)


def test_what_is_kept_makes_a_model_and_is_read_again_if_it_does_not_or_if_asked(
    liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "MODEL_S", 60)
    monkeypatch.setattr(network, "ANSWER_S", 60)
    liar.lie, spec = honest, f"{liar.address}/a/config.json"
    assert [count(spec, liar) for _ in range(2)] == [1, 0]
    assert [count("some/model", liar) for _ in range(2)] == [3, 0]  # config, index, weights: the last two are not there
    kept = network._cache(spec)
    for poison in (b"<html>log in</html>", b'{"error": "busy"}', GOOD[:-9]):
        kept.write_bytes(poison)
        assert [count(spec, liar) for _ in range(2)] == [1, 0]
    liar.lie = lambda path, part: whole(GOOD.replace(b'"num_experts": 4', b'"num_experts": 8'))
    assert model_of(spec).geometry.experts == 4  # corrected since
    assert model_of(spec, refresh=True).geometry.experts == model_of(spec).geometry.experts == 8
    monkeypatch.setenv("HF_HUB_OFFLINE", "yes")
    liar.asked.clear()
    assert model_of(spec).geometry.experts == 8
    kept.write_bytes(b"<html>")
    for unkept in (spec, "some/other", f"{liar.address}/b/m.gguf"):
        refusal(unkept)
    assert "--offline or HF_HUB_OFFLINE is set" in refusal("some/other")
    assert not liar.asked


@every(
    "stated, sent",
    [
        ("bytes 4-{last}/{size}", 0),  # another range than asked
        ("bytes 0-{last}/{size}", -1),  # a byte less than stated
        ("bytes 0-0/{size}", 1 - len(FILE)),  # one byte a request: 15,000 requests
        ("bytes 0-{last}/\xb2", 0),
        ("bytes 0-{last}/*", 0),
    ],
)
def test_a_part_that_was_not_asked_is_refused_at_once(liar: Liar, stated: str, sent: int) -> None:
    said = stated.format(last=len(FILE) - 1, size=len(FILE))
    body = FILE[: len(FILE) + sent]
    liar.asked.clear()
    liar.lie = lambda path, part: whole(body, "206 Partial", f"Content-Range: {said}")
    assert "truncated" not in refusal(f"{liar.address}/a/m.gguf")
    assert len(liar.asked) == 1


def test_parts_of_a_model_have_a_sum(liar: Liar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "MOST_BYTES", 3 * len(FILE))
    monkeypatch.setattr(network, "MODEL_S", 60)
    liar.lie = honest
    liar.asked.clear()
    refusal(f"{liar.address}/a/m-00001-of-02000.gguf")
    assert len(liar.asked) == 4


def test_a_redirect_stays_on_the_web_and_tells_no_password(liar: Liar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_is_local", lambda host: host not in ("127.0.0.1", "cdn.example"))
    inwards = ("http://u:secret@127.0.0.1/x", "http://10.0.0.1/x", "//[::1/")
    for where in ("ftp://127.0.0.1/x", "file:///etc/passwd", *inwards):
        liar.lie = lambda path, part, where=where: whole(b"", "302 Found", f"Location: {where}")
        assert "secret" not in refusal(f"{liar.address}/a/config.json")
    liar.lie = lambda path, part: whole(b"", "302 Found", f"Location: {path}/again")
    assert "more than 5 redirects" in refusal(f"{liar.address}/a/config.json")
    for address in (
        "http://u:secret@127.0.0.1/config.json",
        "http://secret@[::1/config.json",
        "https://u:secret@h:x/m",
    ):
        assert "secret" not in refusal(address)
    monkeypatch.setenv("HF_TOKEN", "sec\nret")
    assert "sec" not in refusal(f"{liar.address}/a/config.json")


def test_a_path_that_is_not_here_is_said_to_be_taken_for_a_name(liar: Liar) -> None:
    liar.lie = lambda path, part: whole(b"", "404 Not Found")
    assert refusal("runs/mini").startswith("no folder runs/mini here, and of the hub: ")
