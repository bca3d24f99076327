"""The trace that comes with the program goes by a name, where no folder does. Standard library only."""

from __future__ import annotations

from pathlib import Path

SAMPLE = "miniature"


def bundled(path: Path) -> Path:
    """The bundled trace, if its name is given and nothing of that name is there; else the path itself."""
    if path.name != SAMPLE or path.exists():
        return path
    return Path(__file__).with_name("samples") / f"{SAMPLE}.zarr"


def name_of(path: Path) -> str:
    """How the trace at a path is typed."""
    return SAMPLE if path == bundled(Path(SAMPLE)) else str(path)
