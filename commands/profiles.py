"""Counts of experts on their way to the file of a profile, which `--profile` and `--warm` take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moereplay.commands.terminal import say

if TYPE_CHECKING:
    from moereplay.traces.importers.contract import Options
    from moereplay.traces.profiles.contract import Form

SUFFIX = ".json"


def write_profile(path: Path, ranking: Sequence[tuple[int, int]]) -> None:
    """A JSON list of [layer, expert], best first. Raises OSError, leaving nothing."""
    from moereplay.traces.documents import json_text
    from moereplay.traces.files import write_whole

    write_whole(path, (json_text(ranking) + "\n").encode())


def profile_of(form: Form, source: Path, out: Path, options: Options, *, limit: int | None, resume: bool) -> None:
    """Write the ranking of a file of counts, the `limit` best experts of it. Raises TraceError or ResultError."""
    from moereplay.traces.geometry import known
    from moereplay.traces.profiles.contract import NO_ORDER, check_model, ranked

    _check_options(form, source, out, options, resume)
    counts = form.read(source, _named(options)) if form.named else form.read(source)
    if options.model:
        check_model(source, counts, known(options.model))
    ranking = ranked(counts.chosen, counts.layers)[:limit]
    write_profile(out, ranking)
    for note in counts.notes:
        say(f"note: {note}")
    say(f"note: {NO_ORDER}; --profile and --warm of `moereplay replay TRACE` take the list")
    say(f"wrote {out}: {len(ranking):,} experts, best first, of {counts}")


def _named(options: Options) -> str | None:
    """Whose counts of a file are read, as `--columns counts=NAME` says. Raises TraceError if it says more."""
    from moereplay.traces.importers.mapping import COUNTS
    from moereplay.traces.schema import TraceError

    asked = options.columns or {}
    if others := [field for field in asked if field != COUNTS]:
        raise TraceError(f"--columns {others[0]}= means nothing of counts; name them alone, {COUNTS}=NAME")
    return asked.get(COUNTS, (None,))[0]


def _check_options(form: Form, source: Path, out: Path, options: Options, resume: bool) -> None:
    """Raises TraceError for options that mean nothing here, and for an output that is no new NAME.json."""
    from moereplay.results.outputs import check_output
    from moereplay.traces.schema import TraceError

    if out.suffix != SUFFIX:
        name = f"give the profile a name, --out NAME{SUFFIX}"
        raise TraceError(f"{source}: it holds counts ({form.name}), and no order of tokens as a trace has: {name}")
    given = ["expert_bytes", "expert_bits", "prompt_length", "chunk", *([] if form.named else ["columns"])]
    wrong = [field for field in given if getattr(options, field) is not None] + ["resume"] * resume
    if wrong:
        option = wrong[0].replace("_", "-")
        raise TraceError(f"{source}: --{option} means nothing for counts ({form.name}); leave it out")
    check_output(out)
    if out.exists():
        raise TraceError(f"{out}: it exists; remove it, or choose another --out")
