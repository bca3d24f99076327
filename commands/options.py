"""Options that several verbs share, typed once; those of settings are in `commands/settings.py`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pydantic import ValidationError


def _bundled(path: Path) -> Path:
    """The trace that comes with the program, if its name alone is given."""
    from moereplay.traces.bundled import bundled

    return bundled(path)


TracePath = Annotated[
    Path,
    typer.Argument(help="A trace folder, NAME.zarr, or `miniature` (bundled).", show_default=False, callback=_bundled),
]
NewTrace = Annotated[Path, typer.Option(help="The trace to write, NAME.zarr.", show_default=False)]


def _take_policies(paths: list[Path] | None) -> list[Path] | None:
    """Add the policies of these files to the catalogue, before the verb runs. Raises PolicyError or OSError."""
    if paths:
        from moereplay.policies.files import register

        for path in paths:
            register(path)
    return paths


# Verbs only name this one: it has done its work before they run.
PolicyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--policy-file",
        help="Your own policy (.py), see docs/policies.md; may be given again.",
        callback=_take_policies,
    ),
]
Engine = Annotated[str, typer.Option(help="compiled, reference: the same results, one fast, one readable.")]


Dense = Annotated[str, typer.Option(help="Bytes of all weights that are no routed expert, as stored: 1816MiB.")]
DenseBits = Annotated[str, typer.Option(help="Instead of --dense: bits per weight of these, or their format: Q8_0.")]


def stored(expert_bits: str, dense: str, dense_bits: str) -> dict[str, Any]:
    """Return the fields of importers' `Options` for how weights are stored. Raises ConfigError."""
    from moereplay.simulator.capacity import dense_size
    from moereplay.simulator.errors import ConfigError
    from moereplay.traces.dense import check_dense_bits
    from moereplay.traces.schema import check_bits
    from moereplay.traces.weight_formats import bits_of, check_format, is_number

    if dense and dense_bits:
        raise ConfigError("--dense cannot be combined with --dense-bits")
    try:
        if dense_bits:
            check_dense_bits(dense_bits)
        named = bool(expert_bits) and not is_number(expert_bits)
        if expert_bits:
            check_bits(bits_of(expert_bits))
        return {
            "expert_bits": float(expert_bits) if expert_bits and not named else None,
            "weight_format": check_format(expert_bits) if named else "",
            "dense_bytes": dense_size(dense) if dense else None,
            "dense_bits": dense_bits,
        }
    except ValueError as wrong:
        option = "" if str(wrong).startswith("invalid --dense") else "invalid --expert-bits: "
        raise ConfigError(f"{option}{wrong}") from None


def named_experts(option: str, path: Path | None) -> Any:
    """What `--warm` or `--profile` names. Raises ConfigError if the file holds no JSON."""
    from moereplay.simulator.errors import ConfigError
    from moereplay.traces.documents import DocumentError, content, from_json

    try:
        return from_json(content(path)) if path else ()
    except (OSError, DocumentError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{option} {path}: {said}; expected a JSON list of [layer, expert]") from None


def check_events(path: Path | None) -> None:
    """Raises ConfigError for an event log of neither format."""
    from moereplay.simulator.errors import ConfigError

    if path and path.suffix not in (".parquet", ".csv"):
        raise ConfigError(f"--events {path}: an event log is Parquet or CSV; give it a name in .parquet or .csv")


def complaint(error: ValidationError) -> str:
    """The first thing that is wrong, by the name of its option."""
    from moereplay.traces.frozen import words

    first = error.errors()[0]
    option = f"--{str(first['loc'][0]).replace('_', '-')}: " if first["loc"] else ""
    return option + words(first)
