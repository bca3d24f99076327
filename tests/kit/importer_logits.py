"""The sample of what transformers returns: router logits of a padded batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moereplay.traces.schema import Request
from tests.kit.importer_formulas import (
    BITS_UNKNOWN,
    EXPERTS,
    LAYERS,
    K,
    Sample,
    grid,
    ids,
    logit,
)
from tests.kit.torch_pickles import save

# ---------------------------------------------------------------- transformers: logits of a padded batch

LENGTHS = (5, 3)  #: tokens of each text, padded to the longest


def write_router_logits(file: Path) -> None:
    """A tuple over layers of (batch * tokens, E), as `outputs.router_logits`; texts are padded at the end."""
    longest = max(LENGTHS)
    whole = np.concatenate([logits(text, longest) for text in range(len(LENGTHS))])
    layers = tuple(np.ascontiguousarray(whole[:, layer]).astype("<f4") for layer in range(LAYERS))
    mask = np.array([[int(token < length) for token in range(longest)] for length in LENGTHS])
    tokens = np.array([[10 * text + token for token in range(longest)] for text in range(len(LENGTHS))])
    save(file, {"router_logits": layers, "k": K, "input_ids": tokens, "attention_mask": mask})


def logits(text: int, tokens: int) -> np.ndarray:
    """(T, L, E)."""
    return grid(tokens, lambda *at: logit(text, *at), EXPERTS)


def texts() -> list[Request]:
    """Without the padding."""
    return [
        Request(ids(text, length), length, logits=logits(text, length), token_ids=10 * text + np.arange(length))
        for text, length in enumerate(LENGTHS)
    ]


ROUTER_LOGITS = [
    Sample(
        "router_logits",
        "router_logits.pt",
        write_router_logits,
        texts(),
        (
            "logits of whole texts: every token is prompt; replay it token by token",
            "rows are 2 texts of 5 tokens, as input_ids has them",
            "k = 2 experts per token are chosen from the logits by order of size; no gate weights, because "
            "the router is unknown",
            BITS_UNKNOWN,
        ),
    ),
]
