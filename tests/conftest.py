"""What tests of both engines share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import policies
from tests import cases

# Commands that tests start read bytecode, whatever the environment says: without it an import takes longer than a test.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(tempfile.gettempdir()) / f"moereplay-bytecode-{os.getuid()}"))


@pytest.fixture(autouse=True)
def catalogue_as_shipped() -> Iterator[None]:
    """The user's own policies of a test leave with it."""
    yield
    for given in policies.GIVEN.values():
        given.clear()


@pytest.fixture(params=cases.ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """`replay_lists` runs on this engine."""
    cases.ENGINE.append(request.param)
    yield request.param
    cases.ENGINE.pop()
