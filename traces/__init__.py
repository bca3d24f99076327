"""Routing traces: format, store, importers, geometry of models. Imports no policies, engines or torch."""
