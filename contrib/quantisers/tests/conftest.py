"""Fixtures of the core's tests of quantisers."""

from tests.commands.test_quantiser_cli import live, model  # noqa: F401
from tests.tracegen.test_tiers import cache, used  # noqa: F401
