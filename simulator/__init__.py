"""A trace, a policy set and a platform become a result."""

if __name__ != "moereplay.simulator":
    raise ImportError("import this package as moereplay.simulator: a second copy of its modules would be loaded")
