"""docs/cannot-be-asked.md: what it says is refused is refused, in the words that it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.kit.command import moereplay_here, unfolded
from tests.kit.every import every

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cannot-be-asked.md").read_text("utf-8")
ROWS = re.findall(r"(?m)^\| ([^|]+) \| `moereplay ([^`]+)` \| `([^`]+)` \| [^|]+ \|$", PAGE)
TIER = '\n[[tiers]]\nname = "DRAM"\ncapacity = "50%"\nbytes_per_s = 3e9\nlatency_ns = 100_000\n'


@every("question, words, answer", ROWS, apart=True)
def test_the_page_shows_what_a_user_meets(question: str, words: str, answer: str, tmp_path: Path) -> None:
    own = (ROOT / "simulator" / "platforms" / "rtx4090-pcie4.toml").read_text("utf-8")
    (tmp_path / "tiered.toml").write_text(own + TIER)
    (tmp_path / "p.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(16))
    ended = moereplay_here(*shlex.split(words), cwd=tmp_path)
    assert ended.returncode == 2, question
    assert answer in unfolded(ended.stderr)


def test_every_row_of_the_table_is_tried() -> None:
    assert len(ROWS) == len(re.findall(r"(?m)^\| (?!question|---)", PAGE)) >= 7
