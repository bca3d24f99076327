"""Results of a replay: counters, metrics, and the files that hold them. This package never runs an engine."""

if __name__ != "moereplay.results":
    raise ImportError("import this package as moereplay.results: a second copy of its modules would be loaded")
