"""Count the instructions, memory references and cache misses of compiled replays: exact on a loaded machine.

The kernel of a case and its hooks are compiled for one kind of processor, and linked with a C program that reads the
state at the start of the replay and calls the kernel. It runs under cachegrind, with the call and without it; a figure
is the difference per access. The caches are those of a small core: 32 KiB and 512 KiB.

`--limits FILE` fails where a count exceeds that of the file by more than 3 %; `--write FILE` writes one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding
from speed_traces import Made, Size, make

from moereplay.simulator.compiled import engine, hooks
from moereplay.simulator.config import configure
from moereplay.simulator.jit import machine_code
from moereplay.simulator.replay import plan
from moereplay.traces.documents import json_text
from moereplay.traces.schema import Trace

PROCESSOR = os.environ["NUMBA_CPU_NAME"]  #: as the make target sets it: counts do not depend on the machine
SIZES = {"olmoe": Size("olmoe-1b-7b", 500, 500), "deepseek": Size("deepseek-v3", 150, 150)}
CAPACITIES = ("1%", "5%", "25%")
#: Settings of a case, without its capacity.
SETTINGS: dict[str, dict[str, Any]] = {
    "lru": {},
    "lru, top_k": {"prefetch": "top_k"},
    "least_stale": {"eviction": "least_stale"},
    "least_stale, top_k": {"eviction": "least_stale", "prefetch": "top_k"},
    "lfu": {"eviction": "lfu"},
    "belady": {"eviction": "belady"},
}
#: Settings that are counted on the first shape at 5 % alone.
ONCE: dict[str, dict[str, Any]] = {
    "side_buffer": {"prefetch": "side_buffer"},
    "arc": {"eviction": "arc"},
    "cache_prior": {"routing": "cache_prior"},
    "miss cpu": {"miss": "cpu"},
    "miss cpu, missed": {"miss": "cpu", "prefetch": "missed"},
    "miss drop": {"miss": "drop"},
    "miss substitute": {"miss": "substitute"},
    "miss hobbit": {"miss": "hobbit"},
    "sequential": {"contract": "sequential"},
    "per_layer": {"scope": "per_layer"},
    "draft 3": {"draft": "3"},
    "batch:8": {"passes": "batch:8"},
    "batch:8, arrivals": {"passes": "batch:8", "arrivals": "every:0.001"},
}
SLACK = 0.03
CACHES = ("--D1=32768,8,64", "--LL=524288,8,64")
EVENTS = {"instructions": ("Ir",), "references": ("Dr", "Dw")}
EVENTS |= {"L1 misses": ("D1mr", "D1mw"), "L2 misses": ("DLmr", "DLmw")}
PROGRAM = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
%(declared)s
static int64_t number(FILE *file) { int64_t n; if (fread(&n, 8, 1, file) != 1) exit(3); return n; }
static char *bytes(FILE *file, int64_t n) {
    char *at = aligned_alloc(64, (n + 64) / 64 * 64);
    if (!at || fread(at, 1, n, file) != (size_t)n) exit(3);
    return at;
}
int main(int count, char **words) {
    FILE *file = fopen(words[1], "rb");
    int64_t size = number(file), arrays = number(file);
    int64_t *row = (int64_t *)bytes(file, size), result = 0, raised = 0;
    while (arrays--) {
        int64_t place = number(file), length = number(file);
        row[place] = (int64_t)bytes(file, length);
    }
    if (count < 3) return 0;
    int code = kernel(&result, &raised, row%(given)s);
    return code && code != -2;
}
"""


class Case(NamedTuple):
    """One replay."""

    name: str
    trace: Trace
    settings: dict[str, Any]


class Part(NamedTuple):
    """An object file and its entry."""

    code: bytes
    entry: str


@contextmanager
def compiled_here() -> Iterator[dict[int, Part]]:
    """Compile for PROCESSOR in this process, and note every object file by the address of its code."""
    parts = dict[int, Part]()
    kept = machine_code.kept

    def noting(name: str, build: Any) -> int:
        address = kept(name, build)
        made = machine_code._read(machine_code._path(name))
        parts[address] = Part(made.code, made.entry)
        return address

    engine.kept = hooks.kept = noting
    engine.compiled_apart = lambda of: nullcontext()
    binding.get_host_cpu_name = lambda: PROCESSOR
    binding.get_host_cpu_features = binding.FeatureMap  # no others than those of the name
    yield parts


def program(case: Case, parts: dict[int, Part], folder: Path) -> tuple[Path, int]:
    """Write and link the program of a case; return it and the number of experts that the trace demands."""
    spec = plan(case.trace, configure(**case.settings)).spec(False)
    inputs, oracle = engine.prepare_inputs(case.trace, spec)
    state = engine.initial_state(inputs, oracle, spec)
    of = engine.fastest_kernel(state)
    called = list[Any]()
    caller, engine.caller = engine.caller, lambda code, numbers: called.extend([code, *numbers]) or (lambda: None)
    try:
        engine.bound(of, state, spec.chosen)
    finally:
        engine.caller = caller
    code, row, *pointers = (getattr(number, "value", number) for number in called)
    assert row == state.address
    path = folder / "program"
    names = {code: "kernel"} | {at: f"hook_{number}" for number, at in enumerate(dict.fromkeys(pointers)) if at}
    objects = [_object(folder / f"{name}.o", parts[at], name) for at, name in names.items()]
    given = "".join(f", (int64_t){names[at]}" if at else ", (int64_t)0" for at in pointers)
    arguments = ", ".join(["void *"] * 3 + ["int64_t"] * len(pointers))
    hooked = [f"extern int {name}();" for name in names.values() if name != "kernel"]
    declared = [f"extern int kernel({arguments});", *hooked]
    (folder / "main.c").write_text(PROGRAM % {"declared": "\n".join(declared), "given": given})
    words = ["gcc", "-O1", "-w", "-no-pie", folder / "main.c", *objects, "-lm", "-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run([*words, "-o", path], check=True)
    _write(path.with_suffix(".state"), state)
    return path, int((case.trace.read("chosen") >= 0).sum())


def _object(path: Path, part: Part, name: str) -> Path:
    """Write an object file whose entry alone is visible, under a name of the program."""
    path.write_bytes(part.code)
    subprocess.run(["objcopy", f"--redefine-sym={part.entry}={name}", f"--keep-global-symbol={name}", path], check=True)
    return path


def _write(path: Path, state: Any) -> None:
    """Write the numbers of a state, and each array with the place of its address among them."""
    words = state._row.view(np.int64)
    arrays = [state.arrays[name] for name in {*state.arrays, *state.arrays.placed}]
    places = {array.ctypes.data: array for array in arrays if array.size}
    found = [(place, places[word]) for place, word in enumerate(words.tolist()) if word in places]
    with path.open("wb") as file:
        file.write(np.array([words.nbytes, len(found)], np.int64).tobytes() + words.tobytes())
        for place, array in found:
            file.write(np.array([place, array.nbytes], np.int64).tobytes() + np.ascontiguousarray(array).tobytes())


def counted(path: Path, *more: str) -> dict[str, int]:
    """Return the events of a run of a program under cachegrind."""
    words = ["valgrind", "--tool=cachegrind", "--cache-sim=yes", *CACHES, f"--cachegrind-out-file={path}.out"]
    words += [path, path.with_suffix(".state"), *more]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{path.parent.name}: the kernel ended with {done.returncode}\n{done.stderr}")
    lines = Path(f"{path}.out").read_text().splitlines()
    found = {line.partition(":")[0]: line.split()[1:] for line in lines if line.startswith(("events:", "summary:"))}
    return dict(zip(found["events"], map(int, found["summary"]), strict=True))


def figures(path: Path, accesses: int) -> dict[str, float]:
    """Return the figures of a program per access."""
    without, whole = counted(path), counted(path, "call")
    return {
        name: round(sum(whole[event] - without[event] for event in events) / accesses, 3)
        for name, events in EVENTS.items()
    }


def cases(made: dict[str, Made]) -> Iterator[Case]:
    """Yield all cases."""
    for model, of in made.items():
        for name, settings in SETTINGS.items():
            for capacity in CAPACITIES:
                yield Case(f"{model} {capacity} {name}", of.whole, {"capacity": capacity, **settings})
    for name, settings in ONCE.items():
        yield Case(f"olmoe 5% {name}", made["olmoe"].whole, {"capacity": "5%", **settings})


def above(found: dict[str, dict[str, float]], limits: dict[str, dict[str, float]]) -> Iterator[str]:
    """Yield the counts that exceed their limit."""
    for case, of in found.items():
        for name, value in of.items():
            limit = limits[case][name]
            if value > limit * (1 + SLACK) + 0.05:
                yield f"{case}: {value:g} {name} per access, the limit is {limit:g}"


def main() -> None:
    """Print the figures of all cases, or of those whose name contains a text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a text in the name of a case")
    parser.add_argument("--limits", type=Path, help="a file of counts")
    parser.add_argument("--write", type=Path, help="write such a file")
    asked = parser.parse_args()
    found = dict[str, dict[str, float]]()
    with TemporaryDirectory() as folder, compiled_here() as parts, ThreadPoolExecutor(1) as pool:
        made = {name: make(size, Path(folder)) for name, size in SIZES.items()}
        running = {}
        for number, case in enumerate(case for case in cases(made) if asked.only in case.name):
            (own := Path(folder) / f"{number}").mkdir()
            running[case.name] = pool.submit(figures, *program(case, parts, own))
        print(f"{'per access':<36}" + "".join(f"{name:>14}" for name in EVENTS))
        for name, future in running.items():
            found[name] = future.result()
            print(f"{name:<36}" + "".join(f"{value:>14.2f}" for value in found[name].values()), flush=True)
    if asked.write:
        asked.write.write_text(json_text(found))
    if asked.limits and (over := [*above(found, json.loads(asked.limits.read_text()))]):
        sys.exit("\n".join(over))


if __name__ == "__main__":
    main()
