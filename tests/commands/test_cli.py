"""The command line as a user meets it: tables, JSON, files; one line and exit code 2 for what they can mend."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import polars as pl
import pytest

from moereplay.analysis.figures.catalogue import FIGURES
from moereplay.commands import NAMES
from moereplay.commands.terminal import say_when_compiling
from moereplay.policies.errors import PolicyError
from moereplay.results.counters import COUNTERS
from moereplay.results.result import DOCUMENTED
from moereplay.results.settings import LISTED
from moereplay.simulator.compiled import engine
from moereplay.simulator.compiled.fast_path import fast_path, priced_path
from moereplay.simulator.compiled.kernel import kernel, priced_kernel
from moereplay.simulator.jit import machine_code
from moereplay.traces.store import open_trace
from tests.kit.command import moereplay_alone
from tests.kit.command import moereplay_here as moereplay
from tests.kit.every import every

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "traces" / "samples" / "miniature.zarr"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A trace of one second's work: two layers' worth of everything that policies may need."""
    path = tmp_path_factory.mktemp("cli") / "small.zarr"
    made = moereplay(
        *("synthesise", "--out", path, "--model", "mixtral-8x7b", "--requests", 2, "--prompt-tokens", 4),
        *("--decode-tokens", 6, "--reuse", 0.5, "--recall", ".8"),
    )
    assert made.returncode == 0, made.stderr
    return path


@pytest.fixture(scope="module")
def ids_only(tmp_path_factory):
    """A trace that a foreign tool might leave: ids, nothing else."""
    folder = tmp_path_factory.mktemp("ids")
    lines = ["request,token,layer,expert_0,expert_1"]
    lines += [f"0,{t},{layer},{t % 4},{4 + (t + layer) % 4}" for t in range(6) for layer in range(2)]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    made = moereplay("import", folder / "rows.csv", "--out", folder / "ids.zarr", "--expert-bytes", 1000)
    assert made.returncode == 0, made.stderr
    return folder / "ids.zarr"


def test_replay_prints_every_combination_beside_its_bound(small):
    shown = moereplay(
        "replay", small, "--capacity", "10%,30%", "--eviction", "lru,least_stale", "--prefetch", "none,top_k"
    )
    assert shown.returncode == 0, shown.stderr
    assert "SIMULATED" in shown.stdout
    assert "of 8 experts per layer" in shown.stdout
    assert "eviction lru, least_stale; prefetch none, top_k" in shown.stdout
    assert sum(line.split()[1:2] == ["least_stale"] for line in shown.stdout.splitlines()) == 4
    assert "belady" in shown.stdout


WHICH = """
import atexit, sys
from moereplay.command import main
slow = {"numba", "polars", "scipy", "zarr", "numpy.ma", "multiprocessing", "moereplay.traces.geometry"}
counted = lambda: sum(name.startswith("moereplay") for name in sys.modules)
atexit.register(lambda: print(sorted(slow & sys.modules.keys()), counted()))
main()
"""
#: Modules of this project that a replay of several capacities imports; each takes a millisecond.
MOST_MODULES = 102


@pytest.mark.slow
def test_a_second_replay_imports_neither_numba_nor_what_else_it_does_without(small):
    """They take longer than it does."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    command = [sys.executable, "-c", WHICH, "replay", str(small), "--capacity", "25%,50%"]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=True)
    slow, many = done.stdout.splitlines()[-1].rsplit(" ", 1)
    assert slow == "[]"
    assert int(many) <= MOST_MODULES


def test_json_is_one_document_with_every_counter(small):
    document = json.loads(moereplay("replay", small, "--capacity", "30%", "--json").stdout)
    assert set(document) == {"config", "about", "totals", "per_layer", "per_request", "metrics", "remarks"}
    assert set(COUNTERS) | {"time_ns", "lifetime"} == set(document["totals"])
    assert document["totals"]["accesses"] == sum(row["accesses"] for row in document["per_layer"])
    assert len(document["per_request"]) == 2


def test_json_has_every_ratio_and_time_null_where_undefined(small):
    arguments = ("replay", small, "--capacity", "30%", "--json", "--prefetch", "oracle:horizon=2")
    document = json.loads(moereplay(*arguments).stdout)
    metrics, totals = document["metrics"], document["totals"]
    assert set(metrics) == set(DOCUMENTED)
    assert metrics["hit_rate"] == totals["hits"] / totals["accesses"]
    assert metrics["predictor_recall"] == 1
    assert metrics["tpot_ms"] > 0 and 0 < metrics["belady_hit_rate"] <= metrics["compulsory_limit"]
    blank = json.loads(moereplay("replay", small, "--capacity", "30%", "--json", "--miss", "cascade").stdout)
    assert blank["metrics"]["predictor_recall"] is blank["metrics"]["belady_hit_rate"] is None
    assert ["several precisions" in line for line in blank["remarks"]] == [True]


def test_out_and_events_are_parquet_and_the_same_from_run_to_run(small, tmp_path):
    for name in ("a", "b"):
        arguments = (
            "--prefetch",
            "top_k",
            "--capacity",
            "30%",
            "--out",
            tmp_path / name,
            "--events",
            tmp_path / f"{name}.parquet",
        )
        assert moereplay("replay", small, *arguments).returncode == 0
    assert tables(tmp_path / "a") == tables(tmp_path / "b")
    assert len(tables(tmp_path / "a")) == 5
    events = pl.read_parquet(tmp_path / "a.parquet")
    assert events.equals(pl.read_parquet(tmp_path / "b.parquet"))
    assert {"dense", "expert", "transfer", "hits", "compulsory"} <= set(events["kind"])


def test_one_process_and_two_give_the_same_rows(small, tmp_path):
    for workers in (1, 2):
        arguments = ("--eviction", "lru,fifo", "--workers", workers, "--out", tmp_path / str(workers))
        assert moereplay("replay", small, "--capacity", "30%", *arguments).returncode == 0
    assert tables(tmp_path / "1") == tables(tmp_path / "2")
    assert len(tables(tmp_path / "1")) == 10


def tables(folder: Path) -> dict[str, bytes]:
    """Every table of every part."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("part-*/*.parquet"))}


NO_CHECK = "checks: none of these configurations was checked; `sweep run --every N` checks some"


@pytest.mark.slow
def test_plot_draws_what_the_results_can_feed(small, tmp_path):
    replayed = moereplay("replay", small, "--capacity", "10%,30%", "--eviction", "lru,fifo", "--out", tmp_path)
    assert replayed.returncode == 0, replayed.stderr
    drawn = moereplay("plot", tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        f"{name}.{kind}" for name in FIGURES for kind in ("csv", "png", "svg")
    }
    hint = f"left out: curves: no curve in {tmp_path}; create one with: moereplay curve TRACE --out {tmp_path}"
    assert [line for line in drawn.stderr.splitlines() if line.startswith("left out")] == [
        f"left out: {NO_CHECK}",
        hint,
    ]


@pytest.mark.slow
def test_plot_says_what_it_left_out_and_what_would_draw_it(small, tmp_path):
    assert moereplay("replay", small, "--capacity", "30%", "--scope", "per_layer", "--out", tmp_path).returncode == 0
    drawn = moereplay("plot", tmp_path)
    said = [line.removeprefix("left out: ") for line in drawn.stderr.splitlines() if line.startswith("left out")]
    need = "needs two capacities or more, found 30%; replay several, for example --capacity 1%,5%,25%"
    curve = f"moereplay curve TRACE --scope per_layer --out {tmp_path}"
    assert said == [
        "collisions_in_prefill: misses in a prompt's pass are never collisions; draw collisions_by_layer",
        f"hit_rate_by_capacity, complete_by_capacity, ttft_by_capacity, tpot_by_capacity: {need}",
        NO_CHECK,
        f"curves: no curve in {tmp_path}; create one with: {curve}",
    ]
    asked = moereplay("plot", tmp_path, "--figure", "misses")
    assert asked.returncode == 0 and "left out" not in asked.stderr


@pytest.mark.slow
def test_plot_names_the_curve_of_the_same_drafts_and_none_for_requests_that_arrive(small, tmp_path):
    drafted = ("--capacity", "30%", "--passes", "batch:2", "--draft", "2", "--seed", "3", "--engine", "reference")
    for arrivals, said in (
        ("all", "moereplay curve TRACE --passes batch:2 --draft 2:accept=0.7:rejected=other --seed 3 --out"),
        ("every:1", "left out: curves: no curve holds for requests that arrive"),
    ):
        folder = tmp_path / arrivals.partition(":")[0]
        assert moereplay("replay", small, *drafted, "--arrivals", arrivals, "--out", folder).returncode == 0
        assert said in moereplay("plot", folder).stderr


def test_open_loop_is_labelled(small):
    shown = moereplay("replay", small, "--capacity", "30%", "--routing", "cache_prior:lam=.3")
    assert "SIMULATED, open-loop" in shown.stdout


def test_lists_explain_themselves():
    assert "least_stale" in moereplay("policies").stdout
    assert "order" in moereplay("policies", "least_stale").stdout
    assert "a100-5gbps" in moereplay("platforms").stdout
    assert "SpecMD" in moereplay("platforms", "a100-5gbps").stdout
    assert "deepseek-v3" in moereplay("models").stdout
    air = moereplay("models", "glm-4.5-air").stdout  # 45 layers of 128 experts, 8 of which a token uses
    assert "45, after 1 without experts" in air and "128 in a layer, 8 per token" in air
    assert json.loads(moereplay("models", "glm-4.5-air", "--json").stdout)["geometry"]["layers"] == 45


def test_inspect_prints_a_table_or_a_document(small):
    assert "reuse" in moereplay("inspect", small).stdout
    document = json.loads(moereplay("inspect", small, "--full", "--json").stdout)
    assert document["summary"]["tokens"] == 20


def test_warm_start_saves_compulsory_misses(small, tmp_path):
    (tmp_path / "warm.json").write_text(json.dumps([[0, expert] for expert in range(8)]))
    cold = json.loads(moereplay("replay", small, "--capacity", "30%", "--json").stdout)["totals"]
    arguments = ("--capacity", "30%", "--json", "--warm", tmp_path / "warm.json")
    warm = json.loads(moereplay("replay", small, *arguments).stdout)["totals"]
    demanded = len(np.unique(open_trace(small).read("chosen")[:, 0]))
    assert warm["compulsory"] == cold["compulsory"] - demanded


REFUSALS = {
    "missing trace": (["inspect", "nowhere.zarr"], "nowhere.zarr"),
    "capacity below one expert": (["replay", "TRACE", "--capacity", "0.001%"], "less than one expert"),
    "unparsable capacity": (["replay", "TRACE", "--capacity", "much"], "'much'"),
    "unknown policy": (["replay", "TRACE", "--eviction", "lur"], "did you mean lru?"),
    "unknown parameter": (["replay", "TRACE", "--eviction", "least_stale:ordre=a"], "did you mean order?"),
    "parameter out of range": (["replay", "TRACE", "--prefetch", "top_k:depth=99"], "an integer from 1 to 8"),
    "deeper than recorded": (["replay", "TRACE", "--prefetch", "top_k:depth=2"], "the trace recorded 1"),
    "future under changed routing": (
        ["replay", "TRACE", "--eviction", "belady", "--routing", "cache_prior"],
        "belady reads the future",
    ),
    "needs logits": (["replay", "IDS", "--routing", "cache_prior", "--capacity", "50%"], "needs logits"),
    "needs look-ahead": (["replay", "IDS", "--prefetch", "top_k", "--capacity", "50%"], "needs lookahead"),
    "needs weights": (["replay", "IDS", "--eviction", "score", "--capacity", "50%"], "needs weights"),
    "unknown contract": (["replay", "TRACE", "--contract", "loose"], "atomic"),
    "unknown passes": (
        ["replay", "TRACE", "--passes", "all"],
        "unknown passes 'all': expected recorded, token, chunk:N, decode:N or batch:N",
    ),
    "unknown reset": (["replay", "TRACE", "--reset", "often"], "never, request or a number"),
    "unknown platform": (["replay", "TRACE", "--platform", "a100-5gb"], "did you mean a100-5gbps?"),
    "unknown engine": (["replay", "TRACE", "--engine", "warp"], "reference"),
    "no CPU": (["replay", "TRACE", "--miss", "split", "--platform", "phone-ufs4"], "requires a CPU"),
    "two documents": (["replay", "TRACE", "--json", "--eviction", "lru,fifo"], "--json requires one configuration"),
    "unknown model": (["models", "mixtrall-8x7b"], "mixtral-8x7b"),
    "unknown trace": (["replay", "miniture"], "miniture does not exist; did you mean miniature?"),
    "unknown subject": (["recommend", "miniture"], "unknown model or trace 'miniture': did you mean miniature?"),
    "unknown live model": (["live", "miniture", "--trace", "TRACE"], "did you mean miniature?"),
    "trace beside it": (["replay", "TYPO"], "did you mean "),
    "events of another kind": (["replay", "TRACE", "--events", "e.txt"], "a name that ends in .parquet or .csv"),
    "unknown name": (["policies", "lruu"], "did you mean lru?"),
    "plot of nothing": (["plot", "TRACE"], "which is a trace; make some with: moereplay replay /"),
    "foreign file": (["import", "FOREIGN", "--out", "new.zarr"], "FOREIGN"),
    "no sizes": (["import", "CSV", "--out", "new.zarr"], "--expert-bytes"),
    "existing output": (["synthesise", "--out", "TRACE"], "exists"),
    "warm names no expert": (["replay", "TRACE", "--warm", "WARM", "--capacity", "30%"], "warm lists expert 99"),
}


@pytest.fixture
def refused(small, ids_only, tmp_path):
    """Refuse one of REFUSALS by a command."""

    def refuse(name, command):
        paths = {"TRACE": small, "IDS": ids_only, "FOREIGN": tmp_path / "foreign.bin", "WARM": tmp_path / "warm.json"}
        paths["TYPO"] = f"{small}r"
        paths["CSV"] = ids_only.parent / "rows.csv"
        return command(*(paths.get(word, word) for word in REFUSALS[name][0]), cwd=tmp_path)

    (tmp_path / "foreign.bin").write_bytes(b"\x80\x05not a trace")
    (tmp_path / "warm.json").write_text("[[0, 99]]")
    return refuse


@every("name", REFUSALS, apart=True)
def test_bad_input_is_one_line_and_exit_code_two(name, refused, tmp_path):
    before = sorted(tmp_path.iterdir())
    answer = refused(name, moereplay)
    assert answer.returncode == 2, answer.stderr
    assert answer.stdout == ""
    assert len(answer.stderr.strip().splitlines()) == 1
    assert REFUSALS[name][1].replace("FOREIGN", "foreign.bin") in answer.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_commands_to_type_next_can_be_typed(small, tmp_path):
    """A folder with spaces or quotes, or that begins with a dash, is an argument of the printed command."""
    for folder in ("it's here", "-o"):
        ran = moereplay("replay", small, "--capacity", "50%", "--out", folder, cwd=tmp_path)
        said = ran.stderr.strip().splitlines()[-1].partition(": ")[2]
        again = moereplay(*shlex.split(said)[1:], cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        hints = [line for line in again.stderr.splitlines() if "moereplay curve" in line]
        assert len(hints) == 1 and Path(shlex.split(hints[0].rpartition("--out ")[2])[0]) == Path(folder)


def test_a_process_of_its_own_gives_the_same_answer(refused):
    alone, here = (refused("unknown policy", command) for command in (moereplay_alone, moereplay))
    assert (alone.returncode, alone.stdout, alone.stderr) == (2, here.stdout, here.stderr)


def test_help_says_which_options_may_be_repeated_and_which_are_comma_lists():
    once = [each for each in NAMES if not re.search(r"<list\[", moereplay(*each.split(), "--help").stdout)]
    assert 10 < len(once) < len(NAMES)
    for verb in set(NAMES) - set(once):
        for told in re.split(r"\n  --", moereplay(*verb.split(), "--help").stdout)[1:]:
            if "<list[" in told.partition(">")[0]:
                assert "repeatable" in told, (verb, told)
    listed = re.split(r"\n  --", moereplay("replay", "--help").stdout)
    for name in LISTED:
        (told,) = [each for each in listed if each.startswith(f"{name.replace('_', '-')} ")]
        assert re.search(r"[Cc]omma\s+list", told), told


def test_an_option_of_one_value_that_is_given_twice_is_refused(small):
    """The first would be ignored; flags and options of several values may be repeated."""
    twice = moereplay("replay", small, "--capacity", "25%", "--capacity", "50%")
    assert (twice.returncode, twice.stdout) == (2, "")
    assert "--capacity" in twice.stderr and "given 2 times" in twice.stderr
    again = moereplay("replay", small, "--capacity", "50%", "--json", "--json")
    assert again.returncode == 0, again.stderr


def test_a_damaged_chunk_is_refused_and_nothing_is_written(small, tmp_path, monkeypatch):
    monkeypatch.setenv("MOEREPLAY_DERIVED", str(tmp_path / "derived"))  # where nothing of the sound trace is kept
    damaged = tmp_path / "damaged.zarr"
    shutil.copytree(small, damaged)
    chunk = max((damaged / "chosen").glob("c*"), key=lambda path: path.stat().st_size)
    data = bytearray(chunk.read_bytes())
    data[len(data) // 3] ^= 4
    chunk.write_bytes(data)
    refused = moereplay("replay", damaged, "--capacity", "30%", "--out", tmp_path / "out")
    assert (refused.returncode, len(refused.stderr.strip().splitlines())) == (2, 1)
    assert "chosen" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_results_that_cannot_be_written_are_one_line(small, tmp_path):
    (tmp_path / "file").write_text("in the way")
    refused = moereplay("replay", small, "--capacity", "30%", "--out", tmp_path / "file")
    assert (refused.returncode, len(refused.stderr.strip().splitlines())) == (2, 1)
    assert "cannot write" in refused.stderr


def test_debug_shows_the_traceback_that_others_do_not_see(small):
    assert "Traceback" in moereplay_alone("replay", small, "--eviction", "lur", "--debug").stderr
    with pytest.raises(PolicyError, match="lur"):
        moereplay("--debug", "replay", small, "--eviction", "lur", "--debug")
    assert "Traceback" not in moereplay("replay", small, "--eviction", "lur").stderr


def test_a_read_only_trace_is_replayed_from_the_user_cache(small, tmp_path):
    folder = tmp_path / "readonly"
    shutil.copytree(small, folder / "small.zarr")
    before = open_trace(folder / "small.zarr").digest
    folder.chmod(0o555)
    try:
        shown = moereplay("replay", folder / "small.zarr", "--capacity", "30%")
    finally:
        folder.chmod(0o755)
    assert shown.returncode == 0, shown.stderr
    assert open_trace(folder / "small.zarr").digest == before


def test_both_engines_print_the_same(small):
    arguments = ("replay", small, "--capacity", "10%,30%", "--prefetch", "none,top_k", "--workers")
    engines = ((2,), (1, "--engine", "compiled"), (1, "--engine", "reference"))
    shown = [moereplay(*arguments, *engine).stdout for engine in engines]
    assert "lru" in shown[0]
    assert shown[0] == shown[1] == shown[2]


@pytest.mark.parametrize("way", [kernel, priced_kernel, fast_path, priced_path])
def test_the_wait_for_the_compiler_has_a_reason(way, tmp_path, monkeypatch, capsys):
    """An empty cache folder, in a process that has not asked for the kernel; then a folder with that kernel."""
    say_when_compiling()
    monkeypatch.setattr(machine_code, "folder", lambda: tmp_path)
    names = list[str]()
    monkeypatch.setattr(engine, "started", lambda name: names.append(name) or nullcontext(Mock()))
    monkeypatch.setattr(engine, "_wanted", set())
    with engine.compiled_apart(way):
        assert "compiling the" in capsys.readouterr().err
    (tmp_path / f"{way.__name__}.code").write_text("")
    monkeypatch.setattr(engine, "_wanted", set())
    with engine.compiled_apart(way):
        assert capsys.readouterr().err == ""
    assert names == [way.__name__]
