"""Pages point at what is there, recipes fit a page, and the glossary is in order and complete."""

from __future__ import annotations

import re
from pathlib import Path

from tests.kit.documented import PAGES
from tests.kit.every import every
from tests.kit.pages import first_screen
from tests.kit.recordings import ROOT
from tests.kit.sweeping import moereplay

STUDIES = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("studies/**/*.md"))
DOCUMENTS = [*PAGES, *STUDIES, "DESIGN.md", "CHANGELOG.md"]
#: A link to a file or a heading of the project: [text](path#heading).
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([\w-]+))?\)")
WORDS = re.compile(r"(?m)^\| \*\*(.+?)\*\* \| (.+) \|$")
NEEDED = (
    *("expert", "gate", "router logits", "access", "hit", "miss", "late", "collision", "compulsory miss"),
    *("Belady bound", "capacity", "slot", "token cycle", "pass", "step", "prefill", "decode", "TTFT", "TPOT"),
    *("contract", "atomic", "sequential", "scope", "stall", "link", "slow tier", "look-ahead", "open-loop"),
    *("platform", "calibrated", "estimate", "identity", "trace", "recorded"),
)


def headings(page: Path) -> set[str]:
    """As a browser calls them: lower case, hyphens for spaces, no other marks."""
    titles = re.findall(r"(?m)^#+ (.+)$", page.read_text("utf-8"))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def leads_nowhere(page: str, path: str, heading: str) -> bool:
    target = (ROOT / page).parent / path if path else ROOT / page
    return not target.exists() or (bool(heading) and heading not in headings(target))


@every("page", DOCUMENTS)
def test_links_lead_to_a_file_and_a_heading(page: str) -> None:
    links = LINK.findall((ROOT / page).read_text("utf-8"))
    assert [link for link in links if leads_nowhere(page, *link)] == []


@every("link", [("docs/none.md", ""), ("docs/sweeps.md", "no-such-heading")])
def test_a_link_that_leads_nowhere_is_noticed(link: tuple[str, str]) -> None:
    assert leads_nowhere("README.md", *link)
    assert not leads_nowhere("README.md", "docs/sweeps.md", "results")


def run_together(text: str) -> list[str]:
    """Sentences of a page that follow another after two spaces: a paragraph that lost its empty line."""
    prose = re.sub(r"(?ms)^ *```.*?^ *```$|^(?: {4}|\|).*?$|`[^`\n]*`", "code", text)
    return re.findall(r"\S+[.:;,)]  +\S+", prose)


@every("page", DOCUMENTS)
def test_no_paragraph_runs_into_another(page: str) -> None:
    assert run_together((ROOT / page).read_text("utf-8")) == []


def test_a_paragraph_that_runs_into_another_is_noticed() -> None:
    assert run_together("- a cache.  A miss is computed\n```\nheld.  Out\n```\n`a.  B` and\n    c.  D\n") == [
        "cache.  A"
    ]


def test_the_picture_of_a_report_has_the_words_of_today(tmp_path: Path) -> None:
    """docs/figures/report.txt is written with the picture, by the commands of docs/report.md, by `make figures`."""
    command = re.search(r"(?m)^moereplay (replay .+) --out", (ROOT / "docs" / "figures" / "make.sh").read_text("utf-8"))
    assert command and command[1] in (ROOT / "docs" / "report.md").read_text("utf-8")
    folder, page = tmp_path / "mini", tmp_path / "a.html"
    for words in ((*command[1].split(), "--out", folder), ("report", folder, "--out", page)):
        ended = moereplay(*words)
        assert ended[0] == 0, ended[2]
    shown = first_screen(page.read_text("utf-8"))
    assert shown == (ROOT / "docs" / "figures" / "report.txt").read_text("utf-8")


@every("recipe", sorted((ROOT / "docs" / "recipes").glob("*.md")))
def test_a_recipe_is_one_page(recipe: Path) -> None:
    assert len(recipe.read_text("utf-8").splitlines()) <= 85


def test_the_glossary_has_every_word_once_and_in_order() -> None:
    words = [word for word, _ in WORDS.findall((ROOT / "docs" / "glossary.md").read_text("utf-8"))]
    assert words == sorted(set(words), key=str.lower)
    assert set(NEEDED) - set(words) == set()


def test_words_that_the_glossary_refers_to_are_in_it() -> None:
    meanings = dict(WORDS.findall((ROOT / "docs" / "glossary.md").read_text("utf-8")))
    referred = re.findall(r"See \*(.+?)\*", " ".join(meanings.values()))
    assert referred and set(referred) <= meanings.keys()
