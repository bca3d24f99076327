"""Checks of users' own policies, at every call: what they read, write, raise and return."""
