"""The one error of this package."""


class PolicyError(Exception):
    """A policy cannot be used so; the message names it and the fix."""
