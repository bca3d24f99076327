"""The one error of this room."""


class PolicyError(Exception):
    """A policy cannot be used as asked; the message names it and the fix."""
