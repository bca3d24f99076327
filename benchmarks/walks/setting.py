"""Check setting.patch: the setting is an option, has an effect, is stored, and keeps identities at its default."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import typer

from moereplay.command import application
from moereplay.results.parts import part_of
from moereplay.results.stored import load
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.sweeps.store import Folder
from moereplay.traces.schema import Geometry
from moereplay.traces.synthetic import Synthetic, synthesise

SETTING, DEFAULT, OTHER = "contention", "platform", "none"
BEFORE = Path("tests/results/before/replays")


def main() -> None:
    """Raise AssertionError if the setting is not offered, has no effect, or is not stored."""
    verbs = typer.main.get_command(application()).commands  # type: ignore[attr-defined]
    assert all(SETTING in {each.name for each in verbs[verb].params} for verb in ("replay", "live", "validate"))
    geometry = Geometry(layers=3, experts=6, k=2, expert_bytes=(1_000_000,) * 3)
    trace = synthesise(Synthetic(kind="zipf", geometry=geometry, requests=2, prompt_tokens=2, decode_tokens=6))
    configs = [configure(capacity="40%", **{SETTING: value}) for value in (DEFAULT, OTHER)]
    assert configs[0].identity(trace) == configure(capacity="40%").identity(trace) != configs[1].identity(trace)
    results = [replay(trace, config, engine="reference") for config in configs]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(shutil.copytree(BEFORE, Path(scratch) / "replays"))
        for result in results:
            Folder(folder).store(part_of(result, None, None), {"sweep_version": 1})
        stored = load(folder)["config"].struct.field(SETTING).to_list()
    assert sorted(stored) == [OTHER, DEFAULT, DEFAULT]


if __name__ == "__main__":
    main()
