"""A stranger's package, installed for one test: its modules and its entry points lie in a folder of sys.path."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from moereplay.sweeps.recommend.engines import engines
from moereplay.traces.plugins import plugins

NAME, VERSION = "strangers-plugin", "1.5"


class Installed:
    """Installs files and entry points; `plugins` finds nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.points: dict[str, Mapping[str, str]] = {}

    def __call__(self, group: str, points: Mapping[str, str], files: Mapping[str, str]) -> None:
        for name, text in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)
        self.points[group] = points
        about = self.folder / f"{NAME.replace('-', '_')}-{VERSION}.dist-info"
        about.mkdir(exist_ok=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n")
        lines = [f"[{of}]\n" + "".join(f"{n} = {v}\n" for n, v in given.items()) for of, given in self.points.items()]
        (about / "entry_points.txt").write_text("\n".join(lines))
        forget()


def forget() -> None:
    """As a process that has looked for no plug-in."""
    importlib.invalidate_caches()
    plugins.cache_clear()
    engines.cache_clear()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    """Without the plug-ins that are really installed."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    real = importlib.metadata.entry_points

    def own(**chosen: str) -> object:
        points = real(**chosen)
        if not chosen.get("group", "").startswith("moereplay."):
            return points
        return [point for point in points if point.dist and point.dist.name == NAME]

    monkeypatch.setattr("importlib.metadata.entry_points", own)
    modules = set(sys.modules)
    forget()
    yield Installed(folder)
    for name in set(sys.modules) - modules:
        if str(folder) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
    forget()
