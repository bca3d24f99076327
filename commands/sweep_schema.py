"""`moereplay sweep schema`: the JSON Schema of experiment files, for editors."""

from __future__ import annotations

from moereplay.commands.terminal import show_json


def sweep_schema() -> None:
    """Print the JSON Schema of experiment files, from which editors complete and check."""
    from moereplay.sweeps.experiment.schema import json_schema

    show_json(json_schema())
