"""`moereplay policies`, `presets`, `models`, `platforms`, `routing`: list what ships, explain one with its sources."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from pydantic_core import to_json

from moereplay.analysis.tables import definitions, table
from moereplay.commands import options
from moereplay.commands.options import grouped
from moereplay.commands.terminal import STDOUT, progress, say, show, show_json
from moereplay.policies import named
from moereplay.policies.table import explain, rows
from moereplay.policies.table import markdown as as_markdown
from moereplay.results.errors import ResultError
from moereplay.simulator.cards import cards as known
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.here import Survey, as_file, surveyed
from moereplay.simulator.machine import Machine, assembled, in_memory
from moereplay.simulator.platforms import as_toml, platform
from moereplay.simulator.platforms import presets as shipped
from moereplay.simulator.presets import NAMES, preset
from moereplay.simulator.presets import explain as explain_preset
from moereplay.traces.checkpoints.found import explained, model_of
from moereplay.traces.files import write_whole
from moereplay.traces.geometry import known_models
from moereplay.traces.store import open_trace


def policies(
    name: Annotated[str | None, typer.Argument(help="Explain this policy.")] = None,
    policy_file: options.PolicyFiles = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/policies-table.md.")] = False,
) -> None:
    """List the policies of all four kinds, or explain one: parameters, needs, source."""
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
    if name:
        show(*definitions(explain_preset(preset(name))))
        return
    show(table([{column: preset(known).row()[column] for column in ("preset", "what")} for known in NAMES]))
    show("policies, capacity, platform and sources of one: moereplay presets NAME")


def models(
    name: Annotated[
        str | None,
        typer.Argument(help="Show the sizes of this model, file, folder, address, or owner/name of the hub."),
    ] = None,
    quant: options.Quant = "",
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Read an address or owner/name again, and keep the new answer.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the known models, or show the sizes of one: a known name, a file, a folder, or owner/name of the hub."""
    if name:
        found = model_of(name, quant, refresh)
        if as_json:
            show_json(found.model_dump(mode="json"))
        else:
            show(*definitions(explained(found)))
        return
    if quant or refresh:
        raise ConfigError(f"--{'quant' if quant else 'refresh'} requires the name of a model")
    shown = ("model", "layers", "experts", "k", "shared", "weights", "active")
    if as_json:
        show_json([model.model_dump(mode="json") for model in known_models().values()])
        return
    show(table([{column: model.row()[column] for column in shown} for model in known_models().values()]))
    show("router, context, bytes by precision and sources of one: moereplay models NAME")


# -- platforms: list machines, show one, describe one from its parts, or look at this one and measure it


class Parts(NamedTuple):
    """A machine from the parts that its owner names; the other values are assumed and listed."""

    gpu: Annotated[
        str, typer.Option(help='Card by name: "RTX 3090", "2x RTX 3090", "M4 Max"; none: the CPU alone.')
    ] = ""
    vram: Annotated[str, typer.Option(help="Memory of each GPU as it is sold: 24GB, which is 24GiB.")] = ""
    ram: Annotated[str, typer.Option(help="Main memory (RAM) as it is sold: 64GB, which is 64GiB.")] = ""
    ram_rate: Annotated[
        str,
        typer.Option(
            help="Rate at which the CPU reads main memory: 60GB/s, its kits: DDR4-3600 (two channels), 8xDDR5-4800, or "
            "a range of either: DDR4-3200..DDR5-6000."
        ),
    ] = ""
    link: Annotated[str, typer.Option(help="Link of the GPU: 4.0x16, or a rate such as 25GB/s.")] = ""
    disk: Annotated[str, typer.Option(help="Rate of disk reads: 3.5GB/s; none if RAM holds every expert.")] = ""
    headless: Annotated[
        bool, typer.Option("--headless", help="No desktop on the card: others keep 1% of its memory, not 8%.")
    ] = False
    cores: Annotated[str, typer.Option(help="CPU cores, with their kind if known: 8, 8xAVX2, 16xAVX512.")] = ""

    def machine(self) -> Machine:
        """Return the machine of these parts. Raises ConfigError."""
        if self.disk.strip().lower() == "none":
            return in_memory(assembled(**self._replace(disk="")._asdict()))
        return assembled(**self._asdict())


class Output(NamedTuple):
    """How a machine is printed or written."""

    out: Annotated[
        Path | None, typer.Option(help="Platform file to write (.toml) for --here or parts; - is standard output.")
    ] = None
    toml: Annotated[bool, typer.Option("--toml", help="Print the platform as a .toml file to edit and pass.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False


@grouped
def platforms(
    name: Annotated[str | None, typer.Argument(help="Show this platform's figures and sources.")] = None,
    *,
    here: Annotated[bool, typer.Option("--here", help="Detect this machine, and measure its RAM and disk.")] = False,
    folder: Annotated[
        Path | None, typer.Option(help="With --here: folder on the disk to measure (default: the current one).")
    ] = None,
    parts: Parts,
    cards: Annotated[bool, typer.Option("--cards", help="List the GPUs and processors that --gpu knows.")] = False,
    output: Output,
) -> None:
    """List the built-in platforms, show one with its sources, or describe this machine or a list of parts."""
    _check(name, here, folder, parts, cards, output)
    if here:
        survey = surveyed(folder or Path())
        _give(survey.machine, survey, output)
    elif any(parts):
        _give(parts.machine(), None, output)
    elif name is not None:
        machine = platform(name)
        text = as_toml(machine) if output.toml else to_json(machine.document(), indent=1, inf_nan_mode="null").decode()
        print(text, end="" if output.toml else "\n")
    else:
        _listed(cards, output.as_json)


def _check(name: str | None, here: bool, folder: Path | None, parts: Parts, cards: bool, output: Output) -> None:
    """Raises ConfigError for options that cannot be combined, and ResultError for a file that cannot be written."""
    said = {"a platform's name": name is not None, "--here": here, "--cards": cards}
    said |= {f"--{option.replace('_', '-')}": bool(value) for option, value in parts._asdict().items()}
    asked = [what for what, is_said in said.items() if is_said]
    of_parts = any(parts) and not (name is not None or here or cards)
    if len(asked) > 1 and not of_parts:
        raise ConfigError(f"{asked[0]} cannot be combined with {asked[1]}: each describes a machine")
    if folder is not None and not here:
        raise ConfigError("--folder requires --here")
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--folder {folder}: expected a folder on the disk to measure")
    if output.out is not None and not (here or of_parts):
        raise ConfigError("--out requires --here, or parts such as --gpu; to print a platform's file, pass --toml")
    if output.toml and not asked:
        raise ConfigError("--toml requires a platform, as in `moereplay platforms phone-ufs4 --toml`")
    if output.toml and cards:
        raise ConfigError("--toml cannot be combined with --cards: cards are parts of platforms")
    if output.toml + output.as_json + (output.out == STDOUT) > 1:
        raise ConfigError("--toml, --json and --out - are mutually exclusive: each prints the machine")
    if output.out is not None and output.out != STDOUT:
        options.check_platform_file(output.out)


def _give(machine: Machine, survey: Survey | None, output: Output) -> None:
    """Print a machine, and write its file."""
    text = as_file(machine)
    if output.out is not None and output.out != STDOUT:
        _write(output.out, text)
    if output.toml or output.out == STDOUT:
        print(text, end="")
    elif output.as_json:
        found = survey.document() if survey else {}
        show_json({"platform": machine.platform.document(), **found, "assumed": machine.assumed})
    else:
        lines = [*(survey.lines() if survey else machine.lines()), *(("assumed", each) for each in machine.assumed)]
        show(*definitions(lines))
        if output.out is None:
            say("--out mine.toml writes it as a platform file for --platform; --toml prints that file")
    if output.out is not None and output.out != STDOUT:
        say(f"wrote {output.out}: pass it as --platform {output.out}")


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise ResultError(f"cannot write {path}: {error.strerror or error}; nothing was written") from None


def _listed(cards: bool, as_json: bool) -> None:
    if as_json:
        entries = known().values() if cards else shipped()
        show_json([each.row() for each in entries])
    elif cards:
        show(table([{key: value for key, value in each.row().items() if key != "source"} for each in known().values()]))
        show("sources: --json; a machine with one: moereplay platforms --gpu NAME --ram 64GB")
    else:
        show(table([each.row() for each in shipped()]))
        show("this machine: --here; one from its parts: --gpu NAME --ram 64GB; the cards for it: --cards")


# -- routing: statistics of a model's routing, that synthetic routing can be drawn from


def routing_list() -> None:
    """List the built-in routing models, with the error of their hit rates against real routing."""
    from moereplay.traces.routing import GENERIC, shipped

    show(
        table(
            [
                {
                    "routing model": name,
                    "layers": model.layers,
                    "experts": model.experts,
                    "k": model.k,
                    "off by": _off(model.error and (model.error.hit_points, model.error.misses)),
                    "two halves": _off(model.error and (model.error.halves, model.error.halves_misses)),
                    "recall": ", ".join(f"{each:.2f}" for each in model.recall or ()) or "-",
                }
                for name, model in shipped().items()
            ]
        )
    )
    show(
        "off by: points of hit rate and share of misses, on requests that were not fitted; two halves: the same of the "
        "requests that were fitted, themselves; recall: of look-ahead by depth, where it was recorded; the source of "
        "one: moereplay routing show NAME"
    )
    show(
        f"any other model has generic routing, {', '.join(GENERIC)}, at its shape, with a far larger error: "
        "docs/routing.md"
    )


def _off(error: tuple[float | None, float | None] | None) -> str:
    if not error or error[0] is None or error[1] is None:
        return ""
    return f"{error[0]:.1f}, {100 * error[1]:.0f}%"


def routing_show(
    name: Annotated[str, typer.Argument(help="Name of a routing model, or its file NAME.toml.", show_default=False)],
) -> None:
    """Print a routing model as a file."""
    from moereplay.traces.routing import as_toml, named

    print(as_toml(named(name)), end="")


def routing_fit(
    trace: options.TracePath,
    out: Annotated[Path, typer.Option(help="File to write, NAME.toml.", show_default=False)],
    *,
    steps: Annotated[int, typer.Option(min=1, max=100, help="Steps of the search of each layer.")] = 3,
    summary: Annotated[str, typer.Option(help="One-line description of the recording.")] = "",
    source: Annotated[str, typer.Option(help="Source of the trace.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
) -> None:
    """Fit a routing model to half of a trace's requests, and judge it on the other half."""
    from moereplay.calibration.routing import fit, units
    from moereplay.traces.routing import as_toml

    if out.suffix != ".toml":
        raise ConfigError(f"invalid --out {out}: expected NAME.toml")
    if out.exists():
        raise ConfigError(f"{out} exists; choose another name or remove it")
    opened = open_trace(trace)
    with progress(units(opened.geometry.layers), "parts") as done:
        found = fit(opened, out.stem, steps, seed, done)
    found = found.model_copy(update={"summary": summary, "source": source})
    write_whole(out, as_toml(found).encode())
    off = found.error
    assert off and off.halves is not None and off.halves_misses is not None
    judges = f"{off.requests} requests that were" if off.requests > 1 else "a request, or half of one, that was"
    say(
        f"wrote {out}: hit rates are off by {off.hit_points:.1f} points in the mean and misses by "
        f"{100 * off.misses:.0f}% in the median, on {judges} not fitted; the fitted requests themselves are off by "
        f"{off.halves:.1f} points and {100 * off.halves_misses:.0f}%"
    )
