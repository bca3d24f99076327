"""A trace, a policy set and a platform become a result."""
