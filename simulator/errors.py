"""Errors of the simulator."""


class ConfigError(Exception):
    """The error of a replay that cannot be configured; the message names the setting and the fix."""
