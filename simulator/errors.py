"""The one error of this room."""


class ConfigError(Exception):
    """A replay cannot be configured as asked; the message names the setting and the fix."""
