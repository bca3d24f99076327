"""Routing traces: format, store, importers, geometry of models. Imports no policies, engines or torch."""

if __name__ != "moereplay.traces":
    raise ImportError("import this package as moereplay.traces: a second copy of its modules would be loaded")
