"""`moereplay policies`, `presets`, `platforms` and `models`: list what ships, or explain one entry with its sources."""

from __future__ import annotations

from typing import Annotated

import typer

from moereplay.commands import options
from moereplay.commands.terminal import show


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


def platforms(
    name: Annotated[str | None, typer.Argument(help="Show this platform's figures and sources.")] = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print the platform as a .toml file to edit and pass.")] = False,
) -> None:
    """List the platforms that ship, or show one: every figure with its source."""
    from pydantic_core import to_json

    from moereplay.analysis.tables import table
    from moereplay.simulator.errors import ConfigError
    from moereplay.simulator.platforms import as_toml, platform
    from moereplay.simulator.platforms import presets as shipped

    if toml and name is None:
        raise ConfigError("--toml requires a platform; name one, as in `moereplay platforms phone-ufs4 --toml`")
    if name is None:
        show(table([preset.row() for preset in shipped()]))
    elif toml:
        print(as_toml(platform(name)), end="")
    else:
        print(to_json(platform(name).document(), indent=1, inf_nan_mode="null").decode())


def models(
    name: Annotated[
        str | None,
        typer.Argument(help="Show the sizes of this model, file, folder, address, or owner/name of the hub."),
    ] = None,
    quant: options.Quant = "",
) -> None:
    """List the models whose geometry is known, or show the sizes of one, also of a file, a folder, or the hub."""
    from moereplay.analysis.tables import table
    from moereplay.simulator.errors import ConfigError
    from moereplay.traces.checkpoints.found import model_of
    from moereplay.traces.geometry import MODELS

    if name:
        print(model_of(name, quant).model_dump_json(indent=1))
        return
    if quant:
        raise ConfigError("--quant requires the name of a model")
    shown = ("model", "layers", "experts", "k", "shared", "MiB per expert")
    show(table([{column: model.row()[column] for column in shown} for model in MODELS.values()]))
    show("router, context, bytes by precision and sources of one: moereplay models NAME")
