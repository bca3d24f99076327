"""Tables, figures and statistics from result files and traces; never runs an engine."""

if __name__ != "moereplay.analysis":
    raise ImportError("import this package as moereplay.analysis: a second copy of its modules would be loaded")
