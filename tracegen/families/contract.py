"""What a family of MoE models is: how its config becomes a `traces.schema.Router`, and a tiny config to prove it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from moereplay.traces.schema import Router


def small(**keys: Any) -> dict[str, Any]:
    """Config keys of a model of a few hundred KB, in the names that all families share, and the given ones."""
    shared = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        # Wide enough for logits of random weights to differ by more than rounding
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": None,
        # A padding token would embed as zeros, and zeros tie every expert
        "pad_token_id": None,
    }
    return shared | keys


@dataclass(frozen=True)
class Family:
    """Models that route alike; `router` and `shared` read a transformers config."""

    name: str
    model_types: tuple[str, ...]  #: of the configs of the language models that hold the gates
    router: Callable[[Any], Router]
    keys: Mapping[str, Any]  #: of a tiny config of the first model type; random weights take milliseconds to run
    source: str  #: where the routing is described
    shared: Callable[[Any], int] = lambda config: 0  #: shared experts per MoE layer

    def tiny(self) -> PreTrainedConfig:
        """A new tiny config. Only here must the installed transformers know the model."""
        return AutoConfig.for_model(self.model_types[0], **self.keys)
