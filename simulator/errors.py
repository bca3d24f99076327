"""The error of replays that cannot be configured."""


class ConfigError(Exception):
    """A replay cannot be configured so; the message names the setting and the fix."""
