"""Benchmarks run from end to end at a tiny size: their figures mean nothing, but they cannot rot."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.faults import faults
from benchmarks.mutants import Mutant, concerning, drawn, mutants

ROOT = Path(__file__).resolve().parents[2]
SPEED = ROOT / "benchmarks" / "engine_speed.py"
#: Ratios per part: of two shapes, capacities, prefetches and policies.
#: What transformers imports where it is installed says this, which is not ours to mend.
THEIRS = "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
ROWS = {"a": 12, "c": 2, "d": 4, "e": 3, "f": 6, "g": 2, "i": 33, "j": 18}


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-W", THEIRS, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False, cwd=cwd)


@pytest.mark.long
def test_engine_speed_measures_every_part(tmp_path: Path) -> None:
    """Part (h) compiles the engine a second time, and is left to `make bench`; its patches are checked below."""
    out = tmp_path / "speed.json"
    done = run(SPEED, "--quick", "--rounds", 1, "--parts", ",".join(ROWS), "--out", out)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert {part: sum(row["part"] == part for row in document["rows"]) for part in ROWS} == ROWS
    assert all(row["ratio"] > 0 for row in document["rows"])
    assert document["machine"]["numba"]
    assert "deepseek-v3" in done.stdout


@pytest.mark.longest
def test_engine_speed_beside_libcachesim(tmp_path: Path) -> None:
    pytest.importorskip("libcachesim", reason="libcachesim has no wheel for this machine")
    out = tmp_path / "speed.json"
    done = run(SPEED, "--quick", "--rounds", 1, "--parts", "b", "--out", out)
    assert done.returncode == 0, done.stderr
    assert [row["under"] for row in json.loads(out.read_text())["rows"]] == ["libCacheSim"] * 42


@pytest.mark.longest
def test_sweep_speed_measures_what_it_says(tmp_path: Path) -> None:
    done = run(ROOT / "benchmarks" / "sweep_speed.py", "--quick", "--rounds", 1, "--drawn", 2, "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document["seconds"]) == {"engine", "one", "two"}
    assert min(*document["seconds"].values(), *document["resumed"].values()) > 0
    few, many = (document[name]["one"] - document[name]["engine"] for name in ("seconds", "seconds_of_four_times"))
    share, start = document["overhead"]["share"], document["overhead"]["start"]
    assert few == pytest.approx(start + share * document["seconds"]["engine"])
    assert many == pytest.approx(start + share * document["seconds_of_four_times"]["engine"])
    assert len(list(tmp_path.glob("many/part-*"))) > 0


@pytest.mark.long
def test_long_traces_are_measured_and_removed(tmp_path: Path) -> None:
    size = ("--rows", 2000, "--layers", 4, "--experts", 8, "--k", 2, "--request-tokens", 100)
    out, folder = tmp_path / "long.json", tmp_path / "long"
    done = run(ROOT / "studies" / "long_traces.py", *size, "--folder", folder, "--out", out)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert (document["rows"], document["requests"]) == (2000, 5)
    accesses = {stage["said"][0] for stage in document["stages"] if stage["said"]}
    assert accesses == {str(2000 * 2)} and not folder.exists()


def test_the_sources_that_the_benchmark_edits_are_as_it_expects(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from replay_servers import TAKEN_OUT, bare_tree\n"
        "bare_tree(Path(sys.argv[2]) / 'tree'); print(len(TAKEN_OUT))"
    )
    done = run("-c", script, ROOT / "benchmarks", tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "tree" / "moereplay" / "simulator" / "compiled" / "counters.py").read_text()
    assert text.count("):\n    return\n") == int(done.stdout) > 0


def test_every_fault_can_be_planted_and_its_tests_are_there() -> None:
    listed = faults()
    assert len({each.what for each in listed}) == len(listed) >= 30
    for each in listed:
        compile(each.planted((ROOT / each.file).read_text()), each.file, "exec")
        assert [name for name in each.tests if not (ROOT / name).is_file()] == []


MUTABLE = '''"""A text with < 3."""
def f(a: int | None, b: int) -> int:
    for each in (a, b):
        if each is not None and not each <= 2:
            break
    a += g(a, b)
    return min(a, b) % 2
'''


def test_mutants_change_one_token_of_what_is_run() -> None:
    """No annotation, no docstring; each mutant compiles."""
    made = [mutant.planted(MUTABLE) for mutant in mutants("f.py", MUTABLE)]
    for text in made:
        compile(text, "f.py", "exec")
    changed = [line for text in made for line in set(text.splitlines()) - set(MUTABLE.splitlines())]
    assert Counter(map(str.strip, changed)) == {
        "if each is None and not each <= 2:": 1,
        "if each is not None or not each <= 2:": 1,
        "if each is not None and  each <= 2:": 1,
        "if each is not None and not each < 2:": 1,
        "if each is not None and not each <= 3:": 1,
        "if each is not None and not each <= 1:": 1,
        "continue": 1,
        "a -= g(a, b)": 1,
        "a += g(b, a)": 1,
        "return None": 1,
        "return max(a, b) % 2": 1,
        "return min(b, a) % 2": 1,
        "return min(a, b) // 2": 1,
        "return min(a, b) % 3": 1,
        "return min(a, b) % 1": 1,
    }


@pytest.mark.slow
def test_mutants_are_drawn_by_a_seed_and_tested_by_what_imports_them_first() -> None:
    drawn_once = drawn(ROOT, 3, 7, ["results"])
    assert drawn_once == drawn(ROOT, 3, 7, ["results"]) != drawn(ROOT, 3, 8, ["results"])
    assert {mutant.room for mutant in drawn_once} == {"results"}
    tests = concerning(ROOT, Mutant("results/settings.py", 0, 0, ""))
    near = [file for file in tests if "moereplay.results.settings import" in (ROOT / file).read_text()]
    assert near and max(map(tests.index, near)) < tests.index("tests/results/test_energy.py")
