"""The words of the field, in documents, code and tests: private words that are gone do not come back."""

from __future__ import annotations

import re
from pathlib import Path

from tests.kit.every import every
from tests.project.test_imports import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
PLACES = (*PACKAGES, "benchmarks", "evidence", "moereplay", "tests")

#: Private words that are gone, with what is in their place. Parts of identifiers count: `one_world` holds `world`.
GONE = {
    r"anatom(y|ies)|dissect\w*": "module discovery",
    r"doctor": "validator",
    r"rehears\w*": "dry run",
    r"one's own|of one's": "user policies",
    r"story": "process",
    r"minds": "dependencies",
    r"books|ledgers?": "counters",
    r"who leaves": "victim selection",
    r"worlds?": "scenario in tests, simulation state in engines",
    r"(short|long|longer|shorter) way": "fast path, general path",
    r"foreknown": "oracle information",
    r"told straight": "computed without an event loop",
    r"stamp(s|ed)?": "logical timestamp",
    r"hears?|heard": "is called with, is notified",
    r"(re)?unite[sd]?": "union",
    r"namings": "predictions",
    r"last_hint|hint_pass": "prediction timestamp",
    r"rekey": "key scope",
    r"feeds?_(of|from)|run_feed": "input arrays",
}
ALLOWED = re.compile(r"\.stamp\b")  #: marker files of make
#: All but CHANGELOG.md, which names things as they were called.
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "CHANGELOG.md"})
CODE = [path for package in PLACES for path in (ROOT / package).rglob("*.py") if path != Path(__file__).resolve()]
WORDS = {word: re.compile(rf"(?<![a-z])({word})(?![a-z])", re.I) for word in GONE}


def private_words(text: str) -> list[str]:
    """Lines that hold a word of GONE, each with its number and with what to write."""
    text = ALLOWED.sub("", text)
    lines = text.splitlines()
    found = [
        (text.count("\n", 0, match.start()), word)
        for word, pattern in WORDS.items()
        for match in pattern.finditer(text)
    ]
    return [f"{number + 1}: {lines[number].strip()} ({GONE[word]})" for number, word in found]


@every("files", [DOCUMENTS, CODE])
def test_the_words_of_the_field_are_used(files: list[Path]) -> None:
    found = {str(path.relative_to(ROOT)): private_words(path.read_text(encoding="utf-8")) for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


@every("line", ["def _one_world(case):", "# the World of a test", "self.ledger = books", "rekey='step'"])
def test_private_words_are_found_in_names_and_text(line: str) -> None:
    assert private_words(line)


@every("line", ["timestamp = history[0]", ".venv/base.stamp: pyproject.toml", "apart = worldwide"])
def test_words_that_hold_one_are_none(line: str) -> None:
    assert private_words(line) == []
