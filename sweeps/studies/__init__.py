"""Policy sets with which a model's sensitivity is studied, one file per study.

Adding one is a file here with a `STUDY`, and its name below.
"""

from __future__ import annotations

from importlib import import_module

from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.studies.study import Study
from moereplay.traces.texts import hint

#: As `quality --study` spells them.
NAMES = ("ranks", "lambda", "precision")


def study(name: str) -> Study:
    """Raises ConfigError for one that does not exist."""
    if name not in NAMES:
        raise ConfigError(f"no study called {name!r}: {hint(name, NAMES)}")
    return import_module(f"moereplay.sweeps.studies.{name}_").STUDY
