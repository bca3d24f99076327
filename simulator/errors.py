"""Errors of the simulator."""


class ConfigError(Exception):
    """The error of a replay that cannot be configured; the message names the setting and the fix."""


#: The latest time at which a step may begin, 146 years: engines add times up in int64.
LATEST_NS = 1 << 62


def too_late() -> ConfigError:
    """Return the error of a run in which a step would begin after LATEST_NS."""
    return ConfigError("the run takes more than 146 years of simulated time; lower the platform's times")
