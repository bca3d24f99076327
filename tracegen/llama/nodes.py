"""The routers in llama.cpp's graph of a pass: nodes `ffn_moe_NAME-LAYER` become rows of logits, choices and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moereplay.tracegen.errors import RecordError

PREFIX = b"ffn_moe_"
#: Nodes that are read. If there are several for logits or weights, the model uses the last computed one.
KINDS = {
    b"logits": "logits",
    b"logits_biased": "logits",
    b"probs": "scores",
    b"topk": "chosen",
    b"weights": "weights",
    b"weights_softmax": "weights",
    b"weights_norm": "weights",
    b"weights_scaled": "weights",
}
#: Where it exists, the scores are the logits with the gate's bias: a softmax of the chosen alone follows.
OF_THE_CHOSEN = b"weights_softmax"


class Pass(NamedTuple):
    """Routers of T tokens: L layers, E experts, k chosen."""

    layers: list[int]  #: the model's own numbers
    chosen: np.ndarray  #: (T, L, k) int32, best first
    weights: np.ndarray  #: (T, L, k) f32 as the experts get them
    logits: np.ndarray  #: (T, L, E) f32


class Routers:
    """Copies the routers of a pass while it runs; `name` and `values` read a node."""

    def __init__(self, name: Callable[[int], bytes], values: Callable[[int], np.ndarray]) -> None:
        self._name, self._values = name, values
        self._rows: dict[tuple[str, int], np.ndarray] = {}
        self._error: Exception | None = None

    def on_node(self, tensor: int, ask: bool) -> bool:
        """Before a node, return whether to stop after it; after it, copy its data. False would end the pass."""
        try:
            kind, layer = _parsed(self._name(tensor))
            if kind is None:
                return not ask
            if not ask:
                self._keep(kind, layer, self._values(tensor))
        except Exception as wrong:  # must not cross C; raised after the pass
            self._error = wrong
        return True

    def _keep(self, kind: bytes, layer: int, values: np.ndarray) -> None:
        what = KINDS[kind]
        width = self._rows["chosen", layer].shape[1] if what == "weights" else values.shape[-1]
        self._rows[what, layer] = values.reshape(-1, width)
        if kind == OF_THE_CHOSEN:
            self._rows["logits", layer] = self._rows["scores", layer]

    def take(self, tokens: int) -> Pass:
        """Return the data of the last pass (`tokens` tokens). Raises RecordError if a layer lacks a node or tokens."""
        rows, self._rows = self._rows, {}
        error, self._error = self._error, None
        if error:
            raise error if isinstance(error, RecordError) else RecordError(f"a router cannot be read: {error!r}")
        layers = sorted({layer for _, layer in rows})
        if not layers:
            raise RecordError("llama.cpp's graph of this model has no router: expected a Mixture of Experts")
        for kind, layer in ((kind, layer) for kind in ("logits", "chosen", "weights") for layer in layers):
            if (kind, layer) not in rows:
                raise RecordError(f"llama.cpp's graph of this model has no {kind} of the router in layer {layer}")
            if len(rows[kind, layer]) != tokens:
                found = len(rows[kind, layer])
                raise RecordError(f"layer {layer} routes {found} of {tokens} tokens; such a model cannot be recorded")
        found = {kind: [rows[kind, layer] for layer in layers] for kind in ("chosen", "weights", "logits")}
        if any(len({part.shape for part in parts}) > 1 for parts in found.values()):
            raise RecordError("layers have routers of different widths: expected the same in all layers")
        return Pass(layers, **{kind: np.stack(parts, 1) for kind, parts in found.items()})


def _parsed(name: bytes) -> tuple[bytes | None, int]:
    """Return the kind and layer of a router's node; None for other nodes, as `ffn_moe_probs-3 (reshaped)`."""
    kind, dash, layer = name.removeprefix(PREFIX).rpartition(b"-")
    if not name.startswith(PREFIX) or not dash or kind not in KINDS or not layer.isdigit():
        return None, 0
    return kind, int(layer)
