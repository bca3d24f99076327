"""Replay the routing of Mixture-of-Experts models from Python: open a trace, configure, replay, read results.

A name is imported when it is first used, so `import moereplay` costs nothing. docs/api.md describes every name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import policies.contract as contract
    from policies.contract import PolicyError
    from policies.files import register as register_policy
    from results.errors import ResultError
    from results.result import Result
    from simulator.config import ReplayConfig, configure
    from simulator.errors import ConfigError
    from simulator.replay import replay
    from sweeps.stored import read_results
    from traces.arrays import from_arrays
    from traces.geometry import known as known_model
    from traces.schema import Geometry, Header, Provenance, Request, Router, Trace, TraceError
    from traces.store import open_trace
    from traces.writer import TraceWriter, write_trace

    __version__: str

#: Where each name comes from: a module, and its name there where that is another one.
_HOME = {
    "ConfigError": "simulator.errors",
    "Geometry": "traces.schema",
    "Header": "traces.schema",
    "PolicyError": "policies.contract",
    "Provenance": "traces.schema",
    "ReplayConfig": "simulator.config",
    "Request": "traces.schema",
    "Result": "results.result",
    "ResultError": "results.errors",
    "Router": "traces.schema",
    "Trace": "traces.schema",
    "TraceError": "traces.schema",
    "TraceWriter": "traces.writer",
    "configure": "simulator.config",
    "from_arrays": "traces.arrays",
    "known_model": "traces.geometry:known",
    "open_trace": "traces.store",
    "read_results": "sweeps.stored",
    "register_policy": "policies.files:register",
    "replay": "simulator.replay",
    "write_trace": "traces.writer",
}

__all__ = [
    "ConfigError",
    "Geometry",
    "Header",
    "PolicyError",
    "Provenance",
    "ReplayConfig",
    "Request",
    "Result",
    "ResultError",
    "Router",
    "Trace",
    "TraceError",
    "TraceWriter",
    "__version__",
    "configure",
    "contract",
    "from_arrays",
    "known_model",
    "open_trace",
    "read_results",
    "register_policy",
    "replay",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    """Import a name of `__all__`. Raises ImportError if a file of the user's hides one of our packages."""
    if name not in __all__:
        raise AttributeError(f"module 'moereplay' has no attribute {name!r}")
    globals()[name] = found = _imported(name)
    return found


def _imported(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("moereplay")
    from moereplay.packages import check

    check()
    if name == "contract":
        return import_module("moereplay.contract")
    module, _, other = _HOME[name].partition(":")
    return getattr(import_module(module), other or name)


def __dir__() -> list[str]:
    return __all__
