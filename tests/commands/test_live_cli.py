"""`moereplay live` as a user meets it, on a tiny random model with a tokenizer of one token per character."""

from __future__ import annotations

import json
import re
from pathlib import Path

import polars as pl
import pytest

from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace, verify
from tests.kit.command import moereplay_here as moereplay
from tests.kit.every import every
from tests.kit.tiny_checkpoints import checkpoint

SETTINGS = ("--capacity", "40%", "--device", "cpu")
CHANGING = ("--routing", "cache_prior:lam=.8:top_j=1", "--prefetch", "top_k")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Contexts of 64 tokens."""
    return checkpoint(tmp_path_factory.mktemp("live") / "tiny")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """96 tokens."""
    path = tmp_path / "text.txt"
    path.write_text("Experts that do not fit fast memory are cached there. " * 2)
    return path


def recorded(model: Path, text: Path, path: Path) -> Trace:
    """A live run of two windows, written as a trace."""
    windows = ("--text", text, "--window", 24, "--prompt-tokens", 8, "--limit", 2)
    assert moereplay("live", model, *windows, *SETTINGS, *CHANGING, "--record", path).returncode == 0
    return open_trace(path)


@pytest.mark.slow
def test_a_recorded_run_replays_to_the_same_numbers(model: Path, text: Path, tmp_path: Path) -> None:
    trace = recorded(model, text, tmp_path / "run.zarr")
    verify(trace)
    assert (trace.requests, trace.tokens, trace.prompt_lengths.tolist()) == (2, 48, [8, 8])
    assert "recorded live under routing cache_prior:lam=0.8:top_j=1" in trace.header.provenance.notes[0]
    again = moereplay("live", model, "--trace", trace.path, *SETTINGS, *CHANGING, "--json")
    replayed = moereplay("replay", trace.path, *SETTINGS[:2], *CHANGING, "--json")
    ours, theirs = json.loads(again.stdout), json.loads(replayed.stdout)
    assert (ours["about"]["label"], theirs["about"]["label"]) == ("LIVE, emulated", "SIMULATED, open-loop")
    for part in ("config", "totals", "per_layer", "per_request"):
        assert ours[part] == theirs[part]
    assert ours["quality"]["total"]["tokens"] == 46 and ours["quality"]["total"]["kl"] > 0


def test_the_table_says_what_is_simulated_and_what_it_costs(model: Path, text: Path, tmp_path: Path) -> None:
    events = tmp_path / "events.parquet"
    ran = moereplay(
        "live", model, "--text", text, "--window", 24, *SETTINGS, "--miss", "drop:keep=1", "--events", events
    )
    assert ran.stdout.startswith("LIVE, emulated: tiny, 4 requests, 96 tokens\n")
    for heading in ("hit rate", "collisions", "SIMULATED TTFT ms", "perplexity, unmodified", "KL, nats per token"):
        assert re.search(rf"^{heading} +[\d.,e-]+$", ran.stdout, re.M)  # a line for each figure
    assert "tokens/s" in ran.stderr and f"wrote {events}" in ran.stderr
    assert {"hits", "expert"} <= set(pl.read_parquet(events)["kind"])


@pytest.mark.slow
def test_a_preset_and_a_policy_of_ones_own_run_live_as_they_replay(model: Path, text: Path, tmp_path: Path) -> None:
    """specmd-4 routes by the cache; the options beside it, a policy file's eviction among them, win."""
    (tmp_path / "mine.py").write_text(
        "from moereplay.policies.contract import Eviction\n\n\n"
        "def key(now, experts, copies, own, y):\n    return -experts[y // now['precisions']]['last_use']\n\n\n"
        "POLICY = Eviction(name='newest', summary='evict the newest last use', source='a test', key=key)\n"
    )
    chosen = (
        "--preset",
        "specmd-4",
        "--policy-file",
        tmp_path / "mine.py",
        "--eviction",
        "newest",
        "--capacity",
        "40%",
    )
    windows = ("--text", text, "--window", 24, "--prompt-tokens", 8, "--limit", 2, "--record", tmp_path / "run.zarr")
    live = moereplay("live", model, *windows, *chosen, "--device", "cpu", "--json")
    assert live.returncode == 0, live.stderr
    ours, theirs = (
        json.loads(live.stdout),
        json.loads(moereplay("replay", tmp_path / "run.zarr", *chosen, "--json").stdout),
    )
    assert ours["config"]["eviction"].startswith("newest@") and ours["config"]["contract"] == "sequential"
    assert ours["config"]["routing"] == "cache_prior:lam=0.3:top_j=0"
    assert ours["config"] == theirs["config"] and ours["totals"] == theirs["totals"]


@pytest.mark.slow
def test_prompts_are_continued_under_the_policies(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("fast memory\nslow\n")
    written = []
    for seed in (1, 1, 2):
        path = tmp_path / f"{len(written)}.zarr"
        sampled = ("--max-new-tokens", 9, "--temperature", 1.5, "--seed", seed, "--record", path, "--no-quality")
        ran = moereplay("live", model, "--prompts", prompts, *SETTINGS, *CHANGING, *sampled)
        assert ran.returncode == 0 and "perplexity" not in ran.stdout
        written.append(open_trace(path).read("token_ids").tolist())
    assert len(written[0]) == len("fast memory") + 8 + len("slow") + 8
    assert written[0] == written[1] != written[2]


@every(
    "arguments, said",
    [
        ((), "one of --trace, --text, --prompts"),
        (("--text", "TEXT", "--window", 65), "--window 65 exceeds the model's context of 64 tokens"),
        (("--text", "TEXT", "--window", 24, "--capacity", "1experts", "--scope", "per_layer"), "1experts"),
        (("--text", "TEXT", "--record", "TEXT"), "exists; choose another"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_code_2(
    arguments: tuple[object, ...], said: str, model: Path, text: Path
) -> None:
    ran = moereplay("live", model, "--device", "cpu", *(text if part == "TEXT" else part for part in arguments))
    assert ran.returncode == 2 and not ran.stdout
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("moereplay: ") and said.replace("TEXT", str(text)) in last


def test_an_interrupted_run_leaves_nothing(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moereplay.tracegen.live.source.Emulation.take", interrupt)
    ran = moereplay("live", model, "--text", text, "--window", 24, *SETTINGS, "--record", tmp_path / "run.zarr")
    assert ran.returncode == 130 and ran.stderr.splitlines()[-1] == "interrupted: nothing was written"
    assert not list(tmp_path.glob("run.zarr*"))


@pytest.mark.slow
def test_another_models_trace_is_refused(model: Path, text: Path, tmp_path: Path) -> None:
    trace = recorded(model, text, tmp_path / "run.zarr")
    other = checkpoint(tmp_path / "other", "olmoe", initializer_range=0.2)
    ran = moereplay("live", other, "--trace", trace.path, *SETTINGS)
    assert ran.returncode == 2
    assert "was recorded from other weights (tiny) than those of other" in ran.stderr.splitlines()[-1]
