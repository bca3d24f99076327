"""Whether Python finds our packages, and no file of the user's, under their names.

The packages are top-level ones with plain names (`traces`, `results`, ...). A user's `traces.py` beside a script, or in
the folder where `python -m moereplay` runs, comes before them on Python's path. A folder without `__init__.py` is no
module, and gives way.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("analysis", "calibration", "commands", "policies", "results", "simulator", "sweeps", "tracegen", "traces")
HOME = Path(__file__).resolve().parents[1]


class HiddenPackageError(ImportError):
    """A file of the user's has the name of one of our packages; the message names it and the fix."""


def check() -> None:
    """Raise HiddenPackageError for the first package that Python finds elsewhere than beside this one."""
    for package in PACKAGES:
        if _is_plain_folder(package) and str(HOME) not in sys.path:
            sys.path.append(str(HOME))  # a package anywhere on the path goes before a folder that is none
        found = _found(package)
        if found != HOME / package / "__init__.py":
            raise HiddenPackageError(_message(package, found))


def _is_plain_folder(package: str) -> bool:
    spec = None if package in sys.modules else find_spec(package)
    return spec is not None and spec.origin is None


def _found(package: str) -> Path | None:
    """The file that `import package` runs, or has run; None if there is none."""
    loaded = sys.modules.get(package)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
    else:
        spec = find_spec(package)
        file = spec and spec.origin
    return Path(file).resolve() if file else None


def _message(package: str, found: Path | None) -> str:
    if found is None:
        return f"the package {package!r} of moereplay is missing in {HOME}; install it again"
    hides = found.parent if found.name == "__init__.py" else found
    return f"{hides} hides the package {package!r} of moereplay; rename it, or run from another folder"
