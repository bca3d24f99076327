"""Thousands of replays: jobs in batches, run by supervised workers here or on a cluster, kept as parts."""

if __name__ != "moereplay.sweeps":
    raise ImportError("import this package as moereplay.sweeps: a second copy of its modules would be loaded")
