"""Routing rules that several families share, read from the keys by which their configs state them."""

from __future__ import annotations

from typing import Any

from moereplay.traces.schema import Router


def softmax_top_k(config: Any) -> Router:
    """Softmax over all experts; the k best probabilities, renormalised if `norm_topk_prob`."""
    return Router(family="softmax_topk", renormalise=bool(config.norm_topk_prob))


def renormalised_top_k(config: Any) -> Router:
    """Softmax over all experts; the k best probabilities, renormalised whatever the config says."""
    return Router(family="softmax_topk", renormalise=True)


def softmax_of_the_chosen(config: Any) -> Router:
    """The k best logits; softmax over these alone."""
    return Router(family="topk_softmax")


def sigmoid_in_groups(config: Any) -> Router:
    """DeepSeek-V3's: sigmoid plus correction bias in the best groups; sigmoids renormalised and scaled."""
    return Router(
        family="sigmoid_groups",
        renormalise=bool(config.norm_topk_prob),
        scale=config.routed_scaling_factor,
        groups=config.n_group or 1,
        groups_kept=config.topk_group or 1,
    )
