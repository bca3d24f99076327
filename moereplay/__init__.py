"""Replay the routing of Mixture-of-Experts models from Python: open a trace, configure, replay, read results.

A name is imported when it is first used, so `import moereplay` costs nothing. docs/api.md describes every name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import moereplay.policies.contract as contract
    from moereplay.policies.contract import PolicyError
    from moereplay.policies.files import register as register_policy
    from moereplay.results.errors import ResultError
    from moereplay.results.result import Result
    from moereplay.simulator.config import ReplayConfig
    from moereplay.simulator.errors import ConfigError
    from moereplay.simulator.presets import configure
    from moereplay.simulator.replay import replay
    from moereplay.sweeps.parts import read_results
    from moereplay.traces.geometry import known as known_model
    from moereplay.traces.recorder import from_arrays
    from moereplay.traces.schema import Geometry, Header, Provenance, Request, Router, Trace, TraceError
    from moereplay.traces.store import open_trace
    from moereplay.traces.writer import TraceWriter, write_trace

    __version__: str

#: Where each name comes from: a module, and its name there where that is another one.
_HOME = {
    "ConfigError": "moereplay.simulator.errors",
    "Geometry": "moereplay.traces.schema",
    "Header": "moereplay.traces.schema",
    "PolicyError": "moereplay.policies.contract",
    "Provenance": "moereplay.traces.schema",
    "ReplayConfig": "moereplay.simulator.config",
    "Request": "moereplay.traces.schema",
    "Result": "moereplay.results.result",
    "ResultError": "moereplay.results.errors",
    "Router": "moereplay.traces.schema",
    "Trace": "moereplay.traces.schema",
    "TraceError": "moereplay.traces.schema",
    "TraceWriter": "moereplay.traces.writer",
    "configure": "moereplay.simulator.presets",
    "from_arrays": "moereplay.traces.recorder",
    "known_model": "moereplay.traces.geometry:known",
    "open_trace": "moereplay.traces.store",
    "read_results": "moereplay.sweeps.parts",
    "register_policy": "moereplay.policies.files:register",
    "replay": "moereplay.simulator.replay",
    "write_trace": "moereplay.traces.writer",
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
    """Import a name of `__all__`."""
    if name not in __all__:
        raise AttributeError(f"module 'moereplay' has no attribute {name!r}")
    globals()[name] = found = _imported(name)
    return found


def _imported(name: str) -> Any:
    if name == "__version__":
        from moereplay.traces.documents import package_version

        return package_version()
    if name == "contract":
        return import_module("moereplay.contract")
    module, _, other = _HOME[name].partition(":")
    return getattr(import_module(module), other or name)


def __dir__() -> list[str]:
    return __all__
