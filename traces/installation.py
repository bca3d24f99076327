"""This installation: the bundled trace, and the command that installs optional dependencies.

Standard library at import: every command looks up its trace here.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from shlex import quote

SAMPLE = "miniature"  #: name of the bundled trace
DISTRIBUTION = "moereplay"


def bundled(path: Path, folder: Path = Path()) -> Path:
    """Return the bundled trace for its name, unless the folder has a file of that name; else the path in the folder."""
    if str(path) != SAMPLE or (folder / path).exists():
        return folder / path
    return Path(__file__).with_name("samples") / f"{SAMPLE}.zarr"


def name_of(path: Path) -> str:
    """Return the name that a user types for the trace at a path."""
    return SAMPLE if path == bundled(Path(SAMPLE)) else str(path)


def install_command(extra: str) -> str:
    """Return the command that installs the optional dependencies `extra`.

    In a clone it installs the clone with this extra. For a wheel it lists the packages themselves: moereplay is on no
    package index, so `pip install 'moereplay[...]'` would fail, or install another project of that name.
    """
    try:
        found = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:  # run from its folder
        return _clone_command(Path(__file__).resolve().parents[1], extra)
    clone = _clone_of(found)
    if clone is not None:
        return _clone_command(clone, extra)
    return f"pip install {' '.join(quote(package) for package in _packages(found, extra))}"


def _clone_command(clone: Path, extra: str) -> str:
    place = "." if clone == Path.cwd() else str(clone)
    return f"pip install -e {quote(f'{place}[{extra}]')}"


def _clone_of(found: metadata.Distribution) -> Path | None:
    """Return the folder of an editable installation (PEP 610), None for a wheel."""
    import json
    from urllib.parse import urlparse
    from urllib.request import url2pathname

    project = Path(str(found.locate_file("pyproject.toml")))
    if project.is_file():  # Python runs in the clone and finds the metadata that its build left there
        return project.parent
    try:
        origin = json.loads(found.read_text("direct_url.json") or "{}")
        editable = origin["dir_info"]["editable"]
        return Path(url2pathname(urlparse(origin["url"]).path)) if editable is True else None
    except (ValueError, KeyError, TypeError):
        return None


def _packages(found: metadata.Distribution, extra: str) -> list[str]:
    """Return the requirements of an extra without their markers, such as `submitit>=1.5.3`."""
    from packaging.requirements import Requirement

    needed = [Requirement(text) for text in found.requires or ()]
    wanted = [each for each in needed if each.marker and each.marker.evaluate({"extra": extra})]
    return [str(each).partition(";")[0].strip() for each in wanted]
