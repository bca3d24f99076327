"""The held-out excerpts that studies of the miniature's quality read."""

from __future__ import annotations

import torch
from torch import Tensor

from moereplay.tracegen.checkpoint import Loaded
from moereplay.tracegen.folder import MINIATURE


def windows(loaded: Loaded, count: int, length: int) -> Tensor:
    """(count, length) tokens, in windows spread evenly over the excerpts."""
    text = (MINIATURE / "heldout.txt").read_text(encoding="utf-8")
    ids = torch.tensor(loaded.tokenizer(text, verbose=False).input_ids)
    starts = torch.linspace(0, len(ids) - length, count).long()
    return torch.stack([ids[start : start + length] for start in starts])
