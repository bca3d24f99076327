"""docs/platforms.md: its files are platforms, its ways to name one are understood, and each replays a trace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moereplay.simulator.config import configure
from moereplay.simulator.platforms import platform
from moereplay.simulator.replay import replay
from moereplay.traces.schema import Header, Request, memory_trace
from moereplay.traces.store import open_trace
from tests.kit.command import moereplay_here
from tests.kit.every import every

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "traces" / "samples" / "miniature.zarr"
PAGE = (ROOT / "docs" / "platforms.md").read_text()
#: What is indented, and sets something.
FILES = [
    re.sub(r"^    ", "", block, flags=re.M) for block in re.findall(r"(?:^    .*\n|^\n)+", PAGE, re.M) if "=" in block
]
WHOLE, DIFFERENT, PRICES, ROWS, LAYERS, TIERS = FILES
MORE = Path(__file__).with_name("wrong_platforms.md").read_text()
WRONG = re.findall(r"^\| `(\w.* =.*)` \| (.*) \|$", PAGE.split("Errors in a file")[1] + MORE, re.M)
FORMS = re.findall(r"`[^`\n]*--platform (\S+)`", PAGE)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the page in the working folder: `mine.toml` has one link, `priced.toml` prices beside it,
    `several.toml` its rows instead, `split.toml` rows of layers, and `three.toml` another link and a tier below it."""
    (tmp_path / "mine.toml").write_text(WHOLE)
    (tmp_path / "different.toml").write_text(DIFFERENT)
    (tmp_path / "priced.toml").write_text(f'name = "priced"\nbase = "mine.toml"\n{PRICES}')
    (tmp_path / "several.toml").write_text(re.sub(r"\[link\].*\n(?:.+\n)+", lambda _: ROWS, WHOLE))
    split = LAYERS.replace("24-47", "8-15").replace("0-23", "0-7")  # the sample has 16 MoE layers
    (tmp_path / "split.toml").write_text(re.sub(r"\[link\].*\n(?:.+\n)+", lambda _: split, WHOLE))
    (tmp_path / "three.toml").write_text(f'name = "three"\nbase = "mine.toml"\n{TIERS}')
    monkeypatch.chdir(tmp_path)


def replayed(name: str) -> int:
    """Nanoseconds of a prompt of 12 tokens and 12 decoded ones."""
    sample = open_trace(SAMPLE)
    trace = memory_trace(Header(geometry=sample.geometry), [Request(sample.request(0).chosen[:24], 12)])
    return replay(trace, configure(capacity="25%", platform=name)).totals["time_ns"]


def test_each_file_replays_as_it_says() -> None:
    names = ("mine", "different", "priced", "several", "split", "three")
    mine, different, priced, several, split, three = (platform(f"{name}.toml") for name in names)
    assert (mine.name, mine.links[0].bytes_per_s, mine.contention is None) == ("mine", 25e9, False)
    assert (different.name, different.links[0].bytes_per_s) == ("my-phone", 2.1e9)
    assert different.links[0].latency_ns == platform("phone-ufs4").links[0].latency_ns
    assert [link.tier for link in several.links] == ["DRAM", "NVMe"]
    assert [link.layers for link in split.links] == ["0-7", "8-15"]
    assert [tier.capacity for tier in three.tiers] == ["64GiB"]
    assert (priced.overlap, priced.loading.ns_per_mib, priced.links[0].first_piece) == ("none", 126_000, 0.667)
    assert set(type(priced).later) - {"tiers"} <= priced.model_dump().keys()
    assert len({replayed(f"{name}.toml") for name in names}) == len(names)


@every("form", FORMS)
def test_each_way_to_name_a_platform_replays(form: str) -> None:
    name = form.replace("mine", "several" if "links." in form else "three" if "tiers." in form else "mine")
    file, *changes = name.split(":")
    assert replayed(name) > 0
    assert (platform(name).figures() != platform(file).figures()) == bool(changes)


def test_there_are_ways_with_and_without_changed_figures() -> None:
    assert {form.count(":") for form in FORMS} >= {0, 1, 2}


def test_any_platform_is_printed_as_a_file_to_be_given_back(tmp_path: Path) -> None:
    assert "`moereplay platforms NAME --toml > mine.toml`" in PAGE
    printed = moereplay_here("platforms", "phone-ufs4", "--toml")
    (tmp_path / "mine.toml").write_text(printed.stdout)
    assert platform("mine.toml").figures() == platform("phone-ufs4").figures()


@every("said, answer", WRONG)
def test_each_wrong_file_is_told_what_the_page_says(said: str, answer: str, tmp_path: Path) -> None:
    lines = [line for line in ('name = "wrong"', 'base = "mine.toml"') if line.split()[0] != said.split()[0]]
    (tmp_path / "wrong.toml").write_text("\n".join([*lines, *said.split("`, `")]) + "\n")
    ended = moereplay_here("replay", SAMPLE, "--capacity", "25%", "--platform", "wrong.toml")
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    words, _, _ = answer.partition("...")
    assert words.strip() in ended.stderr


def test_a_figure_that_is_not_there_names_the_nearest() -> None:
    assert "`a100-5gbps:depth=4`" in PAGE
    ended = moereplay_here("replay", SAMPLE, "--capacity", "25%", "--platform", "a100-5gbps:depth=4")
    assert ended.returncode == 2
    assert "did you mean link.depth=?" in ended.stderr
