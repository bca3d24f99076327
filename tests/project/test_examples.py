"""The code in the README, the API page and the notebooks runs unchanged."""

import re

import pytest

import moereplay
from moereplay import policies
from tests.kit import notebooks
from tests.kit.recordings import ROOT

API = (ROOT / "docs" / "api.md").read_text()
README = (ROOT / "README.md").read_text()


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize(
    ("index", "shown"),
    [
        (0, r"{'lru': 0\.4\d+, 'least_stale': 0\.5\d+}\nshape: \(2, 3\)(.|\n)*prefill(.|\n)*"),
        (1, r"200 [1-9]\d* SIMULATED, open-loop"),
        (2, r"3 frozenset\({'\w+', '\w+', '\w+'}\)"),
        (3, r"shape: \(\d+, 3\)(.|\n)*least_stale(.|\n)*"),
    ],
)
def test_an_example_of_the_api_page_runs(index: int, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(examples(API)[index], {})
    assert re.fullmatch(shown, capsys.readouterr().out.strip())


def test_the_api_page_names_everything_that_is_public() -> None:
    assert {name for name in moereplay.__all__ if name not in API} == set()


@pytest.mark.usefixtures("at_home")
def test_the_python_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (session,) = examples(README)
    exec(session, {})
    label, rate = capsys.readouterr().out.split()
    assert (label, 0 < float(rate) < 1) == ("SIMULATED", True)


def test_the_readme_is_short_and_counts_the_policies() -> None:
    assert len(README.splitlines()) <= 130
    assert f"[{sum(map(len, policies.NAMES.values()))} policies" in README


@pytest.mark.parametrize("name", ["tour", pytest.param("paper", marks=pytest.mark.slow)])
def test_a_notebook_prints_and_shows_what_is_stored_in_it(name: str) -> None:
    """The texts of every cell; pictures are not compared, because their bytes depend on matplotlib's version."""
    stored = notebooks.read(name)
    shown = notebooks.texts(stored)
    assert notebooks.texts(notebooks.run(stored)) == shown, "stale: run python -m tests.kit.notebooks"
    assert "image/png" in str(shown)
