"""Measure the time per token and memory of `quality` on a model of OLMoE-1B-7B's shape with random weights.

Last changed in commit a1d87579. What does `quality` take of a model of OLMoE's size?
Answer: docs/quality.md.

    python -m studies.quality_at_size --layers 2 --device cpu      # or --layers 16 --device cuda

The whole model is sized on the meta device, where weights take no room. As many of its layers as asked for are then
filled at random and read texts: unmodified, under policies that route by the cache, and at 4 bits, one text at a time
and several together. Random weights route like no model, so misses and losses mean nothing here; times and bytes do.
`make study-quality-size` runs it.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.rounds import machine
from transformers import AutoModelForCausalLM, OlmoeConfig

from moereplay.analysis.tables import console, table
from moereplay.simulator.config import Origin, configure
from moereplay.simulator.replay import Plan, plan_for
from moereplay.tracegen.checkpoint import Loaded
from moereplay.tracegen.live.experts import tiers_of
from moereplay.tracegen.live.requests import CAPABILITIES
from moereplay.tracegen.live.run import proven
from moereplay.tracegen.modules import MoeModules
from moereplay.tracegen.precision import DEFAULT
from moereplay.tracegen.quality.session import Session, Subject, alone_because
from moereplay.tracegen.quality.texts import TeacherForced
from moereplay.traces.documents import json_text

VOCABULARY = 50304
SHAPE: dict[str, Any] = {"intermediate_size": 1024}  #: what OLMoE-1B-7B has otherwise than the configuration's defaults
SETS: dict[str, dict[str, str] | None] = {
    "unmodified": None,
    "cache_prior": {"routing": "cache_prior"},
    "4 bits": {"miss": "lowest_bit:bits=4"},
}


class Case(NamedTuple):
    """A policy set, and how many texts are read together."""

    name: str
    settings: dict[str, str] | None
    batch: int


def main() -> None:
    """Print a row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompt", type=int, default=32, help="Tokens of each text that go through in one pass.")
    parser.add_argument("--tokens", type=int, default=16, help="Tokens of each text that are scored, one by one.")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--out", type=Path, help="The rows as JSON.")
    options = parser.parse_args()
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(OlmoeConfig(**SHAPE), dtype=torch.bfloat16)
    print(f"whole model: {sum(each.nbytes for each in whole.parameters()) / 1e9:.2f} GB in bfloat16")
    loaded = filled(options.layers, options.device)
    modules = proven(loaded)
    print(f"{options.layers} layers: {sum(each.nbytes for each in loaded.model.parameters()) / 1e9:.2f} GB")
    cases = [Case(name, own, batch) for name, own in SETS.items() for batch in (1, options.texts)]
    cases = [case for case in cases if case.batch == 1 or alone_because(subject(case, loaded, modules)) is None]
    rows = [printed(row(case, loaded, modules, options)) for case in cases]
    console().print(table(rows))
    if options.out:
        options.out.write_text(json_text({"machine": machine(), "rows": rows}, indent=1))


def printed(row: dict[str, object]) -> dict[str, object]:
    """Print a row at once, because the next can take many minutes."""
    print(*(f"{name} {value}" for name, value in row.items()), sep=", ", flush=True)
    return row


def filled(layers: int, device: str) -> Loaded:
    """Return a model of that many layers with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(OlmoeConfig(**SHAPE, num_hidden_layers=layers), dtype=torch.bfloat16)
    no_tokenizer: Any = None
    return Loaded(model.eval(), no_tokenizer, f"{layers} random layers of OLMoE's shape", "", "", "bfloat16")


def row(case: Case, loaded: Loaded, modules: MoeModules, options: argparse.Namespace) -> dict[str, object]:
    """Return the time of a scored token and the peak memory of this process."""
    session = Session(subject(case, loaded, modules), case.batch)
    session.read(_texts(1, options))  # kernels, and weights at few bits, are made the first time
    texts = _texts(options.texts, options)
    began = time.perf_counter()
    session.read(texts)
    seconds = time.perf_counter() - began
    read = sum(len(text.read) for text in texts)
    return {
        "set": case.name,
        "together": case.batch,
        "tokens": read,
        "ms per token": 1000 * seconds / read,
        "most GB": _most_bytes(options.device) / 1e9,
    }


def subject(case: Case, loaded: Loaded, modules: MoeModules) -> Subject:
    """Return the model under the policy set."""
    return Subject(loaded, modules, _plan(case, modules), 0, tiers_of(modules, DEFAULT, ""))


def _plan(case: Case, modules: MoeModules) -> Plan | None:
    if case.settings is None:
        return None
    origin = Origin(modules.geometry, CAPABILITIES, modules.geometry.layers, "live-random", "random", live=True)
    return plan_for(origin, configure(capacity="25%", reset="request", **case.settings))


def _texts(count: int, options: argparse.Namespace) -> list[TeacherForced]:
    drawn = torch.Generator().manual_seed(1)
    length = options.prompt + options.tokens
    ids = [torch.randint(VOCABULARY, (length,), generator=drawn).tolist() for _ in range(count)]
    return [TeacherForced(each, options.prompt, options.prompt) for each in ids]


def _most_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
