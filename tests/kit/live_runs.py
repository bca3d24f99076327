"""Short live runs of tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from moereplay.simulator.config import configure
from moereplay.tracegen.checkpoint import Loaded
from moereplay.tracegen.live.run import Live, LiveRequest, proven, run
from moereplay.tracegen.modules import MoeModules
from tests.kit.tiny_models import shared_model

DTYPES = (torch.float32, torch.bfloat16)
VOCABULARY = 96  #: of every tiny config


def loaded(family: str, dtype: torch.dtype = torch.float32) -> Loaded:
    """As if from a checkpoint; there is no tokenizer."""
    no_tokenizer: Any = None
    name = str(dtype).removeprefix("torch.")
    return Loaded(shared_model(family, dtype), no_tokenizer, f"tiny-{family}", "", "", name)


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids."""
    return tuple(torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


#: A prompt and its continuation, a text without a prompt, a prompt alone.
TO_RUN = (LiveRequest(tokens(14, 1), 6), LiveRequest(tokens(5, 2), 0), LiveRequest(tokens(7, 3), 7))


def live(
    family: str,
    to_run: Sequence[LiveRequest] = TO_RUN,
    quality: bool = False,
    quantiser: str = "affine",
    **settings: Any,
) -> Live:
    """A live run with its event log."""
    config = configure(**{"capacity": "30%", **settings})
    how: dict[str, Any] = {"modules": modules(family), "quality": quality, "quantiser": quantiser}
    return run(loaded(family), to_run, config, **how, log=True)


@cache
def modules(family: str, dtype: torch.dtype = torch.float32) -> MoeModules:
    """Discovered and checked once."""
    return proven(loaded(family, dtype))
