"""Files that pages assume, under the names that they use, and what stands in for files of commands that are not run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from moereplay.simulator.platforms import as_toml, platform
from tests.kit.documented import Command
from tests.kit.evidence_folder import made
from tests.kit.quality_rows import Loss, changed, quality_frame, written
from tests.kit.recordings import ROOT

SAMPLE = ROOT / "traces" / "samples" / "miniature.zarr"
LAYERS, K = 16, 8  #: of OLMoE, whose name the pages use


def assumed(page: str, folder: Path) -> None:
    """Write what the page takes for granted."""
    FILES.get(page, lambda folder: None)(folder)


def stand_in(command: Command, cwd: Path) -> None:
    """A trace or a platform under the name that a command which is not run was to write."""
    out = next(
        (cwd / word for option, word in zip(command.words, command.words[1:], strict=False) if option == "--out"), None
    )
    if out is None or out.exists():
        return
    if out.suffix == ".zarr":
        shutil.copytree(SAMPLE, out)
    elif out.suffix == ".toml":
        out.write_text(as_toml(platform("phone-ufs4")))


def _block(page: str, begins: str) -> str:
    """The code block of a page that begins so."""
    found = re.search(rf"```\w+\n({re.escape(begins)}.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    assert found, f"{page} has no block that begins with {begins}"
    return found[1]


def _policies(folder: Path) -> None:
    for name in ("newest.py", "skip_light.py"):
        (folder / name).write_text(_block("docs/policies.md", f'"""{name}: '))
    _experiment(folder)


def _experiment(folder: Path) -> None:
    (folder / "experiment.toml").write_text(_block("docs/sweeps.md", "traces = "))


def _sets(page: str, folder: Path) -> None:
    (folder / "sets.toml").write_text(_block(page, "[base]"))


def _live_points(folder: Path) -> None:
    """Policy sets, and what a model might have answered under them."""
    (folder / "sets.toml").write_text(_block("docs/forecast.md", "[base]"))
    changes = [changed(0.06 * at, 0.07 * at, 0, 0.5 * at, 0) for at in range(1, 13)]
    routing = [("cache_prior:lam={}", "cumulative:p=0.{}", "max_rank:m={}")[at % 3].format(at + 1) for at in range(12)]
    sets = {name: (change, {"routing": name}) for name, change in zip(routing, changes, strict=True)}
    losses: dict[str, Loss] = dict.fromkeys(("nll", "kl"), lambda change: 0.02 * change.variation)
    written(folder / "runs" / "live", quality_frame(sets, losses))


def _log(folder: Path) -> None:
    """Write a made-up engine log."""
    made(folder / "made", 0.02)
    shutil.copy(folder / "made" / "tokens" / "made-fifth-ov.csv", folder / "log.csv")


def _platforms(folder: Path) -> None:
    """A folder of evidence with cells of a Monday."""
    _log(folder)
    (folder / "made").rename(folder / "runs")
    cells = folder / "runs" / "cells.csv"
    cells.write_text(re.sub(r"(?m)^made-(off|half|two)", r"monday-\1", cells.read_text()))


def _device(folder: Path) -> None:
    """The reader's log lies where the page is typed."""
    (folder / "runs" / "device").mkdir(parents=True)
    _log(folder / "runs" / "device")


def _routes(folder: Path) -> None:
    """Routing of a few tokens as three tools might write it, and colibri's counts of a model like the miniature."""
    ids = np.array(
        [[np.random.default_rng(t * LAYERS + layer).permutation(64)[:K] for layer in range(LAYERS)] for t in range(4)]
    )
    np.save(folder / "ids.npy", ids)
    places = [(t, layer) for t in range(len(ids)) for layer in range(LAYERS)]
    rows = [f"{t},{layer},{' '.join(map(str, ids[t, layer]))}" for t, layer in places]
    (folder / "routes.csv").write_text("\n".join(["pos,moe_layer,topk", *rows]) + "\n")
    two = {f"e{rank}": [int(ids[at][rank]) for at in places] for rank in range(2)}
    shares = {"w0": [0.75] * len(places), "w1": [0.25] * len(places), "stage": ["decode"] * len(places)}
    numbers = {"id": ["a"] * len(places), "token": [t for t, _ in places], "layer": [layer for _, layer in places]}
    pl.DataFrame(numbers | two | shares).write_parquet(folder / "routes.parquet")
    uses = [f"{layer} {expert} {1 + (layer * expert) % 97}" for layer in range(LAYERS) for expert in range(64)]
    (folder / "m.coli_usage").write_text("\n".join(uses) + "\n")


def _logs(folder: Path) -> None:
    """Write logs of other tools."""
    samples = {"colibri.route": "route.txt", "cache_lab.jsonl": "lab.jsonl", "engine_log.jsonl": "moe_routes.jsonl"}
    samples |= {"onnx_routing.log": "ort.log", "layer_rows.json": "trace.json"}
    contributed = ROOT / "contrib" / "importers" / "tests" / "samples"
    for sample, name in samples.items():
        shutil.copy(contributed / sample, folder / name)
    shutil.copytree(contributed / "moe_beyond", folder / "prompts", dirs_exist_ok=True)
    shutil.copytree(contributed / "layer_files", folder / "deepseek" / "trace-full", dirs_exist_ok=True)


FILES: dict[str, Callable[[Path], None]] = {
    "contrib/importers/README.md": _logs,
    "docs/forecast.md": _live_points,
    "docs/platforms.md": _platforms,
    "docs/policies.md": _policies,
    "docs/recipes/device.md": _device,
    "docs/sweeps.md": _experiment,
    "docs/trace-format.md": _routes,
    "docs/validation.md": partial(_sets, "docs/validation.md"),
    "docs/quality.md": partial(_sets, "docs/quality.md"),
}
