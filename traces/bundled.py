"""The trace that comes with the program goes by a name, where no folder does. Standard library only."""

from __future__ import annotations

from pathlib import Path

SAMPLE = "miniature"


def bundled(path: Path, folder: Path = Path()) -> Path:
    """The bundled trace, if its name is given and the folder has nothing of that name; else the path in the folder."""
    if str(path) != SAMPLE or (folder / path).exists():
        return folder / path
    return Path(__file__).with_name("samples") / f"{SAMPLE}.zarr"


def name_of(path: Path) -> str:
    """How the trace at a path is typed."""
    return SAMPLE if path == bundled(Path(SAMPLE)) else str(path)
