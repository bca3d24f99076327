"""`moereplay verify`: llama.cpp's own counts, recorded from two builds on the bundled model, beside replays."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from moereplay.calibration.engine_log import runs_of, runs_of_lines
from moereplay.calibration.rows import read_filed
from moereplay.calibration.verify import LLAMA_CPP, RULES, Verifier, most_tokens, small_batches
from moereplay.simulator.errors import ConfigError
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.llama.binding import library_file
from moereplay.traces.schema import Geometry, Header, Request, Trace, memory_trace
from moereplay.traces.store import open_trace
from moereplay.traces.writer import TraceWriter
from tests.kit.command import moereplay_here
from tests.kit.every import every

LOGS = Path(__file__).parent / "llama_moe_cache"
SAMPLE = Path(__file__).parents[2] / "traces" / "samples" / "miniature.zarr"
SIZE = "impl: GPU0 MoE cache size = 16.00 MiB for 48.00 MiB of host experts"
COUNTS = "llama_moe_cache: ubatch <= 8: hits = 12, misses = 3, hit rate = 80.00%, uploaded = 1.50 MiB"
TIME = "llama_perf_context_print:        eval time =      40.00 ms /     4 runs   (   10.00 ms per token)"


def in_f32() -> Trace:
    """The bundled recording's tokens, routed by llama.cpp with the F32 file of the model that the logs are of."""
    sample, size = open_trace(SAMPLE), 3 * 128 * 32 * 4
    assert sample.geometry.expert_bytes[0] == size // 2
    geometry = sample.geometry.model_copy(update={"expert_bytes": (size,) * sample.geometry.layers, "expert_bits": 32})
    header = sample.header.model_copy(update={"geometry": geometry, "lookahead_depth": 0})
    routed = np.load(LOGS / "routing.npz")["chosen"].astype(np.int16)
    ranges = pairwise(sample.request_offsets.tolist())
    pairs = zip(ranges, sample.prompt_lengths.tolist(), strict=True)
    ids = sample.read("token_ids", 0, sample.tokens)
    return memory_trace(header, [Request(routed[a:b], prompt, token_ids=ids[a:b]) for (a, b), prompt in pairs])


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """That trace in a file."""
    path, trace = tmp_path_factory.mktemp("traces") / "f32.zarr", in_f32()
    with TraceWriter.create(path, trace.header) as writer:
        for number in range(trace.requests):
            writer.append(trace.request(number))
        writer.finish()
    return path


@every("build, rule", [("11739", "slru:misses=by_id"), ("0.7.0", "slru:protected=0:misses=by_id")], apart=True)
def test_replays_have_the_counts_of_llama_cpp_at_eight_capacities(build, rule):
    """It attends in another order than the recording did, so that last bits differ: 6 hits at most, of 26,158."""
    found = Verifier(in_f32()).verify(runs_of(str(LOGS / f"{build}.log")))
    assert found.rule.startswith(rule) and found.matches
    assert [row.label.split()[1] for row in found.rows] == ["169", "255", "340", "425", "511", "639", "767", "937"]
    for row in found.rows:
        assert row.engine
        assert row.engine.hits + row.engine.misses == row.replayed.hits + row.replayed.misses == 26_158
        assert abs(row.replayed.hits - row.engine.hits) <= 6, row.label
        assert row.engine.read == pytest.approx(row.engine.misses * 49_152, abs=2**20 / 50)
    assert sum(row.replayed.hits == row.engine.hits for row in found.rows if row.engine) >= 4
    other = Verifier(in_f32())
    other.__dict__["_rules"] = {each: "" for each in RULES if each != rule}
    wrong = other.verify(runs_of(str(LOGS / f"{build}.log")))
    assert (wrong.points or 0) > 1 and not wrong.matches
    assert f"is up to {wrong.points:.2f} points off, and up to 0.5 is a match" in wrong.remarks[0]


@pytest.mark.slow
def test_what_is_printed_and_appended(stored, tmp_path):
    log, rows = LOGS / "11739.log", tmp_path / "rows.jsonl"
    words = ("verify", stored, "--log", log, "--row", rows)
    for _ in range(2):
        ran = moereplay_here(*words, "--device", "two cores", "--build", "11739")
        assert ran.returncode == 0, ran.stderr
    assert "a segmented LRU, as in build 11739); it matches" in ran.stdout and "no rule" not in ran.stderr
    assert "0.7.0 (build 11669) and before: up to" in ran.stderr
    found = read_filed(rows)
    assert len(found) == 2 * (2 * 8 - 2) and found[:14] == found[14:]  # the times of two capacities are fitted
    assert {row.role for row in found} == {"preset", "held out"}
    hits = [row for row in found if row.quantity == "hits, %"]
    assert all(abs(row.predicted - row.measured) < 0.1 for row in hits)
    assert all("the nearest of 2 rules" in row.predicted_from for row in hits)
    assert {(row.machine, row.engine) for row in found} == {("two cores", f"{LLAMA_CPP} 11739")}
    assert {row.settings["trace"] for row in found} == {open_trace(stored).digest}
    ran = moereplay_here(*words, "--device", "two cores")
    assert ran.returncode == 2 and "--row requires --device, the machine in words, and --build" in ran.stderr
    rows.write_text("a,b\n")
    ran = moereplay_here(*words)
    assert ran.returncode == 2
    assert ":1: expected JSON, found" in ran.stderr


def test_a_time_is_predicted_between_two_capacities(stored, tmp_path):
    for number, (slots, ms) in enumerate([(169, 100.0), (511, 40.0), (937, 10.0)]):
        lines = [
            SIZE.replace("16.00", f"{(slots + 1) * 49152 / 2**20:.2f}"),
            f"impl: 16 layers, f32: {slots} slots (1%)",
        ]
        lines += [f"eval time = {ms * 4} ms / 4 runs", COUNTS]
        (tmp_path / f"{number}.log").write_text("\n".join(lines))
    words = [word for number in range(3) for word in ("--log", f"{number}.log")]
    ran = moereplay_here("verify", stored, *words, "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    base, slope = said["time"]["base_ms"], said["time"]["ms_per_miss"]
    for row in said["capacities"]:
        assert row["predicted_ms"] == pytest.approx(base + slope * row["replay"]["misses"] / 192)
    assert [row["verdict"] for row in said["capacities"]] == ["fit", "outside", "fit"]
    assert "the engine ran other tokens" in said["remarks"][-1]
    off = max(abs(row["points"]) for row in said["capacities"])
    assert (said["points"], said["matches"]) == (off, False) and "no rule matches" in "".join(said["remarks"])


@every(
    "lines, said",
    [
        ([SIZE.replace("48.00", "96.00"), COUNTS], "is the log of another model: 96.00 MiB of experts"),
        (
            [SIZE, "impl: 12 layers, f32: 300 slots (2%)", COUNTS],
            "another model: its experts lie in groups of 12 layers",
        ),
        ([COUNTS], "does not say how large its cache is; pass --log run.log@SIZE"),
        ([SIZE], "no counters and no times"),
        ([SIZE, TIME], "no counters in run.log"),
        ([SIZE.replace("GPU0", "GPU1"), SIZE, COUNTS], "expected one on one device"),
        ([SIZE.replace("16.00", "0.30"), COUNTS], "too small for one token"),
        (['{"timings": {"predicted_per_token_ms": -1}}'], "no time per decoded token"),
        (['[{"n_gen": 4, "avg_ns": 8000000, "n_cpu_moe": 3}]'], "left experts to the CPU"),
    ],
    apart=True,
)
def test_logs_that_do_not_fit_are_refused(lines, said, stored, tmp_path):
    (tmp_path / "run.log").write_text("\n".join(lines))
    ran = moereplay_here("verify", stored, "--log", "run.log", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, ""), lines
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_size_that_is_not_the_logs_is_refused_and_options_need_each_other(stored, tmp_path):
    (tmp_path / "run.log").write_text(f"{SIZE}\n{COUNTS}\n")
    for words, said in [
        (("--log", "run.log@24MiB"), "has a cache of 16.00 MiB, and not 24MiB"),
        (("--log", "run.log@large"), "large"),
        (("--log", "none.log"), "No such file"),
        ((), "pass either --log FILE"),
        (("--log", "run.log", "--model", "a.gguf"), "pass either --log FILE"),
        (("--model", "a.gguf"), "a.gguf: no such file"),
        (("--log", "run.log", "--preset", "llama"), "unknown preset 'llama'"),
    ]:
        ran = moereplay_here("verify", stored, *words, cwd=tmp_path)
        assert ran.returncode == 2, words
        assert said in ran.stderr
    ran = moereplay_here("verify", stored, "--log", "run.log@16MiB", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "expected times at two capacities or more, found 0" in ran.stderr


def test_server_bench_and_logs_of_tokens_are_read(stored, tmp_path):
    (tmp_path / "answer.json").write_text('{"content": "a", "timings": {"predicted_per_token_ms": 12.5}}')
    (tmp_path / "bench.json").write_text(
        '[{"n_prompt": 512, "n_gen": 0, "avg_ns": 9}, {"n_gen": 4, "avg_ns": 8000000}]'
    )
    (tmp_path / "tokens.csv").write_text("wall_ms,read_bytes\n" + "20,4915200\n" * 12)
    assert runs_of(str(tmp_path / "answer.json"))[0].ms == 12.5
    assert (runs_of(str(tmp_path / "bench.json"))[0].ms, runs_of(str(tmp_path / "bench.json"))[0].resident) == (
        2.0,
        True,
    )
    words = ("--log", "tokens.csv@25%", "--log", "answer.json@50%", "--log", "bench.json", "--preset", "imp", "--json")
    ran = moereplay_here("verify", stored, *words, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["rule"] == "lru (preset imp)"
    first, second, resident = said["capacities"]
    assert first["engine"]["misses"] == 100 * 192
    assert [each["ms"] for each in (first, second, resident)] == [20, 12.5, 2]
    assert [each["verdict"] for each in (first, second, resident)] == ["fit", "outside", "fit"]


def test_requests_of_a_server_are_averaged_and_runs_follow_each_other():
    lines = [SIZE, TIME, TIME.replace("40.00", "80.00"), f"prompt {TIME[30:].strip()}", COUNTS, SIZE, COUNTS]
    first, second = runs_of_lines("a", lines)
    assert (first.ms, first.timed, first.hits, second.ms) == (15, 8, 12, None)


def test_what_the_cache_sees_of_a_prompt():
    """A prompt of 40 tokens counts one row in the last layer; one of 3 counts all, but one row in the last layer."""
    rng = np.random.Generator(np.random.PCG64(0))
    requests = [Request(rng.random((n, 2, 8)).argsort(-1)[..., :2].astype(np.int16), p) for n, p in [(42, 40), (5, 3)]]
    header = Header(geometry=Geometry(layers=2, experts=8, k=2, expert_bytes=(10, 10)))
    seen = small_batches(memory_trace(header, requests), 32)
    assert (seen.request_offsets.tolist(), seen.prompt_lengths.tolist()) == ([0, 3, 8], [1, 3])
    rows = seen.read("chosen", 0, 8)
    assert (rows[0] == [[-1, -1], requests[0].chosen[39, 1]]).all()
    assert (rows[1:3] == requests[0].chosen[40:]).all()
    assert (rows[3:, 0] == requests[1].chosen[:, 0]).all()
    assert (rows[3:5, 1] == -1).all()
    assert (rows[5:] == requests[1].chosen[2:]).all()
    one = small_batches(memory_trace(header, requests), 32, frozenset({1}))
    assert (one.read("chosen", 0, 8)[:, 0] == -1).all()
    assert [most_tokens(header.geometry, slots) for slots in (2, 5, 8)] == [1, 2, 32]


def test_experts_of_two_sizes_are_two_caches():
    """Groups of layers have their shares of the bytes, and in each one slot is kept empty."""
    rng = np.random.Generator(np.random.PCG64(1))
    request = Request(rng.random((40, 3, 8)).argsort(-1)[..., :2].astype(np.int16), 4)
    header = Header(geometry=Geometry(layers=3, experts=8, k=2, expert_bytes=(1 << 20, 1 << 20, 2 << 20)))
    verifier = Verifier(memory_trace(header, [request]))
    (row,) = verifier.verify(runs_of_lines("a", [SIZE.replace("48.00", "32.00"), COUNTS])).rows
    assert row.label == "40.6% 10 experts"  # 8 of 1 MiB and 4 of 2 MiB fit, less one each
    with pytest.raises(ConfigError, match="unknown preset"):
        Verifier(memory_trace(header, [request]), LLAMA_CPP + "s")


@pytest.mark.slow
def test_llama_cpp_without_an_expert_cache_says_so(stored, tmp_path):
    try:
        library_file()
    except RecordError as missing:
        pytest.skip(str(missing))
    from moereplay.tracegen.checkpoint import load
    from tests.kit.gguf_models import of_tokenizer, write_gguf

    miniature = SAMPLE.parents[2] / "tracegen" / "miniature"
    write_gguf(tmp_path / "mini.gguf", load(str(miniature)).model, of_tokenizer(miniature / "tokenizer.json"))
    ran = moereplay_here("verify", stored, "--model", tmp_path / "mini.gguf")
    assert ran.returncode in (0, 2), ran.stderr
    if ran.returncode:
        assert "no expert cache" in ran.stderr or "no RPC backend" in ran.stderr, ran.stderr
