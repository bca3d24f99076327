"""Try what needs a GPU on one: record, validate, calibrate, measure and live runs, each beside what it must agree with.

Last changed in commit 5e864ceb. Do the paths that need a GPU agree with a CPU's?
Answer: docs/measured.md, on an H100 and an H200.

    python -m studies.cuda_study --out runs/cuda            # make study-cuda: 8 minutes, 30 GB of disk
    python -m studies.cuda_study --out runs/cuda --small --device cpu

Weights are random at OLMoE's sizes (nothing is downloaded), besides the bundled miniature, whose routing is real. Each
step is a command with a time limit; its output is kept under `--out`, also if it fails, and `steps.json` has status and
seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

ROOT = Path(__file__).resolve().parents[1]
MINIATURE = ROOT / "tracegen" / "miniature"
TEXT = str(MINIATURE / "heldout.txt")
WINDOWS = ("--text", TEXT, "--window", "64", "--prompt-tokens", "16", "--limit", "4")


class Step(NamedTuple):
    """A command."""

    name: str
    words: tuple[str, ...]  #: after `python -m`
    seconds: int  #: limit


def steps(device: str, out: Path, models: Path, small: bool) -> Iterator[Step]:
    """Yield the steps in the order of their worth."""
    olmoe, here = str(models / "olmoe"), str(out)
    size = ("--layers", "2", "--tokens", "4") if small else ("--layers", "8", "--tokens", "32")
    grid = ("--capacity", "25%") if small else ("--capacity", "10%,25%,50%")
    real = ("--slow-tier", "pinned", "--device", device, "--prompt", "8", *size)
    yield Step("here", ("moereplay", "platforms", "--here", "--out", f"{here}/here.toml"), 60)
    yield Step("model", ("studies.cuda_study", "--make", olmoe, "--device", device) + ("--small",) * small, 150)
    for model in ("olmoe-1b-7b", "qwen3-30b-a3b"):
        words = ("moereplay", "calibrate", "machine", "--slow-tier", "pinned", "--device", device, "--model", model)
        yield Step(f"calibrate-{model}", (*words, "--layers", "2", "--out", f"{here}/{model}.toml"), 90)
    for name in ("olmoe-1b-7b", "qwen3-30b-a3b-general"):
        made = ("--like", name, "--requests", "1", "--prompt-tokens", "0", "--decode-tokens", "64", "--recall", ".8")
        trace = str(models / f"{name}.zarr")
        yield Step(f"synthesise-{name}", ("moereplay", "synthesise", *made, "--seed", "11", "--out", trace), 60)
        sets = ("--eviction", "lru,least_stale", "--prefetch", "none,top_k", "--repeat", "2")
        yield Step(
            f"measure-{name}", ("moereplay", "measure", trace, *real, *grid, *sets, "--out", f"{here}/{name}"), 150
        )
    recorded = ("moereplay", "record", "miniature", *WINDOWS, "--look-ahead", "2", "--dtype", "float32")
    yield Step("record-cpu", (*recorded, "--device", "cpu", "--out", f"{models}/cpu.zarr"), 60)
    yield Step("record", (*recorded, "--device", device, "--out", f"{models}/mini.zarr"), 60)
    yield Step("agree", ("studies.cuda_study", "--agree", f"{models}/cpu.zarr", "--with", f"{models}/mini.zarr"), 60)
    yield Step("validate", ("moereplay", "validate", f"{models}/mini.zarr", "--device", device, "--json"), 120)
    trace = str(models / "olmoe-1b-7b.zarr")
    cpu = ("--capacity", "25%", "--miss", "cpu,fetch", "--out", f"{here}/miss-cpu")
    yield Step("measure-miss-cpu", ("moereplay", "measure", trace, *real, *cpu), 90)
    live = ("--slow-tier", "pinned", "--device", device, "--capacity", "25%", "--eviction", "lru", "--json")
    yield Step("live-miniature", ("moereplay", "live", "miniature", "--trace", f"{models}/mini.zarr", *live), 90)
    limited = ("--text", TEXT, "--window", "48", "--prompt-tokens", "16", "--limit", "1")
    large = ("moereplay", "record", olmoe, *limited, "--device", device, "--look-ahead", "2")
    yield Step("record-olmoe", (*large, "--out", f"{models}/large.zarr"), 120)
    yield Step("live-olmoe", ("moereplay", "live", olmoe, "--trace", f"{models}/large.zarr", *live), 120)


def make(folder: Path, device: str, small: bool) -> None:
    """Write a model of OLMoE's shape with random weights and the miniature's tokenizer."""
    import torch
    import transformers

    shape: dict[str, Any] = {"intermediate_size": 1024}
    if small:
        shape = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 128}
    config = transformers.OlmoeConfig(**shape)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.OlmoeForCausalLM(config)
    model.save_pretrained(folder)
    for file in MINIATURE.glob("tokenizer*"):
        shutil.copy(file, folder)


def agree(first: Path, second: Path) -> dict[str, object]:
    """Compare two recordings of the same tokens: equal sets, equal ranks, largest difference of logits."""
    import numpy as np

    from moereplay.traces.store import open_trace

    one, other = open_trace(first), open_trace(second)
    found: dict[str, object] = {"tokens": [one.tokens, other.tokens]}
    rows = min(one.tokens, other.tokens)
    a, b = (trace.read("chosen", 0, rows) for trace in (one, other))
    found["equal sets"] = float((np.sort(a, -1) == np.sort(b, -1)).all(-1).mean())
    found["equal ranks"] = float((a == b).all(-1).mean())
    a, b = (trace.read("logits", 0, rows).astype(np.float64) for trace in (one, other))
    return found | {"largest difference of logits": float(np.abs(a - b).max()), "largest logit": float(np.abs(a).max())}


def run(step: Step, out: Path) -> dict[str, object]:
    """Run a step; its output goes to a file."""
    began = time.monotonic()
    with (out / f"{step.name}.txt").open("w") as file:
        try:
            status: int | str = subprocess.run(
                [sys.executable, "-m", *step.words],
                check=False,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=step.seconds,
                cwd=ROOT,
                env=os.environ | {"COLUMNS": "140"},
            ).returncode
        except subprocess.TimeoutExpired:
            status = "timeout"
    return {"step": step.name, "status": status, "seconds": round(time.monotonic() - began, 1), "command": step.words}


def main(
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/cuda"),
    models: Annotated[Path, typer.Option(help="Folder of models and traces.")] = Path("runs/cuda-models"),
    device: Annotated[str, typer.Option(help="Device that computes.")] = "cuda",
    small: Annotated[bool, typer.Option("--small", help="Small sizes, to try the script.")] = False,
    only: Annotated[str, typer.Option(help="Comma list of steps; others are left out.")] = "",
    seconds: Annotated[int, typer.Option(help="Start no step after so many seconds.")] = 500,
    folder: Annotated[Path | None, typer.Option("--make", help="Write the random model here.")] = None,
    first: Annotated[Path | None, typer.Option("--agree", help="Compare this recording ...")] = None,
    second: Annotated[Path | None, typer.Option("--with", help="... with this one.")] = None,
) -> None:
    """Run all steps, or the part of one."""
    if folder is not None:
        make(folder, device, small)
        return
    if first is not None and second is not None:
        print(json.dumps(agree(first, second), indent=1))
        return
    out, models = out.resolve(), models.resolve()
    out.mkdir(parents=True, exist_ok=True)
    models.mkdir(parents=True, exist_ok=True)
    began, done = time.monotonic(), []
    for step in steps(device, out, models, small):
        if (only and step.name not in only.split(",")) or time.monotonic() - began > seconds:
            continue
        done.append(run(step, out))
        (out / "steps.json").write_text(json.dumps(done, indent=1))
        print(f"{done[-1]['seconds']:>6} s  {step.name}: {done[-1]['status']}", flush=True)


if __name__ == "__main__":
    typer.run(main)
