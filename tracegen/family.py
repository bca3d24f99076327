"""The definition of a family of MoE models, and the routing rules that several families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers

from moereplay.traces.schema import Router


@dataclass(frozen=True)
class Family:
    """Models with the same routing rule; `router` and `shared` read a transformers config."""

    model_types: tuple[str, ...]  #: of the configs of the language models that hold the gates; the first names it
    router: Callable[[Any], Router]
    keys: Mapping[str, Any]  #: of a tiny config of the first model type; random weights take milliseconds to run
    source: str  #: where the routing is described
    shared: Callable[[Any], int] = lambda config: 0  #: shared experts per MoE layer
    name: str = ""  #: the first model type if empty

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.model_types[0])

    def tiny(self) -> transformers.PreTrainedConfig:
        """Return a new tiny config. Only here must the installed transformers have the model."""
        return transformers.AutoConfig.for_model(self.model_types[0], **self.keys)


def small(**keys: Any) -> dict[str, Any]:
    """Return config keys of a model of a few hundred KB: those that all families share, and the given ones."""
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


# -- Routing rules, read from the keys by which configs state them


def softmax_top_k(config: Any) -> Router:
    """Return softmax over all experts; the k best probabilities, renormalised if `norm_topk_prob`."""
    return Router(family="softmax_topk", renormalise=bool(config.norm_topk_prob))


def renormalised_top_k(config: Any) -> Router:
    """Return softmax over all experts; the k best probabilities are renormalised, regardless of the config."""
    return Router(family="softmax_topk", renormalise=True)


def plain_top_k(config: Any) -> Router:
    """Return softmax over all experts; the k best probabilities are not renormalised, regardless of the config."""
    return Router(family="softmax_topk")


def softmax_of_the_chosen(config: Any) -> Router:
    """Return the k best logits; softmax over these alone."""
    return Router(family="topk_softmax")


def softmax_in_groups(config: Any) -> Router:
    """Return DeepSeek-V2's rule: softmax over all experts, top k in the best groups; scaled, not renormalised.

    The Lite model is greedy: it has no groups. transformers ignores `norm_topk_prob` here.
    """
    if config.topk_method == "greedy":
        return Router(family="softmax_groups", scale=config.routed_scaling_factor)
    groups, kept = config.n_group or 1, config.topk_group or 1
    return Router(family="softmax_groups", scale=config.routed_scaling_factor, groups=groups, groups_kept=kept)


def sigmoid_in_groups(config: Any) -> Router:
    """Return DeepSeek-V3's rule: sigmoid plus correction bias in the best groups; sigmoids renormalised and scaled."""
    return Router(
        family="sigmoid_groups",
        renormalise=bool(config.norm_topk_prob),
        scale=config.routed_scaling_factor,
        groups=config.n_group or 1,
        groups_kept=config.topk_group or 1,
    )


def renormalised_sigmoid(config: Any) -> Router:
    """Return sigmoid plus a correction bias; renormalised, without groups or scale."""
    return Router(family="sigmoid_groups", renormalise=True)


def sparse_mixer(config: Any) -> Router:
    """Return two experts picked in turn, regardless of the config's top k.

    The band around each pick (`router_jitter_noise`) is part of the model in evaluation mode too.
    """
    return Router(family="sparsemixer", jitter=config.router_jitter_noise)


def listed_shared(config: Any) -> int:
    """Return the shared experts that `n_shared_experts` states."""
    return config.n_shared_experts or 0


def one_if_wide(config: Any) -> int:
    """Return 1 if the shared expert of a Granite model has a width."""
    return int(config.shared_intermediate_size > 0)
