"""Sizes of a Mixture-of-Experts model from its Hugging Face `config.json`.

Families spell the same sizes differently; `KEYS` lists the spellings. A layer is described by two facts: how it mixes
tokens (attention, latent attention, a linear kind), and whether its MLP is dense or a mixture. Sums over layers follow
from `ModelNumbers`. Linear kinds are described as Mamba-2 with about the same number of weights; a checkpoint's own
headers (`traces/checkpoints/tensors.py`) are exact, and are used if they are available.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from moereplay.traces.geometry import Attention, LatentAttention, Mamba2, ModelNumbers, Published
from moereplay.traces.schema import MOST_EXPERTS, MOST_LAYERS, Router, TraceError, shown

Config = Mapping[str, Any]
Mixer = Attention | LatentAttention | Mamba2

#: Tables of a multimodal config that hold its language model.
TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
#: Spellings of each size, the first one found counts.
KEYS: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layers", "num_layers", "n_layer"),
    "hidden": ("hidden_size", "d_model", "n_embd"),
    "experts": (
        "num_experts",
        "n_routed_experts",
        "num_local_experts",
        "moe_num_experts",
        "num_routed_experts",
        "moe_num_primary_experts",
    ),
    "k": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "top_k_experts",
        "moe_topk",
        "moe_k",
        "moe_top_k",
        "experts_per_token",
        "num_selected_experts",
        "moe_num_active_primary_experts",
    ),
    "width": ("moe_intermediate_size", "expert_ffn_hidden_size", "expert_intermediate_size", "moe_ffn_hidden_size"),
    "dense_width": ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size", "ffn_hidden_size"),
    "shared": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "shared_width": (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
    ),
    "heads": ("num_attention_heads", "n_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_query_groups", "kv_n_heads"),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings", "max_seq_len", "model_max_length", "seq_length"),
    "mtp": ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"),
}
#: Families whose every MLP is a mixture, so that `intermediate_size` is the width of an expert.
EXPERT_WIDTH_IS_INTERMEDIATE = frozenset(
    """mixtral olmoe phimoe gpt_oss granitemoe granitemoeshared granitemoehybrid minimax minimax_m2 minimax_m3_vl_text
    minimax_text_01 llama4 llama4_text jamba flex_olmo cohere2_moe grok-1 grok1 hunyuan hunyuan_v1_moe dbrx aria_text
    minicpm skywork""".split()  # noqa: SIM905
)
SIGMOID = ("deepseek_v3", "glm4_moe", "glm_moe", "kimi", "minimax_m2", "bailing", "dots1", "nemotron_h", "lfm2_moe")
#: An MLP of two matrices, without a gate.
UNGATED = ("relu2", "relu_squared")


def numbers_of(config: Config, name: str, source: str) -> ModelNumbers:
    """Return the sizes that a `config.json` gives. Raises TraceError for missing sizes or no experts."""
    try:
        return _numbers(config, name, source)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as wrong:
        said = f"missing {wrong}" if isinstance(wrong, KeyError) else shown(str(wrong))
        raise TraceError(f"{name}: invalid config.json: {said}") from None


def _numbers(config: Config, name: str, source: str) -> ModelNumbers:
    text = _text_part(config)
    family = str(text.get("model_type") or config.get("model_type") or "")
    experts, k = _size(text, "experts", name), _size(text, "k", name)
    if not experts or experts == 1:
        raise TraceError(
            f"{name}: {shown(family or 'this model')} is without routed experts: expected a Mixture of Experts"
        )
    if not k:
        raise TraceError(f"{name}: missing number of active experts in config.json ({', '.join(KEYS['k'])})")
    mixing, mlps = _layers(text, name)
    width, dense_width = _widths(text, family, name)
    shared = _size(text, "shared", name) or 0
    try:
        return ModelNumbers(
            source=source,
            layers=sum(mlps),
            experts=experts,
            k=k,
            hidden=_needed(text, "hidden", name),
            width=width,
            matrices=2 if str(text.get("mlp_hidden_act", "")) in UNGATED else 3,
            shared=shared or (1 if _shared_width(text, width, 0, name) else 0),
            shared_width=_shared_width(text, width, shared, name),
            dense_layers=len(mlps) - sum(mlps),
            dense_width=dense_width if len(mlps) > sum(mlps) else 0,
            mixers=tuple(mixing),
            vocab=_needed(text, "vocab", name),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            context=_size(text, "context", name) or 0,
            mtp=_size(text, "mtp", name) or 0,
            router=_router(text, family),
            published=_published(config, text),
        )
    except ValidationError as wrong:
        raise TraceError(f"{name}: {wrong.errors()[0]['msg']}") from None


def _text_part(config: Config) -> Config:
    """Return the language model's part of the config, which multimodal configs nest one or two levels down."""
    for key in TEXT:
        if isinstance(inner := config.get(key), Mapping):
            return {**{name: value for name, value in config.items() if name not in TEXT}, **_text_part(inner)}
    return {**config, **ffn} if isinstance(ffn := config.get("ffn_config"), Mapping) else config


def _size(config: Config, what: str, name: str) -> int | None:
    """Return a size under any of its spellings; None if there is none. A list has one value for each layer."""
    for key in KEYS[what]:
        value = config.get(key)
        if isinstance(value, list) and value:
            value = max(value, key=lambda each: each if isinstance(each, int) else -1)
        if value is None:
            continue
        most = {"layers": MOST_LAYERS, "experts": MOST_EXPERTS, "k": MOST_EXPERTS}.get(what, 1 << 31)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise TraceError(f"{name}: invalid {key} {shown(value)}: expected a whole number from 0 to {most:,}")
        return value
    return None


def _needed(config: Config, what: str, name: str) -> int:
    found = _size(config, what, name)
    if not found:
        raise TraceError(f"{name}: config.json has none of {', '.join(KEYS[what])}")
    return found


def _widths(config: Config, family: str, name: str) -> tuple[int, int]:
    """Return the widths of an expert's MLP and of a dense layer's."""
    plain = _size(config, "dense_width", name) or 0
    width = _size(config, "width", name)
    if not width and family in EXPERT_WIDTH_IS_INTERMEDIATE:
        width = config.get("intermediate_size") or plain
    if not width:
        raise TraceError(f"{name}: config.json has none of {', '.join(KEYS['width'])}")
    return int(width), plain


def _shared_width(config: Config, width: int, shared: int, name: str) -> int:
    """Return the total width of all shared experts. Llama 4 has one that its config does not list."""
    stated = _size(config, "shared_width", name)
    if stated:
        return stated * max(shared, 1) if "share_expert_dim" not in config else stated
    if str(config.get("model_type", "")).startswith("llama4"):
        return width
    return shared * width


# -- layers


def _layers(config: Config, name: str) -> tuple[list[Mixer], list[bool]]:
    """Return how layers mix tokens, with the number of layers of each kind, and whether each MLP is a mixture."""
    pattern = config.get("hybrid_override_pattern") or config.get("layers_block_type")
    if pattern and config.get("model_type", "").startswith("nemotron"):
        return _nemotron(config, pattern, name)
    layers = _needed(config, "layers", name)
    kinds = Counter(_kinds(config, layers))
    mixers = [_mixer(config, kind, count, name) for kind, count in sorted(kinds.items())]
    mlps = _mixtures(config, layers)
    if not any(mlps):
        raise TraceError(f"{name}: no layer has routed experts: expected a Mixture of Experts")
    return _of_mixtures(mixers, layers, sum(mlps)), mlps


def _of_mixtures(mixers: list[Mixer], layers: int, mixtures: int) -> list[Mixer]:
    """Scale the counts of kinds to the layers that have experts; `ModelNumbers` spreads them over those."""
    if len(mixers) == 1:
        return [mixers[0].model_copy(update={"layers": None})]
    return [each.model_copy(update={"layers": (each.layers or 0) * mixtures / layers}) for each in mixers]


def _mixtures(config: Config, layers: int) -> list[bool]:
    """Return for each layer whether its MLP is a mixture of experts."""
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return [str(kind) not in ("dense", "mlp") for kind in kinds]
    listed = config.get("moe_layers")
    if isinstance(listed, list) and listed:
        return [at in listed for at in range(layers)]
    every = config.get("moe_layer_freq")
    if isinstance(every, list) and len(every) == layers:
        return [bool(each) for each in every]
    if "expert_layer_period" in config:
        period, offset = config["expert_layer_period"], config.get("expert_layer_offset", 0)
        return [at % period == offset for at in range(layers)]
    if step := config.get("interleave_moe_layer_step"):
        return [(at + 1) % step == 0 for at in range(layers)]
    first = next((config[key] for key in FIRST if isinstance(config.get(key), int)), 0)
    last = config.get("moe_layer_end_index", layers - 1)
    step = config.get("decoder_sparse_step") or config.get("moe_layer_interval") or 1
    step = every if isinstance(every, int) and every > 0 and step == 1 else step
    plain = config.get("mlp_only_layers") or []
    ernie = "decoder_sparse_step" in config or "moe_layer_interval" in config
    return [
        at >= first
        and at <= (last if isinstance(last, int) and last >= 0 else layers - 1)
        and at not in plain
        and ((at + 1 if ernie else at) % step == 0)
        for at in range(layers)
    ]


#: Number of dense layers that come first.
FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "n_dense_first_layers")


def _kinds(config: Config, layers: int) -> list[str]:
    """Return how each layer mixes tokens: full, sliding, linear, or conv."""
    found = config.get("layer_types")
    if isinstance(found, list) and len(found) == layers:
        return [_kind(str(each)) for each in found]
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(full := linear.get("full_attn_layers"), list):
        return ["full" if at + 1 in full else "linear" for at in range(layers)]
    listed = config.get("attn_type_list") or config.get("full_attn_idxs")
    if isinstance(listed, list) and listed:
        by_place = len(listed) == layers and set(listed) <= {0, 1}
        return ["full" if (listed[at] if by_place else at in listed) else "linear" for at in range(layers)]
    if period := config.get("attn_layer_period"):
        offset = config.get("attn_layer_offset", 0)
        return ["full" if at % period == offset else "linear" for at in range(layers)]
    every = config.get("full_attention_interval") or config.get("layer_group_size")
    if every:
        return ["full" if (at + 1) % every == 0 else "linear" for at in range(layers)]
    if config.get("attention_chunk_size"):  # Llama 4: chunks, but in the layers without positions
        every = config.get("no_rope_layer_interval") or 4
        return ["full" if (at + 1) % every == 0 else "sliding" for at in range(layers)]
    marked = config.get("sliding_window_layout") or config.get("hybrid_layer_pattern")
    if isinstance(marked, list) and len(marked) == layers:
        return ["sliding" if each else "full" for each in marked]
    sliding = config.get("sliding_window_pattern") or config.get("global_attn_every_n_layers")
    if isinstance(sliding, int) and sliding > 1 and config.get("sliding_window"):
        return ["full" if (at + 1) % sliding == 0 else "sliding" for at in range(layers)]
    return ["full"] * layers


def _kind(text: str) -> str:
    if re.search(r"linear|mamba|recurrent", text):
        return "linear"
    if "conv" in text:
        return "conv"
    return "sliding" if re.search(r"sliding|chunked|local", text) else "full"


def _mixer(config: Config, kind: str, count: int, name: str) -> Mixer:
    if kind == "linear":
        return _linear(config, count, name)
    if kind == "conv":  # in 3 x hidden, out hidden: Mamba-2 whose heads make up hidden
        hidden, kernel = _needed(config, "hidden", name), config.get("conv_L_cache", 3)
        return Mamba2(layers=count, heads=hidden // 128, head_dim=128, groups=8, state=hidden // 16, kernel=kernel)
    if config.get("kv_lora_rank"):
        return LatentAttention(
            layers=count,
            heads=_needed(config, "heads", name),
            query_rank=config.get("q_lora_rank") or 0,
            key_rank=config["kv_lora_rank"],
            plain=config.get("qk_nope_head_dim") or 0,
            rotary=config.get("qk_rope_head_dim") or 0,
            value=config.get("v_head_dim") or 0,
        )
    return _attention(config, kind, count, name)


def _attention(config: Config, kind: str, count: int, name: str) -> Attention:
    heads = _needed(config, "heads", name)
    nested = config.get("attn_config")
    grouped = nested.get("kv_n_heads") if isinstance(nested, Mapping) else None
    kv_heads = grouped or _size(config, "kv_heads", name) or heads
    width = config.get("head_dim") or config.get("kv_channels") or _needed(config, "hidden", name) // heads
    if kind == "full" and config.get("global_head_dim"):  # Gemma 4
        width, kv_heads = config["global_head_dim"], config.get("num_global_key_value_heads") or kv_heads
    gated = bool(config.get("attn_output_gate")) or str(config.get("model_type", "")).startswith(
        ("qwen3_next", "qwen3_5")
    )
    window = config.get("sliding_window") or config.get("attention_chunk_size") or 0
    return Attention(
        layers=count,
        heads=heads + heads // 2 if gated else heads,  # the gate is as wide as the queries
        kv_heads=kv_heads,
        head_dim=width,
        window=int(window) if kind == "sliding" else 0,
        **({"kv_projections": 1, "kept": 2} if kind == "full" and config.get("attention_k_eq_v") else {}),
        **(
            {"query_rank": config.get("q_lora_rank") or 0, **_grouped_output(config)} if "o_lora_rank" in config else {}
        ),
    )


def _grouped_output(config: Config) -> dict[str, int]:
    """Return the fields of DeepSeek-V4's attention, whose one key per position is also the value."""
    return {"output_rank": config["o_lora_rank"], "output_groups": config.get("o_groups") or 1, "kv_projections": 1}


def _linear(config: Config, count: float, name: str) -> Mamba2:
    """Describe a linear layer (Gated DeltaNet, KDA, lightning attention, Mamba or Mamba-2) as a Mamba-2 layer."""
    kernels = ("linear_conv_kernel_dim", "mamba_d_conv", "short_conv_kernel_size")
    kernel = next((config[key] for key in kernels if config.get(key)), 4)
    if config.get("linear_num_value_heads"):  # Gated DeltaNet
        keys = ("linear_num_value_heads", "linear_value_head_dim", "linear_num_key_heads", "linear_key_head_dim")
        heads, width, groups, state = (config[key] for key in keys)
    elif config.get("mamba_n_heads"):
        heads, width, state = config["mamba_n_heads"], config["mamba_d_head"], config["mamba_d_state"]
        groups = config.get("mamba_n_groups", 1)
    elif config.get("mamba_expand"):  # Mamba of the first kind: in 2 x inner, out inner
        heads, width = config["mamba_expand"] * _needed(config, "hidden", name) // 64, 64
        groups, state = 1, config["mamba_d_state"]
    else:  # queries, keys, values and output of heads x width, and the gates' low ranks, counted as half of one
        inside = config.get("linear_attn_config") or config
        heads = inside.get("linear_num_heads") or inside.get("num_heads") or _needed(config, "heads", name)
        width = inside.get("linear_head_dim") or inside.get("head_dim") or 128
        groups, state = heads, width // 2
    return Mamba2(layers=count, heads=heads, head_dim=width, groups=groups, state=state, kernel=kernel)


def _nemotron(config: Config, pattern: Any, name: str) -> tuple[list[Mixer], list[bool]]:
    """Read a pattern in which every layer is one of Mamba-2 (M), attention (*), a dense MLP (-), or a mixture (E)."""
    kinds = Counter(pattern) if isinstance(pattern, str) else Counter(_letter(str(each)) for each in pattern)
    mixtures, dense = kinds["E"], kinds["-"]
    if not mixtures:
        raise TraceError(f"{name}: no layer has routed experts: expected a Mixture of Experts")
    mamba = Mamba2(
        layers=kinds["M"],
        heads=config["mamba_num_heads"],
        head_dim=config["mamba_head_dim"],
        groups=config.get("n_groups", 1),
        state=config.get("ssm_state_size", 128),
        kernel=config.get("conv_kernel", 4),
    )
    return [mamba, _attention(config, "full", kinds["*"], name)], [True] * mixtures + [False] * dense


def _letter(kind: str) -> str:
    kind = kind.lower()
    return "M" if "linear" in kind or "mamba" in kind else "*" if "attention" in kind else "E" if "moe" in kind else "-"


# -- router and weight format


def _router(config: Config, family: str) -> Router:
    groups, kept = config.get("n_group") or config.get("num_expert_group") or 1, config.get("topk_group") or 1
    scale = config.get("routed_scaling_factor") or config.get("route_scale") or 1.0
    sigmoid = config.get("scoring_func") == "sigmoid" or config.get("score_function") == "sigmoid"
    if sigmoid or family.startswith(SIGMOID):
        kind = "sigmoid_groups"
    elif groups > 1:
        kind = "softmax_groups"
    elif family in ("gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid", "mixtral"):
        return Router(family="topk_softmax") if family != "mixtral" else Router(renormalise=True)
    elif family == "phimoe":
        return Router(family="sparsemixer", jitter=config.get("router_jitter_noise", 0.01))
    else:
        kind = "softmax_topk"
    renormalise = bool(config.get("norm_topk_prob", config.get("moe_renormalize", False)))
    return Router(family=kind, groups=groups, groups_kept=kept, scale=scale, renormalise=renormalise)


def _published(config: Config, text: Config) -> Published:
    """Return the weight format of the experts in the checkpoint, from `quantization_config`."""
    stored = config.get("quantization_config") or text.get("quantization_config")
    if not isinstance(stored, Mapping):
        return Published()
    method = str(stored.get("quant_method", ""))
    if method == "mxfp4":
        return Published(format="MXFP4", bits=4)
    if method == "fp8":
        return Published(format="FP8", bits=8)
    bits = stored.get("bits") or _group_bits(stored)
    return Published(format="", bits=bits) if isinstance(bits, int) and 1 <= bits <= 16 else Published()


def _group_bits(stored: Mapping[str, Any]) -> int | None:
    """Return the bits of the weights in a `compressed-tensors` configuration."""
    groups = stored.get("config_groups") or {}
    return next((group["weights"]["num_bits"] for group in groups.values() if group.get("weights")), None)
