"""Stores whose checksums are right and whose rows are impossible: whoever wrote them, no engine indexes by them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moereplay.simulator.config import configure
from moereplay.simulator.replay import ENGINES, replay
from moereplay.traces import writer
from moereplay.traces.schema import Geometry, Header, Request, TraceError
from moereplay.traces.store import open_trace, verify
from moereplay.traces.summary import summarise
from moereplay.traces.validator import examine
from moereplay.traces.writer import write_trace
from tests.kit.collecting import case
from tests.kit.command import moereplay_here
from tests.kit.every import every
from tests.tracegen.test_faults import edit_attributes, reseal

LAYERS, EXPERTS, K, TOKENS = 2, 8, 2, 12
HEADER = Header(geometry=Geometry(layers=LAYERS, experts=EXPERTS, k=K, expert_bytes=(64, 64)), lookahead_depth=1)
#: The replay that reads every array.
CONFIG = {"capacity": "50%", "routing": "cache_prior", "prefetch": "top_k"}


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that takes what it is given, as somebody else's would."""
    monkeypatch.setattr(writer, "check_request", lambda request, header, index: request.arrays())
    monkeypatch.setattr(writer, "checked_bias", lambda bias, header: bias)


def rows() -> dict[str, np.ndarray]:
    """Sound ones, of one request."""
    rng = np.random.Generator(np.random.PCG64(0))
    logits, ahead = rng.standard_normal((2, TOKENS, LAYERS, EXPERTS)).astype(np.float32)
    chosen = logits.argsort(-1)[..., ::-1][..., :K].astype(np.int16)
    weights = np.full(chosen.shape, 0.5, np.float32)
    return {"chosen": chosen, "weights": weights, "logits": logits, "lookahead": ahead, "nll": np.ones(TOKENS)}


def stored(path: Path, arrays: dict[str, np.ndarray], bias: np.ndarray | None = None) -> Path:
    given: dict[str, Any] = {name: array for name, array in arrays.items() if name != "lookahead"}
    write_trace(path, HEADER, [Request(prompt_length=2, lookahead=(arrays["lookahead"],), **given)], bias)
    return path


def compiled(path: Path) -> None:
    replay(open_trace(path), configure(**CONFIG))


def reference(path: Path) -> None:
    replay(open_trace(path), configure(**CONFIG), engine="reference")


def verified(path: Path) -> None:
    verify(open_trace(path))


def inspected(path: Path) -> None:
    examine(open_trace(path))
    summarise(open_trace(path))


#: Array, index, value, and what is said of it.
WRONG = {
    "id too high": ("chosen", (7, 1, 0), 500, r"chosen\[7, 1, 0\] is 500 \(token 7, layer 1\): ids are 0 to 7"),
    "id too low": ("chosen", (7, 1, 1), -7, r"chosen\[7, 1, 1\] is -7 \(token 7, layer 1\): ids are 0 to 7"),
    "repeated": ("chosen", (7, 1), 3, r"chosen\[7, 1\] repeats an expert: \[3, 3\] \(token 7, layer 1\)"),
    "nan logit": ("logits", (4, 0, 2), np.nan, r"logits\[4, 0, 2\] is nan \(token 4, layer 0\): expected a finite"),
    "infinite weight": ("weights", (4, 0, 1), np.inf, r"weights\[4, 0, 1\] is inf \(token 4, layer 0\)"),
    "negative weight": (
        "weights",
        (4, 0, 1),
        -0.5,
        r"weights\[4, 0, 1\] is -0.5 .*: expected a number from 0 to 65536",
    ),
    "weight too large": (
        "weights",
        (4, 0, 1),
        1e6,
        r"weights\[4, 0, 1\] is 1000000\.0 .*: expected a number from 0 to 65536",
    ),
    "nan ahead": ("lookahead", (5, 0, 0), np.nan, r"lookahead/1\[5, 0, 0\] is nan \(token 5, layer 0\)"),
}


def test_an_impossible_row_is_refused_by_token_and_layer(tmp_path: Path) -> None:
    for what, (name, at, value, message) in WRONG.items():
        arrays = rows()
        arrays[name][at] = value
        path = stored(tmp_path / what / "a.zarr", arrays)
        for use in (compiled, reference, verified, *[inspected] * (name == "chosen")):
            with case(what, use.__name__):
                with pytest.raises(TraceError, match=rf"a\.zarr: {message}") as refused:
                    use(path)
                assert "\n" not in str(refused.value)


def test_no_engine_is_spared_the_check(tmp_path: Path) -> None:
    """A replay that reads ids alone."""
    arrays = rows()
    arrays["chosen"][7, 1, 0] = 500
    path = stored(tmp_path / "a.zarr", arrays)
    for engine in ENGINES:
        with case(engine), pytest.raises(TraceError, match="is 500"):
            replay(open_trace(path), configure(capacity="50%"), engine=engine)


def test_an_impossible_bias_is_refused_on_opening(tmp_path: Path) -> None:
    for value in (np.nan, np.inf, 500.0):
        with case(value):
            bias = np.zeros((LAYERS, EXPERTS), np.float32)
            bias[1, 3] = value
            with pytest.raises(TraceError, match=rf"router_bias of layer 1, expert 3 is {value}: expected a number"):
                stored(tmp_path / f"{value}.zarr", rows(), bias)


def test_a_folder_in_place_of_a_chunk_is_no_zeros(tmp_path: Path) -> None:
    file = stored(tmp_path / "a.zarr", rows()) / "chosen" / "c.0.0.0"
    file.unlink()
    file.mkdir()
    with pytest.raises(TraceError, match=r"chosen/c\.0\.0\.0 is not a file; restore the trace"):
        open_trace(tmp_path / "a.zarr")


@pytest.mark.timeout(20)
@every("name", ["zarr.json", "chosen/zarr.json", "chosen/c.0.0.0"], apart=True)
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    file = stored(tmp_path / "a.zarr", rows()) / name
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(TraceError, match=r"missing or damaged|is not a file"):
        open_trace(tmp_path / "a.zarr")


def test_shards_of_sizes_that_no_writer_gives_are_refused(tmp_path: Path) -> None:
    """They would be memory to allocate."""
    path = stored(tmp_path / "a.zarr", rows())
    edit_attributes(path, lambda attributes: attributes.update(shard_tokens=1 << 20))
    reseal(path)
    with pytest.raises(
        TraceError, match=r"chosen has shards \(512, 2, 2\) of \(64, 2, 2\), expected \(1048576, 2, 2\)"
    ):
        open_trace(path)
    edit_attributes(path, lambda attributes: attributes.update(shard_tokens=1 << 21))
    with pytest.raises(TraceError, match="shard_tokens: expected at most 1048576"):
        open_trace(path)


def test_the_command_line_ends_with_2_and_one_line(tmp_path: Path) -> None:
    arrays = rows()
    arrays["chosen"][7, 1, 0] = 500
    path = stored(tmp_path / "a.zarr", arrays)
    done = moereplay_here("inspect", "--full", path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "chosen[7, 1, 0] is 500 (token 7, layer 1)" in done.stderr
