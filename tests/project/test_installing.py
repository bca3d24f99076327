"""Advice to install fits how the program was installed; nothing is asked of an index by the package's own name."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from moereplay.traces.files import install_command
from tests.kit.every import every

ROOT = Path(__file__).resolve().parents[2]


class Installed:
    """A distribution of that origin."""

    requires = ("numpy>=2", 'submitit>=1.5.3; extra == "slurm"', 'lm-eval[hf]>=0.4; extra == "quality"')

    def __init__(self, origin: str | None) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        return self.origin

    def locate_file(self, name: str) -> Path:
        return Path("/no/such/folder", name)


EDITABLE = '{"url": "file:///home/a%20b/clone", "dir_info": {"editable": true}}'


@every(
    "origin, extra, command",
    [
        (EDITABLE, "slurm", "pip install -e '/home/a b/clone[slurm]'"),
        (None, "slurm", "pip install 'submitit>=1.5.3'"),
        ('{"url": "file:///x.whl", "archive_info": {}}', "quality", "pip install 'lm-eval[hf]>=0.4'"),
        ("damaged", "slurm", "pip install 'submitit>=1.5.3'"),
    ],
    apart=True,
)
def test_advice_fits_the_installation(
    origin: str | None, extra: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(origin))
    assert install_command(extra) == command


def test_no_page_or_message_tells_to_install_the_package_by_its_name() -> None:
    """It is on no index: such a command fails, or installs a package of somebody else."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    packages = ("analysis", "calibration", "commands", "policies", "results", "simulator", "sweeps", "tracegen")
    sources = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    for path in (*pages, *sources):
        assert not re.search(r"pip install [^\n`]*\'?moereplay(\[|\'|\s|$)", path.read_text("utf-8")), path
