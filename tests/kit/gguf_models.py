"""GGUF files of models of transformers: the bundled miniature and tiny random ones, in F32, Q8_0 or Q4_0.

Names, layouts and blocks are those of llama.cpp's convert_hf_to_gguf.py and ggml-quants.c.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.kit.tiny_checkpoints import CHARACTERS

#: Where transformers' attention and norms go; experts are below.
PLACES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class Architecture(NamedTuple):
    """llama.cpp's name of a model type, and its metadata, from transformers' configuration."""

    name: str
    own: Callable[[Any], dict[str, Any]] = lambda config: {}
    second_norm: str = "ffn_norm"
    interleaved: bool = False  #: gate and up, row by row, and experts the other way round


ARCHITECTURES = {
    "olmoe": Architecture("olmoe"),
    "qwen3_moe": Architecture(
        "qwen3moe", lambda config: {"expert_feed_forward_length": config.moe_intermediate_size} | _head(config)
    ),
    "gpt_oss": Architecture(
        "gpt-oss",
        lambda config: (
            {
                "expert_feed_forward_length": config.intermediate_size,
                "attention.sliding_window": config.sliding_window,
            }
            | _head(config)
        ),
        "post_attention_norm",
        interleaved=True,
    ),
    "glm4_moe": Architecture(
        "glm4moe",
        lambda config: (
            {
                "expert_feed_forward_length": config.moe_intermediate_size,
                "rope.dimension_count": config.head_dim // 2,
                "leading_dense_block_count": config.first_k_dense_replace,
                "expert_shared_count": config.n_shared_experts,
                "expert_gating_func": 2,
                "expert_weights_norm": True,
                "expert_weights_scale": float(config.routed_scaling_factor),
                "expert_group_count": config.n_group,
                "expert_group_used_count": config.topk_group,
            }
            | _head(config)
        ),
        "post_attention_norm",
    ),
}


def _head(config: Any) -> dict[str, int]:
    return {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}


def write_gguf(path: Path, model: Any, vocabulary: dict[str, Any], kind: str = "F32") -> Path:
    """Write a model of transformers with a vocabulary's metadata."""
    config = model.config
    made = ARCHITECTURES[config.model_type]
    experts = getattr(config, "n_routed_experts", None) or config.num_local_experts or config.num_experts
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "expert_count": experts,
        "expert_used_count": config.num_experts_per_tok,
    } | made.own(config)
    metadata = {"general.architecture": made.name} | {f"{made.name}.{key}": value for key, value in numbers.items()}
    tensors = _tensors({name: each.float().numpy() for name, each in model.state_dict().items()}, made)
    path.write_bytes(packed(metadata | vocabulary, tensors, kind))
    return path


def _tensors(state: dict[str, np.ndarray], made: Architecture) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, values in state.items():
        stem, _, ending = name.rpartition(".")
        if stem in OUTSIDE:
            found[f"{OUTSIDE[stem]}.{ending}"] = values
            continue
        _, _, layer, place = name.split(".", 3)
        if ".experts." in name:
            found |= {f"blk.{layer}.{each}": part for each, part in _experts(place, values, made.interleaved).items()}
            continue
        stem, _, ending = place.rpartition(".")
        if place in PLACES:  # without an ending of its own
            stem, ending = place, "bias" if "bias" in place else "weight"
        target = made.second_norm if stem == "post_attention_layernorm" else PLACES[stem]
        found[f"blk.{layer}.{target}.{ending}"] = values
    return found


def _experts(place: str, values: np.ndarray, interleaved: bool) -> dict[str, np.ndarray]:
    """All experts of a layer, (E, outputs, inputs) or their biases (E, outputs)."""
    ending = "bias" if place.endswith("bias") else "weight"
    if interleaved and ending == "weight":
        values = values.swapaxes(1, 2)
    if "down" in place:
        return {f"ffn_down_exps.{ending}": values}
    half = values.shape[1] // 2
    gate, up = (values[:, 0::2], values[:, 1::2]) if interleaved else (values[:, :half], values[:, half:])
    return {f"ffn_gate_exps.{ending}": gate, f"ffn_up_exps.{ending}": up}


# -- vocabularies


def characters() -> dict[str, Any]:
    """The vocabulary of `tiny_checkpoints.character_tokenizer`: <s>, a newline, and printable ASCII."""
    spelled = {" ": "\u0120", "\n": "\u010a"}
    return _vocabulary(["<s>", *(spelled.get(each, each) for each in CHARACTERS)], ["a b"], {0})


def of_tokenizer(path: Path) -> dict[str, Any]:
    """The vocabulary of a byte-level BPE's tokenizer.json."""
    read = json.loads(path.read_text())
    ids = {at: token for token, at in read["model"]["vocab"].items()}
    special = {each["id"]: each["content"] for each in read["added_tokens"]}
    tokens = [(ids | special)[at] for at in range(len(ids | special))]
    return _vocabulary(tokens, [" ".join(pair) for pair in read["model"]["merges"]], set(special))


def _vocabulary(tokens: list[str], merges: list[str], special: set[int]) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if at in special else 1 for at in range(len(tokens))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


# -- the format

BLOCK = 32


def q8_0(values: np.ndarray) -> np.ndarray:
    """Blocks of 32: a float16 scale, and bytes."""
    rows = values.reshape(-1, BLOCK).astype(np.float32)
    scale = np.abs(rows).max(1, keepdims=True) / 127
    cells = np.rint(rows / np.where(scale, scale, 1)).astype(np.int8)
    return np.concatenate([scale.astype("<f2").view(np.uint8), cells.view(np.uint8)], 1)


def q4_0(values: np.ndarray) -> np.ndarray:
    """Blocks of 32: a float16 scale, and half bytes, element i beside element i + 16."""
    rows = values.reshape(-1, BLOCK).astype(np.float32)
    widest = np.take_along_axis(rows, np.abs(rows).argmax(1, keepdims=True), 1)
    scale = widest / -8
    cells = np.clip(rows / np.where(scale, scale, 1) + 8.5, 0, 15).astype(np.uint8)
    return np.concatenate([scale.astype("<f2").view(np.uint8), cells[:, :16] | cells[:, 16:] << 4], 1)


KINDS = {"F32": (0, lambda values: values.astype("<f4")), "Q8_0": (8, q8_0), "Q4_0": (2, q4_0)}


def packed(metadata: dict[str, Any], tensors: dict[str, np.ndarray], kind: str = "F32") -> bytes:
    """A file of version 3. Matrices but a router's are of the kind, if their rows are whole blocks."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    data = bytearray()
    for name, values in tensors.items():
        whole = values.ndim > 1 and values.shape[-1] % BLOCK == 0 and not name.endswith(("inp.weight", "bias"))
        number, store = KINDS[kind if whole else "F32"]
        data += b"\0" * (-len(data) % 32)
        axes = struct.pack(f"<I{values.ndim}Q", values.ndim, *reversed(values.shape))
        head += _text(name) + axes + struct.pack("<IQ", number, len(data))
        data += np.ascontiguousarray(store(np.ascontiguousarray(values))).tobytes()
    return head + b"\0" * (-len(head) % 32) + bytes(data)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, list):  # a list of integers is of signed ones
        kind = 5 if isinstance(value[0], int) else _cell(value[0])[0]
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(_cell(each)[1] for each in value)
    kind, cell = _cell(value)
    return struct.pack("<I", kind) + cell


def _cell(value: Any) -> tuple[int, bytes]:
    if isinstance(value, str):
        return 8, _text(value)
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    return (6, struct.pack("<f", value)) if isinstance(value, float) else (4, struct.pack("<I", value))
