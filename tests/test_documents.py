"""Documents say what the program does: tables equal the code, examples run, links lead somewhere."""

import re
from pathlib import Path

import pytest

from policies import catalogue
from simulator.result import COUNTERS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def between(page: str, mark: str) -> str:
    """The text that a generated table occupies."""
    return (ROOT / page).read_text().split(f"<!-- {mark}:")[1].split("-->\n", 1)[1].split("<!-- end -->")[0].strip()


def between_headings(page: str, first: str, last: str) -> str:
    """The text of a section."""
    return (ROOT / page).read_text().split(first)[1].split(last)[0]


def test_readme_names_every_policy():
    told = between_headings("README.md", "## Policies", "## What to trust")
    assert [policy.name for policy in catalogue() if not re.search(rf"\b{policy.name}\b", told)] == []


def test_semantics_defines_every_counter_as_the_code_does():
    lines = between("docs/semantics.md", "counters").splitlines()[2:]
    assert [tuple(cell.strip(" `") for cell in line.strip("|").split(" | ")) for line in lines] == list(
        COUNTERS.items()
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\((?!http)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_python_example_of_the_readme_runs(monkeypatch, capsys):
    example = re.search(r"## From Python\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example
    monkeypatch.chdir(ROOT)
    exec(example[1], {})
    label, rate = capsys.readouterr().out.split()
    assert label == "SIMULATED"
    assert 0 < float(rate) < 1


def test_no_page_keeps_a_placeholder():
    assert [page.name for page in PAGES if "PLACEHOLDER" in page.read_text()] == []
