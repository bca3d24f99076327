"""What tests of both engines share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import cases


@pytest.fixture(params=cases.ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """`replay_lists` runs on this engine."""
    cases.ENGINE.append(request.param)
    yield request.param
    cases.ENGINE.pop()
