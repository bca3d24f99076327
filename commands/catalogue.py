"""`moereplay policies`, `presets` and `models`: list what ships, or explain one entry with its sources."""

from __future__ import annotations

from typing import Annotated

import typer

from moereplay.commands import options
from moereplay.commands.terminal import show, show_json


def policies(
    name: Annotated[str | None, typer.Argument(help="Explain this policy.")] = None,
    policy_file: options.PolicyFiles = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/policies-table.md.")] = False,
) -> None:
    """List the policies of all four kinds, or explain one: parameters, needs, source."""
    from moereplay.analysis.tables import definitions, table
    from moereplay.policies import named
    from moereplay.policies.table import explain, rows
    from moereplay.policies.table import markdown as as_markdown

    if name is not None:
        for policy in named(name):
            show(*definitions(explain(policy)), "")
    elif markdown:
        print(as_markdown())
    else:
        show(table([{column: row[column] for column in ("kind", "policy", "what")} for row in rows()]))
        show("parameters, needs and source of one: moereplay policies NAME; of all: --markdown")


def presets(name: Annotated[str | None, typer.Argument(help="Explain this preset.")] = None) -> None:
    """List the presets of `replay --preset`, or explain one: values, sources, assumptions."""
    from moereplay.analysis.tables import definitions, table
    from moereplay.simulator.presets import NAMES, explain, preset

    if name:
        show(*definitions(explain(preset(name))))
        return
    show(table([{column: preset(known).row()[column] for column in ("preset", "what")} for known in NAMES]))
    show("policies, capacity, platform and sources of one: moereplay presets NAME")


def models(
    name: Annotated[
        str | None,
        typer.Argument(help="Show the sizes of this model, file, folder, address, or owner/name of the hub."),
    ] = None,
    quant: options.Quant = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the models whose geometry is known, or show the sizes of one, also of a file, a folder, or the hub."""
    from moereplay.analysis.tables import definitions, table
    from moereplay.simulator.errors import ConfigError
    from moereplay.traces.checkpoints.found import explained, model_of
    from moereplay.traces.geometry import MODELS

    if name:
        found = model_of(name, quant)
        if as_json:
            show_json(found.model_dump(mode="json"))
        else:
            show(*definitions(explained(found)))
        return
    if quant:
        raise ConfigError("--quant requires the name of a model")
    shown = ("model", "layers", "experts", "k", "shared", "MiB per expert")
    if as_json:
        show_json([model.model_dump(mode="json") for model in MODELS.values()])
        return
    show(table([{column: model.row()[column] for column in shown} for model in MODELS.values()]))
    show("router, context, bytes by precision and sources of one: moereplay models NAME")
