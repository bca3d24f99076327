"""Plan thousands of replays, run them on supervised workers here or on a cluster, and store their results as parts."""

from __future__ import annotations

from importlib import import_module
from typing import Any

if __name__ != "moereplay.sweeps":
    raise ImportError("import this package as moereplay.sweeps: a second copy of its modules would be loaded")


def extra(name: str, module: str) -> Any:
    """Import a module of the optional dependencies `name`. Raises ConfigError with the command that installs them."""
    try:
        return import_module(module)
    except ImportError:
        from moereplay.simulator.errors import ConfigError
        from moereplay.traces.files import install_command

        package = module.partition(".")[0]
        raise ConfigError(f"missing package {package}: {install_command(name)}") from None
