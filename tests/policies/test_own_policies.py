"""`--policy-file`: a user's own policy in every verb and every process, and one line for whatever is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from moereplay import policies
from moereplay.policies import files
from moereplay.policies.contract import Eviction, PolicyError
from moereplay.policies.grammar import parse
from moereplay.simulator import dry_run
from moereplay.simulator.bounds import remarks
from moereplay.simulator.compiled.hooks import compiled, refusal
from moereplay.simulator.config import configure
from moereplay.simulator.jit.marks import IS_PYTHON
from moereplay.simulator.replay import replay
from moereplay.traces.store import open_trace
from tests.commands.test_cli import ROOT
from tests.kit.command import moereplay_alone
from tests.kit.command import moereplay_here as moereplay
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, replayed, stored_trace, trace_of

DOCUMENT = (ROOT / "docs" / "policies.md").read_text()
EXAMPLES = {match[2]: match[1] for match in re.finditer(r'```python\n("""(\w+)\.py.*?)```', DOCUMENT, re.DOTALL)}
NEWEST = EXAMPLES["newest"]
FRESH = ("--workers", 1, "--capacity", "30%")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two requests of twelve tokens through four layers of eight experts."""
    sizes = Sizes(layers=4, experts=8, tokens=12, prompt=4, requests=2, depth=1, size=1000)
    return stored_trace(tmp_path_factory.mktemp("own") / "small.zarr", sizes)


@pytest.fixture
def command() -> Callable[..., tuple[int, str]]:
    """Runs the command line in this process: exit code and stderr."""

    def run(*arguments: object) -> tuple[int, str]:
        ended = moereplay(*arguments)
        return ended.returncode, ended.stderr

    return run


def complaints(stderr: str) -> list[str]:
    """Return the error lines, without progress."""
    return [line for line in stderr.splitlines() if "replays" not in line and not line.startswith("compiling ")]


def written(folder: Path, text: str, name: str = "mine.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


# -- the examples of the document -----------------------------------------------------------------------------------


def test_the_document_has_an_example_of_every_kind_in_about_ten_lines(tmp_path: Path) -> None:
    kinds = {name: files.register(written(tmp_path, text, f"{name}.py")).kind for name, text in EXAMPLES.items()}
    assert kinds == {"newest": "eviction", "regulars": "prefetch", "skip_light": "miss", "stand_in": "routing"}
    code = {name: [line for line in text.splitlines() if line.strip()] for name, text in EXAMPLES.items()}
    assert max(map(len, code.values())) <= 15


@pytest.mark.slow
def test_the_examples_run_together_in_two_processes_and_do_what_they_say(small: Path, tmp_path: Path) -> None:
    files_given = {name: written(tmp_path, text, f"{name}.py") for name, text in EXAMPLES.items()}
    ran = moereplay(
        *("replay", small, *(word for path in files_given.values() for word in ("--policy-file", path))),
        *("--prefetch", "regulars:least=2", "--miss", "skip_light:least=.4", "--routing", "stand_in"),
        *("--eviction", "lru,newest", "--capacity", "30%", "--workers", 2, "--out", tmp_path / "out"),
    )
    assert ran.returncode == 0, ran.stderr
    rows = pl.read_parquet(tmp_path / "out" / "part-*" / "configurations.parquet")
    assert rows["hits"].n_unique() == 2
    assert min(rows["prefetch_issued"]) > 0
    assert min(rows["dropped"]) > 0
    assert min(rows["rank_displacement"]) > 0


def test_newest_of_the_document_keeps_what_lru_loses(tmp_path: Path) -> None:
    """Room for 2 of 3, demand 0 1 2 0 1. LRU misses all; newest gives up 1 for 2, and then hits 0."""
    files.register(written(tmp_path, NEWEST))
    demand = trace_of([[[e]] for e in (0, 1, 2, 0, 1)], experts=3)
    hits = {name: replayed(demand, 2, None, eviction=name).totals["hits"] for name in ("lru", "newest")}
    assert hits == {"lru": 0, "newest": 1}


# -- identity --------------------------------------------------------------------------------------------------------


def test_a_version_is_part_of_the_identity(small: Path, tmp_path: Path) -> None:
    trace, found = open_trace(small), []
    for text in (NEWEST, NEWEST + "# another version\n"):
        files.register(written(tmp_path, text))
        config = configure(capacity="30%", eviction="newest")
        found.append((config.identity(trace), config.policy_set().eviction.text()))
        policies.REGISTERED["eviction"].clear()
    (first, spelled), (second, other) = found
    assert first != second
    assert re.fullmatch("newest@[0-9a-f]{12}", spelled) and spelled != other


def test_results_name_the_version_and_it_parses_back(small: Path, tmp_path: Path) -> None:
    version = files.register(written(tmp_path, NEWEST)).version
    result = replay(open_trace(small), configure(capacity="30%", eviction="newest"))
    assert result.config["eviction"] == result.about["policies"]["eviction"] == f"newest@{version}"
    assert parse("eviction", f"newest@{version}").text() == f"newest@{version}"
    with pytest.raises(PolicyError, match=f"the loaded policy is newest@{version}"):
        parse("eviction", "newest@000000000000")


def test_identities_of_catalogue_policies_do_not_depend_on_files_that_were_given(small: Path, tmp_path: Path) -> None:
    trace, config = open_trace(small), configure(capacity="30%")
    before = config.identity(trace)
    files.register(written(tmp_path, NEWEST))
    assert config.identity(trace) == before


def test_two_versions_leave_two_parts_in_one_folder(small: Path, tmp_path: Path, command: Callable) -> None:
    for text in (NEWEST, NEWEST + "# another version\n"):
        mine = written(tmp_path, text)
        arguments = ("--policy-file", mine, "--eviction", "newest", *FRESH, "--out", tmp_path / "out")
        assert command("replay", small, *arguments)[0] == 0
        policies.REGISTERED["eviction"].clear()
    assert len(list((tmp_path / "out").glob("part-*"))) == 2


def test_nothing_is_written_beside_the_file(tmp_path: Path) -> None:
    files.register(written(tmp_path, NEWEST))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["reference", "compiled"])
def test_a_policy_that_suggests_for_the_next_pass_may_be_a_users(small: Path, tmp_path: Path, engine: str) -> None:
    text = (ROOT / "policies" / "prefetch" / "missed.py").read_text()
    files.register(written(tmp_path, text.replace('name="missed"', 'name="uploads"')))
    of = {"platform": "desktop-ram", "miss": "cpu", "capacity": "30%", "passes": "token"}
    own, theirs = (
        replay(open_trace(small), configure(prefetch=name, **of), engine=engine) for name in ("uploads", "missed")
    )
    assert own.totals == theirs.totals and own.totals["prefetch_started"] > 0


def test_the_same_file_twice_is_one_policy(tmp_path: Path) -> None:
    mine = written(tmp_path, NEWEST)
    assert files.register(mine) is files.register(mine)


# -- the verbs -------------------------------------------------------------------------------------------------------


def test_policies_lists_and_explains_it(tmp_path: Path) -> None:
    mine = written(tmp_path, EXAMPLES["skip_light"])
    listed = moereplay("policies", "--policy-file", mine).stdout
    assert re.search(r"miss +skip_light@[0-9a-f]{12} ", listed)
    explained = moereplay("policies", "skip_light", "--policy-file", mine).stdout
    assert "a miss that no token gives `least` of its weight is skipped" in " ".join(explained.split())
    assert "a number from 0 to 1 (default 0.1)" in explained and "weights" in explained


# -- what is wrong with a file ---------------------------------------------------------------------------------------

KEY = "    return -experts"
DECLARED = 'POLICY = Eviction(name="newest"'
WRONG: dict[str, tuple[Callable[[str], str], str]] = {
    "syntax": (lambda text: text.replace("y):", "y)"), r"mine.py:6: SyntaxError: expected ':': def key("),
    "null byte": (lambda text: text + "\0", "mine.py:1: SyntaxError: source code string cannot contain null bytes"),
    "import": (lambda text: text.replace("import Ev", "import v", 1), "mine.py:3: ImportError: cannot import name"),
    "unknown field": (lambda text: text.replace("key=key", "kee=key"), "mine.py:11: TypeError"),
    "no hook": (
        lambda text: text.replace(", key=key", ""),
        "mine.py:11: an eviction policy requires exactly one of the hooks key and",
    ),
    "no policy": (lambda text: text.replace("POLICY", "Policy"), "mine.py: missing POLICY"),
    "no policy but text": (lambda text: text + 'POLICY = "newest"\n', "mine.py:12: invalid POLICY"),
    "taken name": (
        lambda text: text.replace('"newest"', '"lru"'),
        "mine.py:11: eviction policy 'lru' exists already",
    ),
    "unspeakable name": (lambda text: text.replace('"newest"', '"m:u"'), "mine.py:11: invalid name 'm:u': expected"),
    "signature": (
        lambda text: text.replace("own, y", "y"),
        "mine.py:11: invalid hook key: expected the arguments (now, experts, copies",
    ),
    "key_scope": (
        lambda text: text.replace("key=key", "key=key, key_scope='now'"),
        "mine.py:11: unknown key_scope 'now': choose from",
    ),
    "exit": (lambda text: "raise SystemExit(3)\n" + text, "mine.py:1: SystemExit: 3: raise SystemExit(3)"),
    "exit at once": (
        lambda text: "import os; os._exit(0)\n" + text,
        "mine.py:1: SystemExit: 0: import os; os._exit(0)",
    ),
    "end": (lambda text: "raise GeneratorExit\n" + text, "mine.py:1: GeneratorExit:: raise GeneratorExit"),
    "end of a hook": (
        lambda text: text.replace(KEY, "    raise GeneratorExit; return experts"),
        "mine.py:8: GeneratorExit",
    ),
    "column": (
        lambda text: text.replace("last_use", "last_us"),
        "mine.py:8: unknown column 'last_us': did you mean last_use?: return -experts",
    ),
    "division": (lambda text: text.replace(KEY, "    return 1 // 0 * experts"), "mine.py:8: ZeroDivisionError"),
    "a file that is not there": (
        lambda text: text.replace(KEY, "    open('nowhere'); return experts"),
        "mine.py:8: FileNotFoundError: [Errno 2] No such file or directory: 'nowhere': open('nowhere')",
    ),
    "float": (lambda text: text.replace(KEY, "    return 0.5 + experts"), "mine.py:6: hook key returned "),
    "nothing": (lambda text: text.replace(KEY, "    -experts"), "mine.py:6: hook key returned None"),
    "needs": (
        lambda text: text.replace("key=key", "key=key, needs=lambda p: p['x']"),
        "mine.py:11: KeyError: 'x': POLICY = Eviction(",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine", "workers"), (("float", "reference", 1), ("column", "reference", 2), ("float", "compiled", 2))
)
def test_what_is_wrong_in_a_hook_is_one_line_from_every_process_and_thread(
    small: Path, name: str, engine: str, workers: int, tmp_path: Path
) -> None:
    change, said = WRONG[name]
    mine = written(tmp_path, change(NEWEST))
    where = ("--workers", workers, "--capacity", "30%", "--engine", engine)
    refused = moereplay("replay", small, "--policy-file", mine, "--eviction", "newest,lru", *where)
    assert refused.returncode == 2, refused.stderr
    assert [line for line in complaints(refused.stderr) if said in line] == complaints(refused.stderr) != []


@every("name", WRONG)
def test_what_is_wrong_with_a_file_is_one_line_with_its_text(
    small: Path, name: str, tmp_path: Path, command: Callable
) -> None:
    change, said = WRONG[name]
    mine = written(tmp_path, change(NEWEST))
    assert change(NEWEST) != NEWEST
    code, stderr = command("replay", small, "--policy-file", mine, "--eviction", "newest", *FRESH)
    lines = complaints(stderr)
    assert (code, len(lines)) == (2, 1), stderr
    assert said in lines[0]


WRONG_ANSWERS = {
    "verdict": ("skip_light", "miss", "DROP if", "7 if", "hook resolve returned verdict 7"),
    "copy of this layer": (
        "regulars",
        "prefetch",
        "x * now",
        "0 * now",
        "hook suggest returned, for a copy",
    ),
    "expert of no layer": ("stand_in", "routing", "step.ids[t][j]\n", "99\n", "hook choose returned expert 99"),
    "expert twice": ("stand_in", "routing", "step.ids[t][j]\n", "3\n", "hook choose returned an expert twice"),
}


@every("name", WRONG_ANSWERS)
def test_answers_that_name_nothing_are_refused(small: Path, name: str, tmp_path: Path) -> None:
    example, kind, right, wrong, said = WRONG_ANSWERS[name]
    policy = files.register(written(tmp_path, EXAMPLES[example].replace(right, wrong)))
    least = ":least=1" if policy.params else ""
    with pytest.raises(PolicyError, match=re.escape(said)):
        replay(open_trace(small), configure(capacity="30%", **{kind: example + least}))


def test_a_victim_that_may_not_leave_is_refused(small: Path, tmp_path: Path) -> None:
    text = NEWEST.replace("key(now, experts, copies, own, y)", "victim(now, experts, copies, own, pool, y)")
    files.register(written(tmp_path, text.replace("key=key", "victim=victim").replace(KEY, "    return -1 #")))
    with pytest.raises(PolicyError, match=r"mine\.py:6: hook victim returned -1, .* pool 0: def victim"):
        replay(open_trace(small), configure(capacity="30%", eviction="newest"))


@every("table", ["experts", "copies"])
@every("engine", ["reference", "compiled"])
def test_a_row_counted_from_the_end_is_refused_at_its_line(
    small: Path, table: str, engine: str, tmp_path: Path
) -> None:
    """Both engines would read it, and the key would depend on another copy's numbers; the dry run sees it."""
    column = {"experts": "last_use", "copies": "entered"}[table]
    files.register(written(tmp_path, NEWEST.replace(KEY, f"    return {table}[y - len({table})]['{column}'] #")))
    with pytest.raises(PolicyError, match=rf"mine\.py:\d+: invalid row -\d+ of {table}"):
        replay(open_trace(small), configure(capacity="30%", eviction="newest"), engine=engine)


def test_a_replay_in_machine_code_says_that_it_was_not_checked_all_the_way(small: Path, tmp_path: Path) -> None:
    files.register(written(tmp_path, NEWEST))
    trace, configs = open_trace(small), [configure(capacity="30%", eviction=each) for each in ("newest", "lru")]
    said = [line for line in remarks(trace, configs, "compiled") if "--engine reference" in line]
    assert len(said) == 1 and "eviction newest@" in said[0] and "lru" not in said[0]
    assert [line for line in remarks(trace, configs, "reference") if "--engine reference" in line] == []
    assert remarks(trace, configs[1:], "compiled") == remarks(trace, configs[1:], "reference")


# -- the compiled engine -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_examples_get_the_same_results_from_both_engines(small: Path, tmp_path: Path) -> None:
    for name, text in EXAMPLES.items():
        files.register(written(tmp_path, text, f"{name}.py"))
    chosen = {"prefetch": "regulars:least=2", "miss": "skip_light:least=.4", "routing": "stand_in"}
    trace, config = open_trace(small), configure(capacity="30%", eviction="newest", **chosen)
    assert replay(trace, config, engine="compiled") == replay(trace, config, engine="reference")


OF = """def of(experts, x):
    \"\"\"The timestamp of an expert.\"\"\"
    return experts[x]["last_use"]


"""
#: What a hook returns from the third pass on, and what is said of it; the dry run has two. The index is far outside.
LATE = {
    "index": ("experts[y + (now['pass'] // 2 << 40)]['last_use']", "index|range"),
    "index of a function that it calls": ("of(experts, y + (now['pass'] // 2 << 40))", "index|range"),
    "division": ("y // min(1, max(0, 2 - now['pass']))", "by zero"),
}


@every("name", LATE)
def test_what_goes_wrong_after_the_dry_run_is_refused(
    small: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "division" and IS_PYTHON:
        return  # numpy's integers only warn of a division by zero; machine code and Python's own raise
    monkeypatch.setattr(dry_run, "ENOUGH", 1)
    body, said = LATE[name]
    text = NEWEST.replace(KEY, f"    return {body} #").replace("def key", f"{OF}def key")
    files.register(written(tmp_path, text))
    with pytest.raises(PolicyError, match=rf"^eviction newest@\w+: .*({said}).*; replay it with --engine reference"):
        replay(open_trace(small), configure(capacity="30%", eviction="newest", passes="token"), engine="compiled")


@pytest.mark.skipif(IS_PYTHON, reason="nothing is compiled")
@every(
    "body, said",
    [
        ("len(open(str(y)).read())", "mine.py:13: hook key does not compile (Untyped global name 'open'"),
        ("of(experts, now)", "mine.py:8: hook key does not compile ("),
        ("0 if y else 'a'", "mine.py:13: hook key does not compile (Cannot unify Literal[int](0) and Literal[str](a)"),
        ("__import__('math').pi", "mine.py:13: hook key does not compile (Untyped global name '__import__'"),
    ],
)
def test_a_hook_that_does_not_compile_is_one_line_at_its_place(body: str, said: str, tmp_path: Path) -> None:
    text = NEWEST.replace(KEY, f"    return {body} #").replace("def key", f"{OF}def key")
    policy = files.register(written(tmp_path, text))
    with pytest.raises(PolicyError) as refused:
        compiled("key", policy)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert "); replay it with --engine reference: return " in str(refused.value)


def test_colours_of_numba_do_not_reach_the_line(tmp_path: Path) -> None:
    """It colours its text where colorama is installed; line 13 is the hook's only one."""
    policy = files.register(written(tmp_path, NEWEST))
    said = "\x1b[1m\x1b[1mUntyped global name 'x'\x1b[0m\nFile \"mine.py\", line 13:"
    error = refusal(policy, "key", vars(policy)["key"], said)
    assert "hook key does not compile (Untyped global name 'x')" in str(error) and "\x1b" not in str(error)


def test_a_parameter_whose_default_it_refuses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"invalid default 2 of least: expected a number from 0 to 1"):
        files.register(written(tmp_path, EXAMPLES["skip_light"].replace('"least", 0.1', '"least", 2')))


def test_a_refused_file_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(PolicyError):
        files.register(written(tmp_path, NEWEST.replace('"newest"', '"lru"')))
    assert isinstance(parse("eviction", "lru").policy, Eviction) and not policies.REGISTERED["eviction"]
    assert (str(tmp_path / "mine.py"), NEWEST.encode()) not in files.registered()


def test_the_catalogues_own_bugs_are_not_blamed_on_the_user() -> None:
    try:
        raise KeyError("ours")
    except KeyError as error:
        assert files.blamed(error) is None


def test_debug_shows_the_traceback(small: Path, tmp_path: Path) -> None:
    mine = written(tmp_path, NEWEST.replace("last_use", "last_us"))
    shown = moereplay_alone("replay", small, "--policy-file", mine, "--eviction", "newest", *FRESH, "--debug")
    assert "Traceback" in shown.stderr and "last_us" in shown.stderr


def test_a_missing_file_is_named(small: Path, tmp_path: Path) -> None:
    refused = moereplay("replay", small, "--policy-file", tmp_path / "nowhere.py")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "nowhere.py" in refused.stderr


def test_retaken_files_are_the_bytes_that_were_read(tmp_path: Path) -> None:
    """A worker gets what the command read, whatever has become of the file."""
    mine = written(tmp_path, NEWEST)
    policy = files.register(mine)
    mine.write_text("raise SystemExit")
    kept = files.registered()
    policies.REGISTERED["eviction"].clear()
    files.register_all(kept)
    assert policies.load("eviction", "newest").version == policy.version
