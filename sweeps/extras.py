"""Packages that only some ways of running need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from moereplay.simulator.errors import ConfigError
from moereplay.traces.installing import install_command


def extra(name: str, module: str) -> Any:
    """A module of the optional dependencies `name`. Raises ConfigError saying how to install them."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ConfigError(f"this needs {package}, which is not installed: {install_command(name)}") from None
