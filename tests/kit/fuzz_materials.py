"""Materials of the fuzz tests: one good file of every kind that a verb reads."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Collection
from importlib import import_module
from pathlib import Path

import polars as pl

from moereplay.simulator.platforms import NAMES
from tests.kit import count_samples
from tests.kit.command import moereplay_here
from tests.kit.sweeping import ROOT, store_trace

CHECKPOINT = "checkpoint"
TOTALS = "totals.json"  #: of REPLAY over the undamaged trace
REPLAY = ("--capacity", "40%", "--eviction", "belady", "--prefetch", "top_k", "--engine", "reference", "--json")
POLICY = '''"""newest.py: the copy whose expert's last use is the newest leaves."""

from moereplay.policies.contract import Eviction, expert_of


def key(now, experts, copies, own, y):
    return -experts[expert_of(now, y)]["last_use"]


POLICY = Eviction(name="newest", summary="evict the newest last use", source="as mru", key=key)
'''
EXPERIMENT = """traces = ["tiny.zarr"]
[base]
seed = 1
[grid]
capacity = ["40%", "60%"]
eviction = ["lru", "fifo"]
"platform.link.bytes_per_s" = [5e9, 25e9]
[[include]]
eviction = "lfu"
capacity = "50%"
"""
YAML = """base: &base
  seed: 1
traces: [tiny.zarr]
grid:
  capacity: [40%, 60%]
  eviction: [lru, fifo]
include:
  - {<<: *base, eviction: lfu}
"""
SETS = """[base]
capacity = "25%"
[sets.lru]
eviction = "lru"
[sets.prior]
routing = ["cache_prior:lam=0", "cache_prior:lam=.25"]
"""


def make(folder: Path, needed: Collection[str]) -> None:
    """Make the quick files, and the slow ones that are needed."""
    folder.mkdir(parents=True)
    _write_texts(folder)
    store_trace(folder / "tiny.zarr")
    for name in [name for name in COMMANDS if name in {TOTALS, *needed}]:
        words = COMMANDS[name]
        done = moereplay_here(*words, cwd=folder)
        assert done.returncode == 0, f"{name}: {done.stderr}"
        (folder / name).write_text(done.stdout) if name.endswith(".json") else None
    if CHECKPOINT in needed:
        import_module("tests.kit.tiny_checkpoints").checkpoint(folder / CHECKPOINT)  # torch takes seconds


#: What is made by a command: its name here, and the words.
COMMANDS = {
    TOTALS: ("replay", "tiny.zarr", *REPLAY),
    "replays": ("replay", "tiny.zarr", "--capacity", "40%,60%", "--workers", 1, "--out", "replays"),
    "curves": ("curve", "tiny.zarr", "--eviction", "lru", "--out", "curves"),
    "sweep": ("sweep", "run", "experiment.toml", "--workers", 1, "--out", "sweep"),
    "tune": ("tune", "experiment.toml", "--workers", 1, "--trials", 3, "--sampler", "random", "--out", "tune"),
}


def _write_texts(folder: Path) -> None:
    for name, text in {
        "experiment.toml": EXPERIMENT,
        "experiment.yaml": YAML,
        "sets.toml": SETS,
        "policy.py": POLICY,
        "warm.json": json.dumps([[0, 1], [1, 2], [2, 3]]),
        "prompts.txt": "a line\nanother line\n",
        "prompts.jsonl": '{"prompt": "one"}\n{"prompt": "two"}\n',
        "prompts.csv": 'prompt\none\n"two, three"\n',
    }.items():
        (folder / name).write_text(text)
    (folder / "prompts.jsonl.gz").write_bytes(gzip.compress((folder / "prompts.jsonl").read_bytes(), mtime=0))
    pl.DataFrame({"prompt": ["one", "two"]}).write_parquet(folder / "prompts.parquet")
    shutil.copy(ROOT / "simulator" / "platforms" / f"{NAMES[-1]}.toml", folder / "platform.toml")
    shutil.copytree(ROOT / "tests" / "samples", folder / "samples")
    shutil.copytree(ROOT / "contrib" / "importers" / "tests" / "samples", folder / "contributed")
    (folder / "counts").mkdir()
    for sample in count_samples.ALL:
        sample.write(folder / "counts" / sample.name)
    shutil.copytree(ROOT / "tests" / "results" / "before", folder / "before")
