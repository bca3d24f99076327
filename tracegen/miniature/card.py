"""Measure the miniature and write its model card: `python -m moereplay.tracegen.miniature.card`.

Routing is measured on the held-out excerpts, teacher-forced, and compared with the same model before training:
random routing is a misleading substitute for a model's, as the table shows.
"""

import json
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from moereplay.tracegen.capture import Capture
from moereplay.tracegen.miniature.train import Recipe, new_model
from moereplay.tracegen.modules import discover
from moereplay.traces.schema import Header, Request, memory_trace
from moereplay.traces.summary import Summary, summarise
from moereplay.traces.units import MB

FOLDER = Path(__file__).parent
DEPTH = 3


class Measured(NamedTuple):
    """Measurements of a model on the excerpts."""

    perplexity: float
    routing: Summary


def main() -> None:
    """Fill the template and write README.md."""
    facts = json.loads((FOLDER / "training.json").read_text())
    recipe = Recipe(**facts["recipe"])
    trained = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    windows = _windows(recipe.window)
    measured = (measure(trained, windows), measure(new_model(recipe).eval(), windows))
    template = Template((FOLDER / "card.template.md").read_text())
    (FOLDER / "README.md").write_text(template.substitute(_fields(facts), table=_table(measured)))


def _windows(size: int) -> torch.Tensor:
    """Return the excerpts as whole windows of tokens, (windows, size)."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer((FOLDER / "heldout.txt").read_text(encoding="utf-8"), verbose=False).input_ids
    return torch.tensor(ids[: len(ids) // size * size]).view(-1, size)


@torch.inference_mode()
def measure(model: PreTrainedModel, windows: torch.Tensor) -> Measured:
    """Return perplexity and routing over `windows`, each a separate request."""
    modules, losses, requests = discover(model), [], []
    for window in windows:
        with Capture(modules, DEPTH) as capture:
            logits = model(window.unsqueeze(0), use_cache=False).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits.double(), window[1:]).item())
        rows = capture.take()
        requests.append(Request(rows.chosen, len(window), rows.weights, rows.logits, rows.lookahead))
    header = Header(geometry=modules.geometry, lookahead_depth=DEPTH)
    return Measured(float(np.exp(np.mean(losses))), summarise(memory_trace(header, requests)))


def _table(measured: tuple[Measured, Measured]) -> str:
    """Return Markdown rows: figure, trained, untrained, chance; a range over layers in brackets."""
    trained, untrained = (each.routing for each in measured)
    k, experts = trained.geometry.k, trained.geometry.experts
    rows = [("perplexity of the excerpts", *(f"{each.perplexity:.1f}" for each in measured), "4096")]
    for name, figure, chance in _figures(k, experts):
        rows.append((name, _spread(trained, figure), _spread(untrained, figure), chance))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _figures(k: int, experts: int) -> list[tuple[str, Callable, str]]:
    distinct = experts * (1 - (1 - k / experts) ** 8)
    recalls = [
        (f"look-ahead recall at {k}, {d} layer{'s' * (d > 1)} ahead", _recall(d), f"{k / experts:.3f}")
        for d in range(1, DEPTH + 1)
    ]
    return [
        ("entropy of expert use / log E", lambda layer: layer.entropy, "1"),
        ("busiest expert over the mean", lambda layer: layer.imbalance, "1"),
        ("used again by the next token", lambda layer: layer.reuse, f"{k / experts:.3f}"),
        ("distinct experts in 8 tokens", lambda layer: layer.distinct[8], f"{distinct:.1f}"),
        *recalls,
    ]


def _recall(depth: int) -> Callable:
    return lambda layer: layer.recall.get(depth)


def _spread(summary: Summary, figure: Callable) -> str:
    values = [value for value in map(figure, summary.layers) if value is not None]
    return f"{np.mean(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def _fields(facts: dict) -> dict[str, str]:
    """Return the template's fields from the facts that training wrote."""
    corpus, held_out, recipe = facts["corpus"], facts["held_out"], facts["recipe"]
    return {
        "python": corpus["python"],
        "sha256": corpus["sha256"][:16],
        "files": f"{corpus['files']:,}",
        "megabytes": f"{corpus['bytes'] / MB:.1f}",
        "tokens": f"{corpus['tokens']:,}",
        "bytes_per_token": f"{corpus['bytes'] / corpus['tokens']:.2f}",
        "held_out_files": str(held_out["files"]),
        "held_out_tokens": f"{held_out['tokens']:,}",
        "steps": f"{recipe['steps']:,}",
        "batch": str(recipe["batch"]),
        "window": str(recipe["window"]),
        "trained": f"{facts['tokens_trained']:,}",
        "minutes": f"{facts['seconds'] / 60:.0f}",
        "torch": facts["torch"],
        "nats": f"{held_out['nats']:.3f}",
        "perplexity": f"{np.exp(held_out['nats']):.1f}",
        "nats_untrained": f"{held_out['nats_untrained']:.3f}",
        "bits_per_byte": f"{held_out['nats'] / np.log(2) * held_out['tokens'] / held_out['bytes']:.2f}",
    }


if __name__ == "__main__":
    main()
