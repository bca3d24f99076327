"""Every command that a page shows is typed as it stands there, page by page, or named below with the reason why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.documented import PAGES, Command, Shown, home, items, parse, plain, run
from tests.kit.documented_files import assumed, stand_in
from tests.kit.every import every

MODEL = "it downloads a model"
READERS = "it needs a checkpoint of the reader's"
LOGS = "it needs logs of the reader's"
CLUSTER = "it needs a cluster"
BUCKET = "it needs a bucket"
REAL = "it fills 3 GB of a disk and wants a quiet machine"

#: What no test runs: a command begins so. The real command line parses it all the same.
NOT_RUN = {
    ". .venv/bin/activate": "the environment of the test is active",
    "pip install dist/": "it downloads packages",
    "moereplay record allenai/OLMoE-1B-7B-0924": MODEL,
    "pip install -e": "it downloads packages",
    "moereplay quality allenai/OLMoE-1B-7B-0924": MODEL,
    "moereplay record ./checkpoints/qwen": READERS,
    "moereplay record Qwen3-30B-A3B-Q4_K_M.gguf": READERS,
    "moereplay import router.bin": "it needs the file of a model of 48 layers",
    "moereplay calibrate logs log.csv": LOGS,
    "moereplay evidence other.csv": LOGS,
    "moereplay verify chat.zarr": "llama.cpp runs, or has printed a log",
    "moereplay calibrate folder runs/": LOGS,
    "moereplay evidence runs/": LOGS,
    "moereplay calibrate series runs.csv": LOGS,
    "moereplay recommend glm-4.5-air --platform mine.toml": LOGS,
    "moereplay measure like.zarr": REAL,
    "moereplay plot runs/measured": "it draws what was not measured",
    "moereplay calibrate machine --slow-tier disk:runs/experts": REAL,
    "moereplay calibrate machine --slow-tier disk:experts": "it measures this machine, and other tests run beside it",
    "moereplay sweep run policies.toml": REAL,
    "moereplay sweep run experiment.toml --out /shared/sweep": CLUSTER,
    "ray start --head": CLUSTER,
    "moereplay sweep run experiment.toml --out runs/sweep --executor ray": CLUSTER,
    "export AWS_ACCESS_KEY_ID=": BUCKET,
    "moereplay sweep run experiment.toml --out s3://": BUCKET,
    "moereplay sweep show s3://": BUCKET,
    "moereplay plot s3://": BUCKET,
    "moereplay sweep merge s3://": BUCKET,
}
MODEL_RUNS = "a model runs"
PROCESSES = "worker processes"
#: What is run by `make test-long` alone. Until then a trace or a platform stands in for what it would write.
LONG = {
    "moereplay record miniature": MODEL_RUNS,
    "moereplay live miniature": MODEL_RUNS,
    "moereplay validate mini.zarr": MODEL_RUNS,
    "moereplay plot runs/validation": "of what ran long",
    "moereplay quality miniature": MODEL_RUNS,
    "moereplay plot runs/quality": "of what ran long",
    "moereplay sweep run experiment.toml --policy-file": PROCESSES,
    "moereplay sweep run experiment.toml --out runs/sweep": PROCESSES,
    "moereplay sweep show runs/sweep": "of what ran long",
    "moereplay sweep merge runs/sweep": "of what ran long",
    "moereplay plot runs/sweep": "of what ran long",
    "moereplay report runs/sweep": "of what ran long",
    "moereplay tune": PROCESSES,
    "MOEREPLAY_RECORDINGS=recordings make demo": "make installs, and the model is recorded",
    "moereplay paper cache-conditional miniature --figure rank_sensitivity --live": "of what ran long",
    "moereplay routing fit miniature": "a search of minutes",
    "moereplay synthesise --like my.toml": "of what ran long",
    "moereplay recommend": "replays a hundred configurations",
    "moereplay replay miniature --capacity 25%,50% --passes batch:2 --slo": "repeats a trace until a rate settles",
}
#: Pages that take `make test-longest`.
MINUTES = tuple(f"docs/{name}.md" for name in ("forecast", "measured", "quality", "trace-format", "validation"))
#: Pages of many seconds: commands compile policies, as test_own_policies.py does too, or replay a file of cases.
COSTLY = {"docs/recipes/own-policy.md": pytest.mark.long, "docs/conformance.md": pytest.mark.slow}
#: Pages whose numbers depend on the processor's arithmetic, as they are of a recording made there.
OWN_NUMBERS = ("docs/recipes/researcher.md",)
COMMANDS = {page: [each for each in items(page) if isinstance(each, Command)] for page in PAGES}


def entry(command: Command, table: dict[str, str]) -> str | None:
    """The longest entry of a table that the command begins with."""
    return max((begins for begins in table if command.text.startswith(begins)), key=len, default=None)


def type_page(page: str, folder: Path, skipped: dict[str, str]) -> None:
    """Run a page's commands in order; those to skip are parsed, and what they would have written is stood in for."""
    assumed(page, home(folder))
    cwd, printed, whole = folder, "", page not in OWN_NUMBERS
    for each in items(page):
        if isinstance(each, Shown):
            lines = {line.strip() for line in printed.splitlines()}
            missing = [line for line in each.lines if whole and line.strip() not in lines]
            assert not missing, f"{page} shows lines that were not printed: {missing}\n{printed}"
            printed, whole = "", page not in OWN_NUMBERS
        elif entry(each, skipped):
            whole = False
            skip(each, cwd)
        else:
            text, cwd = run(each, cwd)
            printed += "\n".join(map(plain, text.splitlines())) + "\n"


def skip(command: Command, cwd: Path) -> None:
    if command.words:
        parse(command, cwd)
        stand_in(command, cwd)


#: Pages with commands that run long, and those that `make test-long` types with them: no other run types these.
WITH_LONG = [page for page in PAGES if any(entry(each, LONG) for each in COMMANDS[page])]
WHOLE = [page for page in WITH_LONG if page not in MINUTES]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=COSTLY.get(page, ())) for page in PAGES if COMMANDS[page] and page not in WHOLE],
)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    type_page(page, tmp_path / "home", NOT_RUN | LONG)


def marked(page: str) -> object:
    return pytest.param(page, marks=pytest.mark.long if page in WHOLE else pytest.mark.longest)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [marked(page) for page in WITH_LONG])
def test_the_long_commands_of_a_page_run_as_well(page: str, tmp_path: Path) -> None:
    type_page(page, tmp_path / "home", NOT_RUN)


def test_each_entry_names_a_command_that_is_there() -> None:
    every = [each for found in COMMANDS.values() for each in found]
    assert {entry(each, NOT_RUN | LONG) for each in every} - {None} == {*NOT_RUN, *LONG}
    assert all({**NOT_RUN, **LONG}.values())


def test_commands_are_found_in_every_kind_of_block() -> None:
    assert {page: len(found) for page, found in COMMANDS.items() if found}.keys() >= {"README.md", "docs/platforms.md"}
    assert [each.text for each in COMMANDS["docs/platforms.md"]][2].endswith("--out - > mine.toml")
    assert any("<<'END'" in each.text for each in COMMANDS["docs/recipes/own-policy.md"])


@every(
    "text",
    ["moereplay replay miniature --evict lru", "moereplay resweep", "moereplay curve a.zarr --workers two"],
    apart=True,
)
def test_a_command_with_a_wrong_word_is_noticed(text: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"unknown|invalid"):
        parse(Command(text, text.split()), tmp_path)


def test_a_page_that_shows_what_is_not_printed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [Command("echo one"), Shown(["two"])]
    monkeypatch.setattr("tests.project.test_documented_commands.items", lambda page: wrong)
    with pytest.raises(AssertionError, match="not printed"):
        type_page("README.md", tmp_path / "home", {})
