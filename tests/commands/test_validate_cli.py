"""`moereplay validate` as a user meets it: a tiny random model, recorded, runs live beside replays of its trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest
import transformers
from tokenizers import Tokenizer, models

from moereplay.tracegen.checkpoint import load
from moereplay.tracegen.record import Plan, record
from moereplay.tracegen.tokens import Work
from moereplay.traces.schema import Header, Request, Trace
from moereplay.traces.store import open_trace
from moereplay.traces.writer import write_trace
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded
from tests.kit.every import every
from tests.kit.tiny_models import tiny_model

WORDS = 96
LAMBDAS = "cache_prior:lam=0,cache_prior:lam=.5,cache_prior:lam=2"


class Recorded(NamedTuple):
    """A checkpoint's folder and a trace of it."""

    model: Path
    trace: Path

    def rewritten(
        self, path: Path, header: Callable[[Header], Header] = lambda h: h, **changed: Callable[[Request], object]
    ) -> Path:
        """The trace again at another path, with a changed header or changed fields of its last request."""
        trace = open_trace(self.trace)
        requests = [trace.request(at) for at in range(trace.requests)]
        requests[-1] = replace(requests[-1], **{name: change(requests[-1]) for name, change in changed.items()})
        write_trace(path, header(trace.header), requests, trace.router_bias)
        return path


def saved(folder: Path, **keys: Any) -> Path:
    """A checkpoint of a tiny random OLMoE, 3 layers of 16 experts, with a tokenizer of as many words as it knows."""
    tiny_model("olmoe", **keys).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{at}": at for at in range(WORDS)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Two requests of 20 tokens, the first 6 in one pass."""
    folder = tmp_path_factory.mktemp("validate")
    loaded = load(str(saved(folder / "tiny")), device="cpu")
    dice = np.random.default_rng(5)
    sequences = tuple(dice.integers(0, WORDS, 20).astype(np.int32) for _ in range(2))
    record(loaded, Work(sequences, "random words"), folder / "tiny.zarr", Plan(prompt_tokens=6, look_ahead=1))
    return Recorded(folder / "tiny", folder / "tiny.zarr")


def other_choice(token: int, layer: int) -> Callable[[Request], np.ndarray]:
    """The request's choices but for the first expert of one token in one layer."""

    def change(request: Request) -> np.ndarray:
        chosen = request.chosen.copy()
        chosen[token, layer, 0] = min(set(range(16)) - set(chosen[token, layer].tolist()))
        return chosen

    return change


# What holds


@pytest.mark.slow
def test_the_shipped_sets_agree_and_the_first_two_to_the_last_event(recorded: Recorded, tmp_path: Path) -> None:
    ran = moereplay("validate", recorded.trace, "--model", recorded.model, "--out", tmp_path, "--tolerance-hit-rate", 1)
    identical = [line for line in unfolded(ran.stdout).splitlines() if "closed loop identical" in line]
    assert [line.partition(" (")[0] for line in identical[:2]] == ["lru: identical", "least_stale: identical"]
    assert identical[2].startswith("cache_prior: ")
    assert ran.stdout.startswith("LIVE, emulated, versus SIMULATED: tiny, 2 requests, 40 tokens")
    rows = pl.read_parquet(tmp_path / "validation.parquet")
    assert rows["exact"].to_list() == [True, True, False]
    assert min(rows["events"].to_list()) > 100
    # per layer: 2 requests, one pass of 6 tokens and 14 of one each, which demand four experts each
    cells = rows["layers"][0].to_list()
    assert all(2 * (14 * 4 + 4) <= cell["live_accesses"] <= 2 * (14 * 4 + 16) for cell in cells)
    assert (tmp_path / "figures" / "validation.png").exists()


@pytest.mark.slow
def test_a_list_of_lambdas_is_a_sweep_with_quality_and_a_figure(recorded: Recorded, tmp_path: Path) -> None:
    arguments = ("--routing", LAMBDAS, "--tolerance-hit-rate", 1, "--tolerance-time", 10, "--out", tmp_path)
    ran = moereplay("validate", recorded.trace, "--model", recorded.model, *arguments, "--json")
    assert ran.returncode == 0, ran.stderr
    sets = json.loads(ran.stdout)["sets"]
    assert [each["name"] for each in sets] == [f"routing={text}" for text in LAMBDAS.split(",")]
    assert [each["lam"] for each in sets] == [0, 0.5, 2]
    # lambda 0 changes nothing: live equals the recording, and the model is itself
    assert (sets[0]["verdict"], sets[0]["quality"]["mean_kl"], sets[0]["quality"]["top1"]) == ("identical", 0, 1)
    assert sets[2]["quality"]["mean_kl"] > 0
    assert sets[2]["quality"]["tokens"] == 38  # nothing predicts the first token of a request
    rates = [sum(layer["live_misses"] for layer in each["layers"]) for each in sets]
    assert rates[0] > rates[2]
    drawn = moereplay("plot", tmp_path)
    assert drawn.returncode == 0 and "open_loop_error" in drawn.stderr


@pytest.mark.slow
def test_the_first_requests_alone_can_be_run(recorded: Recorded) -> None:
    ran = moereplay("validate", recorded.trace, "--model", recorded.model, "--requests", 1, "--eviction", "lfu")
    assert ran.returncode == 0, ran.stderr
    assert "1 request, 20 tokens" in ran.stdout and "given: identical" in ran.stdout
    bare = moereplay("validate", recorded.trace, "--model", recorded.model, "--requests", 1, "--no-events")
    assert "lru: identical (counters only; closed loop identical)" in bare.stdout


def test_how_experts_at_few_bits_are_stored_is_said_for_each_set(recorded: Recorded) -> None:
    sets = ("--requests", 1, "--miss", "fetch,fetch:bits=4", "--tolerance-hit-rate", 1, "--tolerance-time", 1)
    ran = moereplay("validate", recorded.trace, "--model", recorded.model, *sets, "--quantiser", "affine")
    assert ran.returncode == 0
    assert [line for line in ran.stderr.splitlines() if "experts at" in line] == [
        "miss=fetch:bits=4: experts at 4 bits by affine"
    ]


def test_named_sets_come_from_a_file(recorded: Recorded, tmp_path: Path) -> None:
    (tmp_path / "sets.toml").write_text("[base]\ncapacity='50%'\n[sets.a]\neviction='fifo'\n[sets.b]\nmiss='drop'")
    arguments = ("--sets", tmp_path / "sets.toml", "--tolerance-hit-rate", 1, "--tolerance-time", 10, "--json")
    ran = moereplay("validate", recorded.trace, "--model", recorded.model, *arguments)
    sets = json.loads(ran.stdout)["sets"]
    assert [(each["name"], each["exact"], each["closed_loop"]) for each in sets] == [
        ("a", True, None),
        ("b", False, None),
    ]
    assert {each["config"]["capacity"] for each in sets} == {"50%"}


def test_presets_are_sets_and_options_win(recorded: Recorded) -> None:
    arguments = ("--preset", "specmd-1,specmd-1+ls", "--capacity", "40%", "--miss", "fetch", "--json")
    ran = moereplay("validate", recorded.trace, "--model", recorded.model, *arguments)
    assert ran.returncode == 0, ran.stderr
    found = {each["name"]: each["config"] for each in json.loads(ran.stdout)["sets"]}
    assert {name: config["eviction"] for name, config in found.items()} == {
        "specmd-1": "lru",
        "specmd-1+ls": "least_stale",
    }
    assert {(config["contract"], config["capacity"], config["miss"]) for config in found.values()} == {
        ("sequential", "40%", "fetch")
    }


# What does not


@pytest.mark.parametrize(("token", "layer"), [(2, 1), (11, 2)])
def test_an_injected_disagreement_is_found_at_its_place(
    recorded: Recorded, tmp_path: Path, token: int, layer: int
) -> None:
    wrong = recorded.rewritten(tmp_path / "wrong.zarr", chosen=other_choice(token, layer))
    ran = moereplay("validate", wrong, "--model", recorded.model, "--eviction", "lru")
    assert ran.returncode == 1
    was = open_trace(recorded.trace).request(1).chosen[token, layer].tolist()
    is_now = open_trace(wrong).request(1).chosen[token, layer].tolist()
    # request 0 has 15 passes; request 1's first holds tokens 0 to 5
    place = f"request 1, token {token}, pass {15 + max(0, token - 5)}, layer {layer}"
    assert f"not allowed: {place}: the model's choice differs: live {was}; replayed {is_now}" in unfolded(ran.stdout)
    assert "given: differs" in ran.stdout and "closed loop identical" in ran.stdout


def test_an_open_loop_outside_its_tolerance_is_exit_code_one(recorded: Recorded) -> None:
    arguments = ("--routing", "cache_prior:lam=2", "--tolerance-hit-rate", 0, "--tolerance-time", 0)
    ran = moereplay("validate", recorded.trace, "--model", recorded.model, *arguments)
    assert (ran.returncode, "outside tolerance" in ran.stdout) == (1, True)


def test_another_dtype_is_told(recorded: Recorded) -> None:
    arguments = ("--dtype", "bfloat16", "--requests", 1, "--eviction", "lru")
    ran = moereplay("validate", recorded.trace, "--model", recorded.model, *arguments)
    assert "note: the trace was recorded in float32, the model runs in bfloat16" in ran.stderr
    assert ran.returncode == 1  # experts of half the bytes take half the time


# What is refused


REFUSALS: dict[str, tuple[tuple[str, ...], str]] = {
    "the future": (("--eviction", "belady"), "policy set given: eviction belady needs the future"),
    "a policy that is none": (("--eviction", "lur"), "policy set given: unknown eviction policy 'lur': did you mean"),
    "a look-ahead that was not recorded": (
        ("--prefetch", "top_k:depth=2"),
        "looks 2 layers ahead; the trace recorded 1",
    ),
}


def refused(ran: CompletedProcess[str]) -> str:
    assert (ran.returncode, len(ran.stderr.strip().splitlines())) == (2, 1), ran.stderr
    return ran.stderr


@every("name", REFUSALS)
def test_bad_options_are_one_line_and_exit_code_two(recorded: Recorded, name: str) -> None:
    arguments, said = REFUSALS[name]
    assert said in refused(moereplay("validate", recorded.trace, "--model", recorded.model, *arguments))


def test_passes_that_a_live_run_cannot_have_are_refused(recorded: Recorded, tmp_path: Path) -> None:
    (tmp_path / "sets.toml").write_text("[sets.slow]\npasses = 'token'")
    ran = moereplay("validate", recorded.trace, "--model", recorded.model, "--sets", tmp_path / "sets.toml")
    assert "policy set slow: --passes token" in refused(ran)


def test_a_trace_without_tokens_cannot_be_run(recorded: Recorded, tmp_path: Path) -> None:
    trace = open_trace(recorded.trace)
    bare = [replace(trace.request(at), token_ids=None, nll=None) for at in range(trace.requests)]
    write_trace(tmp_path / "bare.zarr", trace.header, bare, trace.router_bias)
    assert "has no token ids" in refused(moereplay("validate", tmp_path / "bare.zarr", "--model", recorded.model))


def test_another_model_is_named_by_what_differs(recorded: Recorded, tmp_path: Path) -> None:
    smaller = saved(tmp_path / "smaller", num_experts=8)
    sizes = moereplay("validate", recorded.trace, "--model", smaller)
    assert "another model: experts 16, smaller has 8" in refused(sizes)
    other = saved(tmp_path / "other", initializer_range=0.5)
    weights = moereplay("validate", recorded.trace, "--model", other)
    assert "was recorded from other weights (tiny)" in refused(weights)
    foreign = recorded.rewritten(tmp_path / "foreign.zarr", token_ids=lambda _: np.full(20, 1096, np.int32))
    vocabulary = moereplay("validate", foreign, "--model", recorded.model)
    assert "request 1 has token 1096; the vocabulary has 96" in refused(vocabulary)


def test_a_trace_of_a_local_folder_asks_where_it_is(recorded: Recorded) -> None:
    # a trace holds no path of the machine that it was recorded on
    assert "'tiny'; pass --model" in refused(moereplay("validate", recorded.trace))


def test_the_model_that_the_trace_names_is_the_default(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_the_hub(header: Header) -> Header:
        named = header.provenance.model_copy(update={"model": "tiny", "revision": "c0ffee"})
        return header.model_copy(update={"provenance": named})

    trace = recorded.rewritten(tmp_path / "hub.zarr", of_the_hub)
    monkeypatch.chdir(recorded.model.parent)  # where `tiny` is a folder
    ran = moereplay("validate", trace, "--requests", 1, "--eviction", "lru")
    assert (ran.returncode, "given: identical" in ran.stdout) == (0, True)


def test_numbers_are_python_s_own(recorded: Recorded) -> None:
    """The comparison is a library too: no command line, no files."""
    from moereplay.analysis.validation import Runs, compare
    from moereplay.simulator.config import configure
    from moereplay.simulator.replay import replay
    from moereplay.tracegen.live.run import requests_of
    from moereplay.tracegen.live.run import run as run_live

    trace: Trace = open_trace(recorded.trace)
    config = configure(capacity="25%", eviction="lfu")
    live = run_live(load(str(recorded.model), device="cpu"), requests_of(trace), config, log=True)
    found = compare("lfu", Runs(live.result, replay(trace, config, log=True), recorded=live.trace()), trace)
    assert (found.verdict(), found.closed_ran) == ("identical", False)
    assert found.measures[0].live == live.result.totals["hits"] / live.result.totals["accesses"]
