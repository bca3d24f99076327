"""Importers of formats that one publication, or one fork of an engine, writes: plug-ins of moereplay."""
