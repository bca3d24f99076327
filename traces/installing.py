"""How to install what only some commands need, in a form that works for how this program itself was installed.

The package is on no index, so `pip install 'moereplay[...]'` fails, or one day installs a package of somebody else.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from shlex import quote
from urllib.parse import urlparse
from urllib.request import url2pathname

from packaging.requirements import Requirement

DISTRIBUTION = "moereplay"


def install_command(extra: str) -> str:
    """Return the command that installs the optional dependencies `extra`.

    For a clone that is installed in place it is the clone with this extra; for a wheel, the packages themselves.
    """
    try:
        found = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:  # run from its folder
        return _of_clone(Path(__file__).resolve().parents[1], extra)
    clone = _clone_of(found)
    if clone is not None:
        return _of_clone(clone, extra)
    return f"pip install {' '.join(quote(package) for package in _packages(found, extra))}"


def _of_clone(clone: Path, extra: str) -> str:
    place = "." if clone == Path.cwd() else str(clone)
    return f"pip install -e {quote(f'{place}[{extra}]')}"


def _clone_of(found: metadata.Distribution) -> Path | None:
    """The folder that an installation in place leads to (PEP 610); None for a wheel."""
    project = Path(str(found.locate_file("pyproject.toml")))
    if project.is_file():  # Python runs in the clone, and finds what its build left there first
        return project.parent
    try:
        origin = json.loads(found.read_text("direct_url.json") or "{}")
        editable = origin["dir_info"]["editable"]
        return Path(url2pathname(urlparse(origin["url"]).path)) if editable is True else None
    except (ValueError, KeyError, TypeError):
        return None


def _packages(found: metadata.Distribution, extra: str) -> list[str]:
    """The requirements of an extra without its marker, `submitit>=1.5.3`."""
    needed = [Requirement(text) for text in found.requires or ()]
    wanted = [each for each in needed if each.marker and each.marker.evaluate({"extra": extra})]
    return [str(each).partition(";")[0].strip() for each in wanted]
