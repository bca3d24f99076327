"""How far made-up rows of rejected drafts are from recorded ones: `make study-drafts`, for studies/pages/drafts.md.

Last changed in commit 93af2780. How far are made-up rows of rejected drafts from recorded ones?
Answer: docs/drafts.md.

The miniature decodes its prompts with drafts by its own first layers, or by n-grams of the text. Every trace is
replayed in its recorded passes with `rejected` as recorded, `own` and `other`.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.demand import demand_of
from moereplay.traces.drafts import KNOWN
from moereplay.traces.passes import schedule
from moereplay.traces.schema import Trace

CAPACITIES = ("10%", "25%", "50%", "75%")
LENGTHS = (1, 2, 4, 8)
COUNTED = {"misses": "misses", "bytes_demand": "bytes", "time_ns": "time"}
MADE_UP = ("own", "other")


def first_layers(source: Path, out: Path, layers: int) -> Path:
    """Write a checkpoint of the first layers of one, with its embedding, last norm and head."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = AutoConfig.from_pretrained(source)
    config.num_hidden_layers = layers
    part = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing = part.load_state_dict(whole.state_dict(), strict=False).missing_keys
    assert not missing, missing
    part.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, out)
    return out


def traces(out: Path, layers: Sequence[int], prompts: int, new: int) -> Iterator[tuple[str, int, Trace]]:
    """Record the miniature with each draft model and number of drafts; traces that are there are not recorded again."""
    from moereplay.tracegen.checkpoint import load
    from moereplay.tracegen.folder import MINIATURE
    from moereplay.tracegen.plan import Decoding, Drafting, Plan
    from moereplay.tracegen.prompts import read_prompts
    from moereplay.tracegen.record import record, room_of
    from moereplay.tracegen.tokens import encode
    from moereplay.traces.store import open_trace

    main = load("miniature", dtype="float32")
    chosen = read_prompts([MINIATURE / "prompts.jsonl"], None).chosen(None, prompts)
    work = encode(chosen, main.tokenizer, room_of(main), new)
    for name, count in [(f"{count} layers", count) for count in layers] + [("2-grams", 0)]:
        small = load(str(first_layers(MINIATURE, out / f"first-{count}", count)), dtype="float32") if count else None
        for many in LENGTHS:
            path = out / f"{count}-{many}.zarr"
            drafting = Drafting(many=many, model=f"first-{count}") if count else Drafting(many=many)
            plan = Plan(decoding=Decoding(max_new_tokens=new), drafting=drafting, look_ahead=0, logits=False)
            yield name, many, open_trace(path) if path.exists() else record(main, work, path, plan, drafts=small)


def acceptance(trace: Trace, many: int) -> list[float]:
    """Return the share of passes with a j-th draft in which it was accepted, for j = 1, 2, ..."""
    known = trace.verified
    assert known
    begins = known.many > 0
    shares = [(known.right[begins & (known.many >= j)] >= j) for j in range(1, many + 1)]
    return [float(share.mean()) if len(share) else 0.0 for share in shares]


def compared(trace: Trace, capacity: str) -> dict[str, dict[str, int]]:
    """Return counts of a replay of the recorded passes, by whose routing rejected rows have."""
    found = {}
    for rejected in ("recorded", *MADE_UP):
        config = configure(capacity=capacity, draft=f"recorded:rejected={rejected}")
        totals = replay(trace, config).totals
        found[rejected] = {name: int(totals[name]) for name in ("hits", "accesses", *COUNTED)}
    return found


def union(trace: Trace, rejected: str) -> float:
    """Return the mean number of distinct experts per layer of a pass with drafts, in multiples of k."""
    config = configure(draft=f"recorded:rejected={rejected}")
    plan, demand = schedule(trace, config.schedule), demand_of(trace, config.schedule)
    assert plan.rows
    drafted = np.add.reduceat(plan.rows.draft != KNOWN, plan.start) > 0
    counts = np.diff(demand.offsets).reshape(len(plan), -1).mean(1)
    return float(counts[drafted].mean()) / trace.geometry.k


def main() -> None:
    """Print the tables."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--layers", default="4,8", help="layers of the draft models")
    options.add_argument("--prompts", type=int, default=4)
    options.add_argument("--new", type=int, default=48, help="tokens per prompt")
    options.add_argument("--keep", type=Path, help="folder of the traces; without it they are removed")
    given = options.parse_args()
    with TemporaryDirectory() as scratch:
        out = given.keep or Path(scratch)
        out.mkdir(exist_ok=True)
        _print(traces(out, [int(each) for each in given.layers.split(",")], given.prompts, given.new))


def _print(recorded: Iterator[tuple[str, int, Trace]]) -> None:
    print("| drafts by | N | accepted | tokens per pass | experts per pass | own | other |\n" + "|---" * 7 + "|")
    kept = []
    for name, many, trace in recorded:
        kept.append((name, many, trace))
        shares = " ".join(f"{share:.2f}".removeprefix("0") for share in acceptance(trace, many))
        decoded = trace.tokens - int(trace.prompt_lengths.sum())
        known = trace.verified
        assert known
        passes = decoded - int(known.right.sum())
        unions = " | ".join(f"{union(trace, rejected):.2f} k" for rejected in ("recorded", *MADE_UP))
        print(f"| {name} | {many} | {shares} | {decoded / passes:.2f} | {unions} |", flush=True)
    heads = " | ".join(f"{words} {rejected}" for words in ("hit rate", *COUNTED.values()) for rejected in MADE_UP)
    print(f"\n| drafts by | N | capacity | hit rate | {heads} |\n" + "|---" * (4 + 2 * (1 + len(COUNTED))) + "|")
    for name, many, trace in kept:
        for capacity in CAPACITIES:
            found = compared(trace, capacity)
            rates = {rejected: 100 * counts["hits"] / counts["accesses"] for rejected, counts in found.items()}
            cells = [f"{rates['recorded']:.1f} %", *(f"{rates[each] - rates['recorded']:+.1f}" for each in MADE_UP)]
            for column in COUNTED:
                cells += [f"{100 * (found[each][column] / found['recorded'][column] - 1):+.1f} %" for each in MADE_UP]
            print(f"| {name} | {many} | {capacity} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
