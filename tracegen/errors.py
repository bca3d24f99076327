"""Errors of recording. Importable without torch."""

from __future__ import annotations

from importlib.util import find_spec

from moereplay.traces.files import install_command


class RecordError(Exception):
    """A model, checkpoint or prompt set cannot be recorded; the message names the thing and the fix."""


# -- Errors for packages that are not installed, before anything imports them. Importable without torch.


def require_torch() -> None:
    """Raises RecordError unless torch and transformers are installed."""
    if not find_spec("torch") or not find_spec("transformers"):
        raise RecordError(f"recording needs torch and transformers: {install_command('record')}")


def require(package: str, what: str, otherwise: str = "") -> None:
    """Raises RecordError unless the package is installed; the message names `what` needs it, and an alternative."""
    if not find_spec(package):
        raise RecordError(f"{what} needs {package}: pip install {package}{otherwise and f', or {otherwise}'}")
