"""The one error of this package."""


class PolicyError(Exception):
    """The error of a policy that cannot be used; the message names the policy and the fix."""
