"""`moereplay bench`: the same bytes again, user policies, and refusal of all that is not what it says it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from moereplay import policies
from moereplay.sweeps.bench import LRU, Entry, Row, read_suite, replays, run_entries, traces_of
from moereplay.traces.documents import canonical_digest
from tests.commands.test_cli import ROOT
from tests.kit.command import moereplay_here as moereplay
from tests.kit.every import every

SUITE = """
version = 9
capacities = ["25%", "50%"]
passes = "token"
[[contracts]]
contract = "atomic"
scope = "per_layer"
[draw]
requests = 1
prompt_tokens = 4
decode_tokens = 12
seed = 1
recall = [0.8]
[drawn]
gpt-oss-20b = "0000000000000000"
[recorded]
miniature = "3de506e3d98e29ae"
[machines]
rtx4090-pcie4 = "f2ee11eab22a675c"
"""
MINE = '''"""The expert that was used most recently is evicted, which is a bad rule."""

from moereplay.contract import Eviction, expert_of


def key(now, experts, copies, own, y):
    return -experts[expert_of(now, y)]["last_use"]


POLICY = Eviction(name="worst", summary="the opposite of LRU", source="none", key=key)
'''


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """User policies live as long as a process, which is not a test's here."""
    yield
    for registered in policies.REGISTERED.values():
        registered.clear()


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small suite, whose drawn trace has the digest that the refusal of another one names."""
    path = tmp_path_factory.mktemp("suite") / "small.toml"
    path.write_text(SUITE)
    said = refused("run", "--suite", path)
    found = re.search(r"trace gpt-oss-20b has the digest (\w{16}) here", said)
    assert found
    path.write_text(SUITE.replace("0" * 16, found[1]))
    return path


@pytest.fixture(scope="module")
def rows(suite: Path) -> Path:
    """Rows of LRU, LFU and Belady."""
    path = suite.with_name("rows.jsonl")
    ended = moereplay("bench", "run", "--eviction", "lru,lfu,belady", "--suite", suite, "--out", path)
    assert ended.returncode == 0, ended.stderr
    return path


def refused(*arguments: object) -> str:
    """The line of a command that ends with 2 and prints nothing."""
    ended = moereplay("bench", *arguments)
    last = ended.stderr.splitlines()[-1]
    assert (ended.returncode, ended.stdout) == (2, "") and last.startswith("moereplay: "), ended.stderr
    return last


def changed(rows: Path, at: int, values: Mapping[str, object], sealed: bool = False) -> Path:
    """A file with one row of a file, changed by hand; `sealed`, by one who also writes a new digest."""
    document = json.loads(rows.read_text().splitlines()[at])
    document |= values
    if sealed:
        document.pop("row")
        document["row"] = canonical_digest(document)[:16]
    path = rows.with_name("changed.jsonl")
    path.write_text(json.dumps(document) + "\n")
    return path


@pytest.mark.slow
def test_the_suite_of_the_package_is_valid_and_draws_what_it_states() -> None:
    suite = read_suite()
    assert len(suite.machines) == 3 and len(traces_of(suite)) == 5
    assert replays([LRU], suite) == 2 * 5 * 6 * 3  # with Belady; cells of a trace; machines


def test_a_second_run_gives_the_same_bytes_with_more_workers_or_fewer_entries(suite: Path, rows: Path) -> None:
    ended = moereplay("bench", "run", "--eviction", "lfu", "--suite", suite, "--workers", 2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == rows.read_text().splitlines(keepends=True)[1]
    assert re.search(
        r"^eviction lfu, prefetch none, miss fetch: misses -?[\d.]+ \(LRU 0, Belady 100\); tokens/s rtx4090-pcie4 ",
        ended.stderr,
        re.M,
    )
    verified = moereplay("bench", "verify", rows, "--suite", suite)
    assert verified.returncode == 0, verified.stderr
    assert verified.stdout.splitlines() == [
        f"{rows}:{at}: {name} is the same" for at, name in enumerate(("lru", "lfu", "belady"), 1)
    ]


def test_lru_is_nought_belady_a_hundred_and_a_score_follows_from_the_counts(rows: Path) -> None:
    lru, lfu, belady = (Row.model_validate_json(line) for line in rows.read_text().splitlines())
    machine = "rtx4090-pcie4"
    assert (lru.misses, belady.misses, lru.may_take_us[machine]) == (0, 100, 0)
    counts = [row.counted[machine]["misses"] for row in (lru, lfu, belady)]
    shares = [100 * (a - b) / (a - c) for a, b, c in zip(*counts, strict=True)]
    assert lfu.misses == round(sum(shares) / 4, 2) and len(shares) == 4
    assert lru.tokens_per_s[machine] < belady.tokens_per_s[machine] and belady.may_take_us[machine] > 0


def test_a_prefetch_and_a_miss_policy_are_entered_with_an_eviction_policy(suite: Path) -> None:
    ended = moereplay("bench", "run", "--prefetch", "top_k", "--miss", "cpu", "--suite", suite)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("eviction lru, prefetch top_k, miss cpu: misses ")


def test_a_policy_file_is_entered_by_itself_and_its_row_names_its_version(suite: Path, tmp_path: Path) -> None:
    mine, row = tmp_path / "worst.py", tmp_path / "row.jsonl"
    mine.write_text(MINE)
    ended = moereplay("bench", "run", "--policy-file", mine, "--suite", suite, "--out", row)
    assert ended.returncode == 0, ended.stderr
    entered = Row.model_validate_json(row.read_text())
    assert re.fullmatch(r"worst@\w{12}", entered.eviction) and entered.misses < 0
    again = ("verify", row, "--suite", suite)
    assert moereplay("bench", *again, "--policy-file", mine).stdout == f"{row}:1: {entered.eviction} is the same\n"
    _forgotten()
    assert refused(*again).endswith(f"; pass the file of {entered.eviction} with --policy-file")
    mine.write_text(MINE.replace("-experts", "experts"))
    assert "pass the file of that version" in refused(*again, "--policy-file", mine)
    assert f"| {entered.eviction} |" in moereplay("bench", "table", row).stdout


def _forgotten() -> None:
    for registered in policies.REGISTERED.values():
        registered.clear()


@every(
    "arguments, said",
    [
        (("--miss", "drop"), "miss drop changes what the model computes; bench takes lossless policies only"),
        (("--eviction", "lfru,"), "--eviction 'lfru,' has an empty entry"),
        (("--eviction", "nolru"), "unknown eviction policy 'nolru'"),
        (("--all", "--eviction", "lru"), "--all cannot be combined with"),
    ],
)
def test_what_cannot_be_entered_is_refused_before_any_replay(
    arguments: tuple[str, ...], said: str, suite: Path
) -> None:
    assert said in refused("run", *arguments, "--suite", suite)


@every(
    "old, new, said",
    [
        ("version = 9", "version = 0", "version: expected at least 1 (got 0)"),
        ('passes = "token"', "", "passes: missing"),
        ('"25%"', '"25 parts"', "invalid capacity"),
        ('"atomic"', '"both"', "contract: unknown value 'both'"),
        ("seed = 1", "seed = 1\nseeds = 1", "draw.seeds: unknown key"),
        ("f2ee11eab22a675c", "f2ee", "machines: rtx4090-pcie4: expected a digest of 16 hexadecimal digits"),
        ("f2ee11eab22a675c", "1" * 16, "machine rtx4090-pcie4 has the digest f2ee11eab22a675c here"),
        ("3de506e3d98e29ae", "1" * 16, "trace miniature has the digest 3de506e3d98e29ae here"),
        ("[draw]", "[draw", "is not valid TOML"),
        ("gpt-oss-20b", "gpt-oss", "unknown routing model gpt-oss"),
    ],
)
def test_a_damaged_suite_is_refused(old: str, new: str, said: str, suite: Path) -> None:
    damaged = suite.with_name("damaged.toml")
    damaged.write_text(suite.read_text().replace(old, new))
    assert said in refused("run", "--suite", damaged)


@every(
    "values, said",
    [
        ({"misses": 99.0}, "the row of lfu was changed after it was written; run it again"),
        ({"row": "0" * 16}, "the row of lfu was changed after it was written; run it again"),
        ({"speed": 1}, "speed: unknown key; expected a row"),
        ({"misses": "many"}, "misses: expected a number (got 'many'); expected a row"),
    ],
)
def test_a_row_that_was_changed_by_hand_is_refused_at_once(
    values: dict[str, object], said: str, suite: Path, rows: Path
) -> None:
    path = changed(rows, 1, values)
    for line in (refused("table", path), refused("verify", path, "--suite", suite)):
        assert line.startswith(f"moereplay: {path}:1: {said}")


@every(
    "what, value, said",
    [
        ("misses", 99.0, "misses of lfu is 99.0, and a run gives "),
        ("suite", "0" * 16, "was made with suite 0000000000000000; here it is "),
        ("policies", "0" * 16, "was made with policies 0000000000000000; here it is "),
        ("semantics", 0, "was made with semantics 0; here it is 1"),
    ],
)
def test_one_who_also_writes_a_new_digest_is_found_by_a_run(
    what: str, value: object, said: str, suite: Path, rows: Path
) -> None:
    digests = json.loads(rows.read_text().splitlines()[1])["digests"]
    values = {what: value} if what == "misses" else {"digests": digests | {what: value}}
    assert said in refused("verify", changed(rows, 1, values, sealed=True), "--suite", suite)


def test_a_row_of_other_code_with_the_same_figures_is_the_same_and_said_so(suite: Path, rows: Path) -> None:
    digests = json.loads(rows.read_text().splitlines()[1])["digests"] | {"code": "0" * 16}
    ended = moereplay("bench", "verify", changed(rows, 1, {"digests": digests}, sealed=True), "--suite", suite)
    assert ended.stdout.endswith("lfu is the same, though made by other code (0000000000000000)\n"), ended.stderr


def test_rows_of_two_suites_or_of_one_entry_twice_make_no_table(rows: Path) -> None:
    digests = json.loads(rows.read_text().splitlines()[1])["digests"] | {"suite": "0" * 16}
    other = changed(rows, 1, {"digests": digests}, sealed=True)
    assert f"{other}:1: suite 0000000000000000 cannot be compared with suite " in refused("table", rows, other)
    assert f"{rows}:1: lru is in {rows}:1 already" in refused("table", rows, rows)
    other.write_text("\n")
    assert f"{other}: expected rows of `moereplay bench run`, found none" in refused("table", other)
    assert "expected JSON" in refused("table", ROOT / "README.md")


def test_the_table_has_the_fewest_misses_first_and_marks_who_knows_the_future(rows: Path) -> None:
    lines = moereplay("bench", "table", rows).stdout.splitlines()
    found = [re.split(r" *\| *", line)[1:5] for line in lines if line.startswith("| ")]
    assert found[0] == ["eviction", "prefetch", "miss", "knows the future"]
    assert found[2] == ["belady", "none", "fetch", "yes"] and {row[0] for row in found[3:]} == {"lru", "lfu"}
    assert any("What the table does not say" in line for line in lines)


@pytest.mark.slow
def test_the_committed_table_is_that_of_the_committed_rows_and_of_this_suite() -> None:
    rows = ROOT / "docs" / "leaderboard.jsonl"
    assert moereplay("bench", "table", rows).stdout == (ROOT / "docs" / "leaderboard.md").read_text("utf-8")
    committed = [Row.model_validate_json(line) for line in rows.read_text().splitlines()]
    assert {row.digests.suite for row in committed} == {read_suite().digest}
    assert {LRU, Entry("belady"), Entry("lfu"), Entry("lru", "top_k")} <= {row.entry for row in committed}


@pytest.mark.long
def test_a_committed_row_is_what_a_run_gives() -> None:
    suite = read_suite()
    row, *_ = run_entries([Entry("class_lru")], suite, traces_of(suite), 2)
    stated = (ROOT / "docs" / "leaderboard.jsonl").read_text().splitlines()
    found = [Row.model_validate_json(line) for line in stated]
    assert [row.counted] == [each.counted for each in found if each.entry == Entry("class_lru")]
