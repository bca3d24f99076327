"""What a replay reports: counters, the files they are stored in, and their readers. Nothing here runs an engine."""

if __name__ != "moereplay.results":
    raise ImportError("import this package as moereplay.results: a second copy of its modules would be loaded")
